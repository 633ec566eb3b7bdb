"""SkyRL as its page starts it, and where its trainer is to build its models."""

import importlib
import re
import sys
from types import SimpleNamespace

import page_lines
import page_stops
import stand_ins

WORKERS = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker"
"""They patch classes of what loads models when they are imported."""


def start(folder, path, *, weighed=False):
    """Start SkyRL; return what was reached, or None, and the ended process.

    ``weighed``: SkyRL's own weights, as ``docs/weigh.md`` says.
    """
    given = ["trainer.strategy=megatron", "trainer.logger=console", "trainer.eval_interval=-1"]
    command = page_lines.words(
        page_lines.blocks("skyrl", "sh")[0], *given, "trainer.placement.colocate_all=false"
    )
    environment = {}
    if weighed:
        command.remove("loss_aggregation=prompt_mean")
        environment = dict(one.split("=") for one in page_lines.weighing("SkyRL"))
    return page_lines.started(command, folder, "skyrl_page", paths=[path], **environment)


def check(folder, path):
    """Start SkyRL; its trainer in Ray trains the page's ``prompt_mean``: 1 / (P n_p) by loops."""
    import pytest  # which SkyRL's processes need not import

    found, done = start(folder, path)
    assert found is not None, done.stderr[-4000:]
    assert found["policy"] == "PolicyWorker"
    line = re.search(
        r"It is on\*\* if step 1 prints `([^.`]*)", (page_lines.PAGES / "skyrl.md").read_text()
    )
    assert line[1] in done.stdout + done.stderr
    tokens = {prompt: 0 for prompt, _ in found["sequences"]}
    for prompt, n in found["sequences"]:
        tokens[prompt] += n
    for (prompt, n), weight in zip(found["sequences"], found["weights"], strict=True):
        assert weight == pytest.approx(1 / len(tokens) / tokens[prompt] if n else 0, rel=1e-6)


def stop():
    """SkyRL's trainer, where it is to build its models."""
    if page_stops.is_rays_own():
        return
    stand_ins.install(stand_ins.DATA, stand_ins.SERVERS, stand_ins.FORMATS, [WORKERS])
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    page_stops.once_imported("skyrl.train.entrypoints.main_base", _stops)


def _stops(module):
    import ray

    def build_models(trainer, policy, *others):
        from drawn_step import Step
        from skyrl_functions import batch, prompt_boundaries

        step, drawn = Step(), batch(Step())
        before, bounds = drawn["advantages"].clone(), [(0, len(step.lengths))]
        out = trainer._normalize_advantages(drawn, bounds, prompt_boundaries(step.prompts))
        weights = (out["advantages"] / before).nan_to_num(0).amax(-1)
        page_stops.reached(
            weights=weights[: len(step.lengths)].tolist(),
            sequences=[*zip(step.prompts, step.lengths, strict=True)],
            policy=policy.__ray_actor_class__.__name__,
        )

    module.RayPPOTrainer.build_models = build_models
    worker = ray.remote(num_gpus=1)(type("PolicyWorker", (), {}))
    importlib.import_module(WORKERS).PolicyWorker = worker
    module.get_tokenizer = lambda *_, **__: SimpleNamespace(pad_token_id=0)
    experiment = module.BasePPOExp
    experiment.get_train_dataset = experiment.get_inference_client = lambda *_: None
    experiment.get_generator = lambda *_: None
