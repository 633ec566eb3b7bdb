"""Where a framework that was started by its page's line stops, and what it has by then.

In each of its processes (``page_lines.py``). What the frameworks import and do not call on the way
has stand-ins; what has to be right is written to the file ``REACHED``.
"""

import contextlib
import importlib
import importlib.machinery
import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import stand_ins


class ReachedError(Exception):
    """The process came to where it would need a GPU."""


def reached(**found):
    """Write what was found, and end the process."""
    Path(os.environ["REACHED"]).write_text(json.dumps(found))
    raise ReachedError(f"reached {found}")


def hooks_of(function):
    """Return the hooks that ``_shared.py`` put around a framework's schedule."""
    from megatron_lossagg.loop.schedule_hook import ScheduleHook

    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return [one for one in held if isinstance(one, ScheduleHook)]


def once_imported(name, change):
    """Call ``change(module)`` as soon as a module is imported."""
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder:
    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = changed
        return spec


def is_rays_own():
    """Whether this is one of Ray's own processes, which runs nothing of a user's."""
    words = [word for word in sys.orig_argv if word.endswith(".py") and "/ray/" in word]
    return any("/workers/" not in word for word in words)


def is_torchs_launcher():
    """Whether this process only starts the ranks."""
    return any(word.endswith("torchrun") for word in sys.orig_argv[:2])


SKYRL_WORKERS = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker"
"""They patch Bridge's classes when they are imported."""


def skyrl():
    """SkyRL's trainer, where it is to build its models."""
    if is_rays_own():
        return
    stand_ins.install(stand_ins.DATA, stand_ins.SERVERS, stand_ins.SKYRL, [SKYRL_WORKERS])
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    once_imported("skyrl.train.entrypoints.main_base", _skyrl_stops)


def _skyrl_stops(module):
    import ray

    def build_models(trainer, policy, *others):
        from drawn_step import Step
        from skyrl_functions import batch, prompt_boundaries

        step, drawn = Step(), batch(Step())
        before, bounds = drawn["advantages"].clone(), [(0, len(step.lengths))]
        out = trainer._normalize_advantages(drawn, bounds, prompt_boundaries(step.prompts))
        weights = (out["advantages"] / before).nan_to_num(0).amax(-1)
        reached(
            weights=weights[: len(step.lengths)].tolist(),
            sequences=[*zip(step.prompts, step.lengths, strict=True)],
            policy=policy.__ray_actor_class__.__name__,
        )

    module.RayPPOTrainer.build_models = build_models
    worker = ray.remote(num_gpus=1)(type("PolicyWorker", (), {}))
    importlib.import_module(SKYRL_WORKERS).PolicyWorker = worker
    module.get_tokenizer = lambda *_, **__: SimpleNamespace(pad_token_id=0)
    experiment = module.BasePPOExp
    experiment.get_train_dataset = experiment.get_inference_client = lambda *_: None
    experiment.get_generator = lambda *_: None


def verl():
    """verl's trainer, where it is to start its workers; its task has their environment."""
    if is_rays_own():
        return
    stand_ins.install(stand_ins.DATA, stand_ins.ENGINES, stand_ins.AGENT_LOOP)
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # of which there is none
    once_imported("verl.trainer.ppo.v1.trainer_base", _verl_stops)


def _verl_stops(module):
    def init(trainer):
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.engine import EngineRegistry

        actor = trainer.config.actor_rollout_ref.actor
        (mode, *_) = get_policy_loss_fn(actor.policy_loss.loss_mode).args
        reached(
            engine=EngineRegistry.get_engine_cls("language_model", actor.strategy).__module__,
            aggregation=str(mode.aggregation(actor.loss_scale_factor)),
        )

    module.PPOTrainer.init = init


def ms_swift():
    """ms-swift's trainer, where it is to build its model; its data are not read before."""
    if any("/_megatron/" in word for word in sys.orig_argv):
        import imports_swift  # noqa: F401

        once_imported("swift.megatron.pipelines.train.sft", _ms_swift_stops)
    else:  # the command, which starts that
        stand_ins.install(stand_ins.DATA, stand_ins.SWIFT)


def _without(name, parser):
    """Let a parser of a dataclass's arguments pass by a field."""

    class Parser(parser):
        def _parse_dataclass_field(self, given, field):
            if field.name == name:
                given.set_defaults(**{name: None})
            else:
                parser._parse_dataclass_field(given, field)

    return Parser


def _ms_swift_stops(module):
    from swift.megatron.trainers import base
    from swift.utils import utils

    # transformers' parser cannot read the type of this field: isinstance(None, List[str]).
    utils.HfArgumentParser = _without("cp_comm_type", utils.HfArgumentParser)

    def prepare_model(trainer):
        (hook,) = hooks_of(base.get_forward_backward_func)
        reached(trainer=type(trainer).__name__, aggregation=str(hook.aggregation))

    base.BaseMegatronTrainer.prepare_model = prepare_model
    module.MegatronSft._prepare_dataset = lambda pipeline: pipeline.prepare_trainer()


def slime():
    """slime, where it is to place its workers; its arguments are as every worker gets them."""
    _rollout_stops("slime")


def miles():
    """The same of miles."""
    _rollout_stops("miles")


def _rollout_stops(name):
    from megatron_lossagg.cpu.training import install_training

    stand_ins.install(stand_ins.RAY, stand_ins.DATA, stand_ins.SERVERS)
    stand_ins.install(stand_ins.SERVING, stand_ins.ROLLOUTS)
    install_training()

    def stops(module):
        def create_placement_groups(args):
            from megatron_lossagg.integrations._rollouts import checked_aggregation

            load = sys.modules[f"{name}.utils.misc"].load_function
            init = load(args.custom_megatron_init_path)
            init(args)  # as each worker does
            hooks = getattr(sys.modules[init.__module__], "HOOKS", None)
            if hooks is None:  # it weighs
                schedule = sys.modules[f"{name}.backends.megatron_utils.model"]
                reached(weighs=hasattr(schedule.get_forward_backward_func, "__wrapped__"))
            reached(
                aggregation=str(checked_aggregation(args, hooks)),
                carries=load(getattr(args, hooks.carry_argument)).__qualname__,
            )

        module.create_placement_groups = create_placement_groups

    once_imported(f"{name}.ray.placement_group", stops)
    once_imported(f"{name}.backends.sglang_utils.arguments", _without_an_engine)


def _without_an_engine(module):
    """Leave out the arguments of SGLang, which are not there without it."""
    module.validate_args = lambda args: None


def _bridge_reached():
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import train

    (hook,) = hooks_of(train.get_forward_backward_func)
    assert hooks_of(evaluation.get_forward_backward_func) == [hook]
    reached(aggregation=str(hook.aggregation))


def bridge():
    """Megatron-Bridge, where it is to set up its model; its configuration is checked by then."""
    import imports_bridge  # noqa: F401
    from megatron.bridge.training import pretrain

    pretrain.setup = lambda *given, **more: _bridge_reached()


def llama_factory():
    """LLaMA-Factory, where it is to configure Bridge or to load mcore_adapter's model; no data."""
    if is_torchs_launcher():
        return
    if "USE_MCA" in os.environ:
        from megatron_lossagg import cpu

        cpu.install()
        stand_ins.install(stand_ins.LLAMA_FACTORY)
        once_imported("llamafactory.train.mca.workflow", _mca_stops)
        return
    bridge()
    stand_ins.install(stand_ins.LLAMA_FACTORY)

    def stops(workflow):
        workflow._load_aligned_datasets = lambda *given: ([0], {})
        workflow._run_on_main_process = lambda *given: None
        workflow.ensure_megatron_pretrained_checkpoint = lambda **given: "."
        workflow.build_sft_config = lambda **given: _bridge_reached()

    once_imported("llamafactory.train.megatron_bridge.workflow", stops)


def _mca_stops(workflow):
    from mcore_adapter.trainer import trainer

    def from_pretrained(*given, **more):
        (hook,) = hooks_of(trainer.get_forward_backward_func)
        reached(aggregation=str(hook.aggregation))

    workflow.AutoModel.from_pretrained = from_pretrained
    workflow.get_dataset = lambda *given, **more: {}


def primus():
    """Primus, where Megatron-LM is to set up its model; its arguments are parsed by then."""
    if is_torchs_launcher():
        return
    from megatron_lossagg.cpu.training import install_training

    stand_ins.install(stand_ins.MEGATRON_LM)
    install_training()
    from megatron.training import training

    def setup(*given, **more):
        (hook,) = hooks_of(training.get_forward_backward_func)
        reached(aggregation=str(hook.aggregation))

    training.initialize_megatron = setup


def areal():
    """AReaL, where its controller is to start the actor's workers, and what it tells them."""
    import tiny_gpt  # noqa: F401  it lets Megatron-Core run on a CPU

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
    importlib.import_module("torch._inductor.compile_fx")  # must see that there is no triton
    stand_ins.install(stand_ins.RAY, stand_ins.DATA, stand_ins.AREAL)

    def stops(module):
        def initialize(controller, *given, role, **more):
            from megatron_lossagg.integrations.areal import _of_environment

            engine = controller.train_engine
            (spec,) = controller.config.scheduling_spec
            os.environ.update(spec.env_vars)  # as its scheduler does in a worker
            weighs = spec.env_vars.get("LOSSAGG_WEIGH")
            reached(
                aggregation=None if weighs else str(_of_environment()),
                weighs=bool(weighs),
                engine=f"{engine.__module__}.{engine.__name__}",
                role=role,
            )

        module.TrainController.initialize = initialize

    def parsed(module):
        def from_str(backend, name=None):  # the parser's own is lark's
            size = SimpleNamespace(data_parallel_size=1, dp_size=1, world_size=1)
            return SimpleNamespace(backend=backend.partition(":")[0], parallel=size)

        module.ModelAllocation.from_str = from_str

    once_imported("areal.infra.controller.train_controller", stops)
    once_imported("areal.api.alloc_mode", parsed)


def nemo_rl():
    """NeMo-RL, where its trainer has its loss function; models, data and Ray come before."""
    import typing

    import tiny_gpt  # noqa: F401  it lets Megatron-Core run on a CPU
    import typing_extensions

    stand_ins.install(stand_ins.RAY, stand_ins.DATA, stand_ins.SERVERS, stand_ins.NEMO)
    stand_ins.install(stand_ins.NEMO_WORKER)
    typing.TypedDict = typing_extensions.TypedDict  # pydantic models, before Python 3.12
    stand_ins.older_transformers()

    def stops(module):
        def setup(config, *given, **more):
            loss_fn = module.ClippedPGLossFn(config.loss_fn)
            checkpointer = contextlib.nullcontext()
            return (*[None] * 6, loss_fn, None, checkpointer, None, config, None, None)

        def grpo_train(*given):
            from megatron_lossagg.integrations.weigh_rl import _install_once

            loss_fn = pickle.loads(pickle.dumps(given[5]))  # as each worker does
            aggregation = vars(loss_fn).get("aggregation")
            reached(
                aggregation=aggregation and str(aggregation),
                of=type(loss_fn.loss_fn).__name__,
                weighs=bool(_install_once.cache_info().currsize),
            )

        module.setup, module.grpo_train = setup, grpo_train

    def without(module):
        module.setup_response_data = lambda *given: (None, None, {}, {})

    once_imported("nemo_rl.algorithms.grpo", stops)
    once_imported("nemo_rl.data.utils", without)
