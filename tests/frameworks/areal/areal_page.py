"""AReaL as its page starts it, and where its controller is to start the actor's workers."""

import importlib
import os
from types import SimpleNamespace

import page_lines
import page_stops
import stand_ins


def start(folder, *, weighed=False):
    """Start AReaL with its own file of arguments; return what was reached, and the process.

    ``weighed``: AReaL's own weights, as ``docs/weigh.md`` says.
    """
    before = """
import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, SchedulingSpec, load_expr_config

config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
# omegaconf 2.4.0.dev2, which AReaL pins, makes them of a file's dicts.
config.actor.scheduling_spec = [SchedulingSpec(**one) for one in config.actor.scheduling_spec]
train_dataset = valid_dataset = [{"messages": []}] * 8
"""
    text, environment = page_lines.blocks("areal", "python")[0], {}
    if weighed:
        variable, stock = page_lines.weighing("AReaL")
        text = text.replace('aggregated(PPOTrainer, Aggregation("sample_mean"))', stock)
        assert stock in text
        environment = dict([variable.split("=")])
    (folder / "train.py").write_text(before + text)
    checkout, model = page_lines.checkout_of("AReaL"), page_lines.tiny_model(folder)
    file = checkout / "examples" / "math" / "gsm8k_grpo_megatron.yaml"
    command = ["python", "train.py", "--config", str(file), "scheduler.type=local"]
    command += [f"actor.path={model}", f"cluster.fileroot={folder}"]
    command += [f"cluster.name_resolve.nfs_record_root={folder}"]
    return page_lines.started(command, folder, "areal_page", paths=[checkout], **environment)


def stop():
    """AReaL, where its controller is to start the actor's workers, and what it tells them."""
    import tiny_gpt  # noqa: F401  it lets Megatron-Core run on a CPU

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
    importlib.import_module("torch._inductor.compile_fx")  # must see that there is no triton
    stand_ins.install(stand_ins.of("areal", but=stand_ins.HYDRA))

    def stops(module):
        def initialize(controller, *given, role, **more):
            from megatron_lossagg.integrations.areal import _of_environment

            engine = controller.train_engine
            (spec,) = controller.config.scheduling_spec
            os.environ.update(spec.env_vars)  # as its scheduler does in a worker
            weighs = spec.env_vars.get("LOSSAGG_WEIGH")
            page_stops.reached(
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

    page_stops.once_imported("areal.infra.controller.train_controller", stops)
    page_stops.once_imported("areal.api.alloc_mode", parsed)
