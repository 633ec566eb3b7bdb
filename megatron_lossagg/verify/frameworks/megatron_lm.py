"""Megatron-LM: the user's own ``pretrain_gpt.py`` with an aggregation, in three layouts.

A small model, mock data, three steps on the CPU. On one process every step is also computed by the
reference, each entry of the batch by itself through the model; other layouts must train the same.
"""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.outcome import FrameworkError, NotRunError, over
from megatron_lossagg.verify.frameworks.check import Check, Comparison
from megatron_lossagg.verify.frameworks.megatron_lm_rank import ScriptJob
from megatron_lossagg.verify.job import Event, launched

_LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "DP 1": (1, ()),
    "DP 2": (2, ()),
    "CP 2": (2, ("--context-parallel-size", "2")),
}
"""Processes and options."""
_STEPS = 3
OPTIONS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 "
    f"--train-iters {_STEPS} --lr 1e-3 --lr-decay-style constant --split 90,5,5 --eval-iters 1 "
    "--eval-interval 100 --log-interval 1 --transformer-impl local --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--untie-embeddings-and-output-weights"
)
"""A small model on a CPU; the data is missing."""
# Padded to 256 at every TP: the padding is a part of the model.
MOCK = shlex.split("--tokenizer-type NullTokenizer --vocab-size 250 --mock-data --eod-mask-loss")
_TIMEOUT = 180.0


def checks(aggregation: Aggregation) -> list[Check]:
    """List the checks, one per layout; finds the script next to ``megatron/``."""
    script = _script()
    if aggregation.mode == "prompt_mean":
        raise NotRunError(
            "pretrain_gpt.py has no prompts, expected a mode without them: choose another "
            "--loss-aggregation"
        )

    wanted: list[Event] = []

    def compare(layout: str) -> Comparison:
        if not wanted and layout != "DP 1":
            raise NotRunError("got no steps of DP 1, which the reference computes: see its check")
        events = _run(script, aggregation, layout)
        got = [event for event in events if "step" in event]
        wanted.extend(event for event in events if "wanted" in event)  # of DP 1 only
        if not len(got) == len(wanted) == _STEPS:
            raise FrameworkError(f"got {len(got)} training steps in {layout}, expected {_STEPS}")
        return _worst(got, wanted)

    return [
        Check(
            f"pretrain_gpt.py, {aggregation.mode}, {layout}, {_STEPS} steps",
            "megatron.training.training.train_step",
            partial(compare, layout),
            gradient="norm of the gradient",
        )
        for layout in _LAYOUTS
    ]


def _script() -> Path:
    spec = find_spec("megatron.training")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    scripts = [Path(folder).parent.parent / "pretrain_gpt.py" for folder in folders]
    for script in scripts:
        if script.is_file():
            return script
    raise NotRunError(
        f"got no {' or '.join(map(str, scripts)) or 'megatron.training'}, expected the script of a "
        "Megatron-LM checkout: put its folder on PYTHONPATH"
    )


def _run(script: Path, aggregation: Aggregation | None, layout: str) -> list[Event]:
    """Run the script in a layout, stock without an aggregation; return its events.

    Raises :class:`NotRunError` if the stock script fails too, else :class:`FrameworkError`.
    """
    processes, more = _LAYOUTS[layout]
    job = ScriptJob(
        script=script,
        arguments=[*OPTIONS, *MOCK, *more],
        aggregation=aggregation,
        with_reference=processes == 1,
    )
    events: list[Event] = []
    try:
        done = launched(job, events.append, processes=processes, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as expired:
        raise NotRunError(
            f"{script} did not end within {expired.timeout:.0f} s in the layout {layout}: run it "
            "by itself with lossagg run --cpu"
        ) from expired
    if done.returncode:
        error = _first_error(done.stderr)
        if aggregation is None:
            remedy = "Run it by itself with lossagg run --cpu"
            if "helpers_cpp" in error:  # built for the Python whose python3-config make finds
                datasets = script.parent / "megatron" / "core" / "datasets"
                suffix = sysconfig.get_config_var("EXT_SUFFIX")
                remedy = f"Build it for this Python: make -C {datasets} LIBEXT={suffix}"
            raise NotRunError(
                f"{script} fails in the layout {layout} without an aggregation too: {error}. "
                f"{remedy}"
            )
        _run(script, None, layout)
        raise FrameworkError(
            f"{script} fails in the layout {layout}, in which it runs stock: {error}"
        )
    return events


def _first_error(text: str) -> str:
    """Return the first error that a rank printed."""
    lines = [line.rpartition("]: ")[2] for line in text.splitlines()]
    kinds = ("Error", "Exit", "lossagg")  # the last: what the command itself refuses
    errors = [line for line in lines if line.partition(":")[0].endswith(kinds)]
    return (errors or lines or ["nothing printed"])[0]


def _worst(got: list[Event], wanted: list[Event]) -> Comparison:
    """Compare step by step; return the step that differs most."""
    comparisons = []
    for one, other in zip(got, wanted, strict=True):
        loss, norm = one["step"]["lm loss"], one["grad_norm"]
        comparisons.append(
            Comparison(
                got=loss,
                wanted=other["wanted"],
                loss_error=over(abs(loss - other["wanted"]), abs(other["wanted"])),
                gradient_error=over(abs(norm - other["grad_norm"]), other["grad_norm"]),
                factor=over(norm, other["grad_norm"]),
            )
        )
    return max(comparisons, key=lambda found: max(found.loss_error, found.gradient_error))
