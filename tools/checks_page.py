"""Prints ``docs/reference/checks.md`` from the code: ``python -m tools.checks_page``.

Of a check the page has the first sentence of its docstring, of a guard what it catches and costs.
A test compares the page with what is printed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lossagg.contract import outputs  # noqa: E402
from megatron_lossagg.contract.megatron_options import OPTIONS  # noqa: E402
from megatron_lossagg.guards import GUARDS, framework_loss, refilled  # noqa: E402
from megatron_lossagg.guards.before import BEFORE_A_STEP  # noqa: E402
from megatron_lossagg.guards.each_step import refuse_training, without_gradient  # noqa: E402
from megatron_lossagg.guards.guard import Guard, SequenceTracker  # noqa: E402
from megatron_lossagg.reduction import aggregation, checks, layout, sequences  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "checks.md"
_AT_THE_START = {
    "contract.megatron_options": f"[{len(OPTIONS)} conditions](options.md)",
    "contract.model:checked_loss_scaling": "refused: a wrapper that is not Megatron-Core's "
    "DDP or Megatron-FSDP, a release before 0.13",
    "contract.model:LiveGroups.of": "",
    "guards.frozen:Frozen": "[what](../megatron-contract.md#frozen-and-live)",
    "guards.frozen:agreed": "",
    "loop.probe": "[how](../megatron-contract.md#the-probe)",
}
"""Modules, classes or functions, and where more is said of them."""
_VALUES = {
    aggregation: "an aggregation's numbers: its divisor, its exponent, what it counts",
    sequences: "counts, weights and ids of sequences, and the ids of all ranks",
    layout: "lengths, offsets and ranks from which a layout is made",
    checks: "a microbatch: its sequences, mask, losses, positions and token weights",
}
"""What the checks of a module of ``reduction/`` look at."""
_EVENTS = {
    "on_term": "`mb.reduce`",
    "on_unusual_term": "`mb.reduce`",
    "on_first_outputs": "`mb.outputs`",
    "on_unusual_outputs": "`mb.outputs`",
    "on_finalize": "finalize",
    "on_finish": "the end",
    "together": "the end",
}
"""The methods of a guard, and what a step calls them in."""

_PAGE = """\
# What is checked

A *refusal* stops a step before it begins, a *check* looks at a value, a *guard* at a running step.
Only the probe can be switched off; `--loss-aggregation-guards warn` turns what a guard finds into
a warning. `python -m tools.checks_page` prints this page from the code.

## When a run starts

`LossAggregator(...)` raises on every rank what it finds on one
([what it communicates](../collectives.md#collectives-and-host-syncs)).

{start}

## Before a step

`aggregator.step` and `aggregator.begin` look in this order, without a collective and without
waiting for a device. `plan_step` has checked counts and ids by then. After it the pipeline stages
compare M.

{before}

## Values

The algebra calls these checks, with and without a step. On the CPU they raise immediately. What
they find on a device is raised [when the step finishes](../collectives.md#faults-on-a-device).

{values}

## While a step runs

The guards, in the order in which they look:

{guards}

What each looks at on [Megatron-FSDP](options.md#megatron-fsdp), in place of a gradient buffer:

| guard | there |
|---|---|
| `GradientBuffers` | the `main_grad_buffer` of each group, and the instance's with full hybrid \
sharding. Under `optim_grads` and `optim_grads_params` this rank's shard: each rank that has some \
refuses gradients that are not zero; the warning of gradients that are all zero is off, because \
other ranks may have some |
| `changed_config`, `frozen` | the `gradient_scaling_factor` of these |
| `early_reduction` | `no_sync_func`, which must be the wrapper's or that of what it wraps |
| `Outcome` | what the wrapper returns |
| the others, `Options.record` | nothing of a wrapper |

Only `Ownership` and `Replicas` communicate there, over the context-parallel and the tensor-parallel
ranks. Shown by `tests/guards/test_guards.py -k fsdp`, which runs the rows of the table of faults
that have to do with a wrapper, and `tests/loop/engine_worker.py`.

**Not compared** between tensor-parallel ranks: factors of losses that are made of logits, before
`mb.reduce`. [Weighing](../weigh.md) compares them.

`mb.outputs` also looks at:

{outputs}

The schedule hook also looks at the first of these, `StepBuffer`, which reads data, at the second:

{hook}

## When a step finishes

`step.finish`, which the end of `with` calls, looks in this order. What 1 or 2 finds first is raised
after 3.

1. {tracker}
2. The guards that look at the end, in their order: {finishing}.
3. {together} compare the ranks of their groups, even if this rank has failed: none waits.
4. What the checks of [values](#values) recorded on a device.

Then `Options.record` writes the step's line.
"""


def page() -> str:
    """Return the whole page."""
    return _PAGE.format(
        start="\n".join(_start()),
        before="\n".join(_functions(BEFORE_A_STEP)),
        values="\n".join(_values()),
        guards="\n".join(_guards()),
        outputs="\n".join(_functions((*_checks_of(outputs), without_gradient, refuse_training))),
        hook="\n".join(_modules(framework_loss, refilled)),
        tracker=next(_functions([SequenceTracker])).removeprefix("- "),
        finishing=", ".join(_overriding("on_finish")),
        together=" and ".join(_overriding("together")),
    )


def _start() -> Iterator[str]:
    for name, link in _AT_THE_START.items():
        sentence = _first_sentence(resolve_name(f"megatron_lossagg.{name}"))
        more = f" ({link})" if link else ""
        own_name = name.partition(":")[2] or name.partition(".")[2]
        yield f"- `{own_name}`: {sentence.removesuffix('.')}{more}."


def _values() -> Iterator[str]:
    for module, looked_at in _VALUES.items():
        yield f"- **`{module.__name__.rpartition('.')[2]}`**: {looked_at}"
        yield from (f"    {line}" for line in _functions(_checks_of(module)))


def _checks_of(module: ModuleType) -> list[Callable[..., Any]]:
    """Return the public checks that a module defines."""
    own = [
        one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    ]
    checks_of = [one for one in own if one.__name__.startswith("check")]
    return sorted(checks_of, key=lambda check: check.__name__)


def _functions(functions: Iterable[Callable[..., Any]]) -> Iterator[str]:
    for function in functions:
        yield f"- `{function.__name__}`: {_first_sentence(function)}"


def _guards() -> Iterator[str]:
    yield "| guard | looks in | what would train wrongly without it | costs |"
    yield "|---|---|---|---|"
    for guard in GUARDS:
        looks = {
            words: None  # in their order, once each
            for method, words in _EVENTS.items()
            if getattr(guard, method) is not getattr(Guard, method)
        }
        yield f"| `{guard.__name__}` | {', '.join(looks)} | {guard.catches} | {guard.costs} |"


def _overriding(method: str) -> Iterator[str]:
    for guard in GUARDS:
        if getattr(guard, method) is not getattr(Guard, method):
            yield f"`{guard.__name__}`"


def _modules(*modules: ModuleType) -> Iterator[str]:
    for module in modules:
        yield f"- `{module.__name__.rpartition('.')[2]}`: {_first_sentence(module)}"


def _first_sentence(documented: object) -> str:
    """Return the first sentence of a docstring, in Markdown."""
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    text = re.sub(r":(?:class|func|meth|mod|data):`~?([\w.]+)`", r"`\1`", text.replace("``", "`"))
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
