"""Runs a framework's driver in processes of its own, and says how each mode ended.

Importing a framework may be slow, may fail, and may end the process. An :class:`Outcome` is how a
mode ended, or why it could not run, in words and in cells.
"""

from __future__ import annotations

import math
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import megatron_lossagg
from megatron_lossagg.errors import ContractError, LossAggregationError, ProofError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers import imports
from megatron_lossagg.verify.drivers.imports import install_line, missing_modules, not_found
from megatron_lossagg.verify.drivers.table import FRAMEWORKS, driver_of, own_package, release
from megatron_lossagg.verify.job import Event, failure_of, launched
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.text import error_text, number_of

if TYPE_CHECKING:
    from megatron_lossagg.verify.drivers.driver import Driver, Reference
    from megatron_lossagg.weigh.compare import Weighed


State = Literal["PASS", "FAIL", "NOT RUN"]
PASS: State = "PASS"
FAIL: State = "FAIL"
NOT_RUN: State = "NOT RUN"
_PACKAGE = Path(megatron_lossagg.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a mode or a check ended; numbers are None if there was nothing to compare."""

    check: str
    function: str
    state: State
    got: float | None = None
    """The loss: of a driver, what the framework logs."""
    wanted: float | None = None
    loss_error: float | None = None
    """Relative, of a driver the largest of all that is logged."""
    gradient_error: float | None = None
    """Relative, of a driver the largest of a token's weight, which is the gradient at its loss."""
    factor: float | None = None
    tolerance: float | None = None
    explanation: str = ""


class NotRunError(LossAggregationError):
    """A check that cannot run here; the message has the reason and what to change."""


class FrameworkError(LossAggregationError):
    """A framework lacks what its integration uses, or fails under it."""


def outcome_of(event: Event, framework: str) -> Outcome:
    """Return how a mode of ours ended in a step."""
    followed = {  # a term that the driver does not know and that trains something is one too many
        name: term["error"]
        for name, term in event["terms"].items()
        if term["follows"] or (term["follows"] is None and term["weighed"]["tokens"])
    }
    missing, logged = event["missing"], event["logged"]
    errors = [math.inf if e is None else e for e in followed.values()]
    weights = math.inf if missing else max(errors, default=math.inf)
    losses = max((abs(over(got - want, want)) for got, want in logged.values()), default=math.inf)
    is_right = max(weights, losses) < event["tolerance"]
    got, wanted = next(iter(logged.values()), (None, None))
    said = [f"got no term {name}" for name in missing]
    said += [f"{name}: {event['terms'][name]['verdict']}" for name in followed]
    said += [f"{k}: got a loss of {a:.9g}, expected {b:.9g}" for k, (a, b) in logged.items()]
    return Outcome(
        check=event["trained"],
        function=event["function"],
        state=PASS if is_right else FAIL,
        got=got,
        wanted=wanted,
        loss_error=losses,
        gradient_error=weights,
        tolerance=event["tolerance"],
        explanation="" if is_right else f"{'; '.join(said)}. {release(framework)}",
    )


def over(difference: float, size: float) -> float:
    """Divide; 0 / 0 is 0. What is not finite is inf, never NaN."""
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    quotient = difference / size
    return quotient if math.isfinite(quotient) else math.inf


def ended_by(error: BaseException, framework: str) -> Outcome:
    """Describe what importing a framework raised.

    Not run: :class:`NotRunError`, a missing package that is not the framework itself, and whatever
    the framework's own import raises. All else fails. If an import ends for a missing package, all
    that are missing are named, and this process can run nothing more.
    """
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}"
    missing, own = not_found(error), own_package(framework)
    is_of_others = missing is not None and not f"{missing}.".startswith(f"{own}.")
    names, state = [], NOT_RUN
    if isinstance(error, NotRunError) or is_of_others:
        names = missing_modules(FRAMEWORKS[framework].imports, own=own)
    if names:
        text = f"got no {', '.join(names)}: {install_line(names)}, or run where {framework} trains"
    elif isinstance(error, NotRunError):
        text = str(error)
    elif is_of_others:
        install = f": {install_line([missing])}, or run" if missing else ". Run"
        text += f"{install} where {framework} trains"
    elif not _is_raised_here(error):
        text += f". Run where python can import {framework}"
    else:
        state, text = FAIL, f"got {text}, expected what the integration uses. {release(framework)}"
    name = f"import of {framework}"
    return Outcome(check=name, function="", state=state, explanation=text)


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package's own code raised it, such as by a name that the framework lacks."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if not file.startswith("<frozen")]
    return bool(files) and Path(files[-1]).is_relative_to(_PACKAGE)


def none_ran(outcomes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing of the framework ran."""
    return all(outcome["state"] == NOT_RUN for outcome in outcomes)


def counted(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Count outcomes: ``4 of 6 checks of its own code pass, 1 fails, 1 not run``."""
    number = dict.fromkeys((PASS, FAIL, NOT_RUN), 0)
    for outcome in outcomes:
        number[outcome["state"]] += 1
    pass_ = "passes" if len(outcomes) == 1 else "pass"
    checks = number_of(len(outcomes), "check")
    text = f"{number[PASS]} of {checks} of its own code {pass_}"
    if number[FAIL]:
        text += f", {number[FAIL]} {'fails' if number[FAIL] == 1 else 'fail'}"
    return text + (f", {number[NOT_RUN]} not run" if number[NOT_RUN] else "")


def cells(outcome: Mapping[str, Any]) -> tuple[str, ...]:
    """Write an outcome in a table: check, function, errors, state; no errors if none exist."""
    errors = [
        "" if outcome["wanted"] is None else error_text(outcome[name])
        for name in ("loss_error", "gradient_error")
    ]
    function = ".".join(outcome["function"].split(".")[-2:])
    return (outcome["check"], function, *errors, outcome["state"])


TIMEOUT = 600.0
"""Seconds that a driver may take, imports included."""
ALL = "all"
"""All settings of a framework's own."""
_SEQUENCES = 12
"""Of the drawn batch."""


def layout_of(dp: int = 2, cp: int = 1) -> Parallelism:
    """Return the layout of a driver; raises :class:`ProofError` if it cannot be one."""
    if dp < 1 or cp < 1 or _SEQUENCES % dp:
        raise ProofError(
            f"got --dp {dp} --cp {cp} with --framework, expected at least 1, and a --dp that "
            f"divides the {_SEQUENCES} drawn sequences"
        )
    return Parallelism(dp=dp, cp=cp, float32=True)


@dataclass(frozen=True, kw_only=True)
class DriverJob:
    """Steps of a framework: what :func:`~megatron_lossagg.verify.job.launched` runs.

    ``setting``: one of its own, by name, or all; empty for its default, None for none of them.
    ``aggregations``: those that are trained after it; None for all that the driver has. ``edges``:
    whether the batch has fully masked sequences, and samples of several.
    """

    framework: str
    parallelism: Parallelism
    setting: str | None
    aggregations: Sequence[Aggregation] | None
    edges: bool

    def run(self) -> Iterator[Event]:
        """Run the steps on this rank; yield an event for each."""
        try:
            stand_in(self.framework)
            from megatron_lossagg.verify.drivers.driver import draw

            drawn = draw(edges=self.edges)
            driver = driver_of(self.framework)(self.parallelism, drawn)
            steps = [*self._trained(driver)]
        except (Exception, SystemExit) as error:
            yield {"outcome": asdict(ended_by(error, self.framework))}
            return
        yield {"imported": self.framework, "steps": len(steps)}
        prepared = [(trained, driver.prepare(trained)) for trained in steps]
        import torch.distributed as dist

        from megatron_lossagg.verify.drivers.driver import reference_of
        from megatron_lossagg.verify.world import join_world, split_world

        join_world()
        with split_world(Parallelism(dp=self.parallelism.world_size)):
            reference = reference_of(driver)
        with split_world(self.parallelism):
            driver.start()
            terms: dict[str, Weighed] = {}
            weighing = driver.listen(lambda step, _, term: terms.update({term: step}))
            for trained, given in prepared:
                terms.clear()
                weighing.forget()
                logged = driver.train(trained, given)
                is_first = dist.get_rank() == 0  # which has the terms
                yield _step(driver, reference, trained, terms, logged) if is_first else {}
        dist.barrier()  # a launcher ends the others as soon as one rank has failed
        dist.destroy_process_group()

    def _trained(self, driver: Driver) -> Iterator[str | Aggregation]:
        from megatron_lossagg.verify.drivers.driver import aggregations

        if self.setting not in (None, "", ALL, *driver.settings):
            raise NotRunError(
                f"got the setting {self.setting!r} of {self.framework}, expected one of "
                f"{', '.join(driver.settings)}, or {ALL}"
            )
        if self.setting == ALL:
            yield from driver.settings
        elif self.setting is not None:
            yield self.setting or next(iter(driver.settings))
        if self.aggregations is None:
            yield from filter(driver.trains, aggregations().values())
        else:
            yield from self.aggregations


def stand_in(framework: str) -> None:
    """Let a framework's step be imported on a CPU.

    Megatron comes first, before it finds placeholders. Raises :class:`NotRunError` without the
    Megatron-LM that the framework needs.
    """
    import megatron_lossagg.cpu as cpu
    from megatron_lossagg.cpu.training import install_training

    row = FRAMEWORKS[framework]
    imports.older_python()
    if "megatron.training" in row.imports:
        imports.install(last=["six"])  # a tokenizer's
        try:
            install_training()
        except ContractError as error:
            raise NotRunError(str(error)) from error
    cpu.install()
    for looks in ("megatron_lossagg.verify.small_gpt", "torch._inductor.compile_fx"):
        with suppress(ImportError):  # for Transformer Engine and triton, which are no placeholders
            import_module(looks)
    imports.install(first=row.passed_by, last=row.unused)


def _step(
    driver: Driver,
    reference: Reference,
    trained: str | Aggregation,
    terms: Mapping[str, Weighed],
    logged: Mapping[str, float],
) -> Event:
    """Compare a step with the reference."""
    from megatron_lossagg.weigh.report import as_json

    is_ours = isinstance(trained, Aggregation)
    wanted = trained if isinstance(trained, Aggregation) else driver.settings[trained]
    of_reference = reference.weights(wanted)
    return {
        "trained": _name(wanted) if is_ours else trained,
        "is_ours": is_ours,
        "wanted": _name(wanted),
        "function": driver.function,
        "tolerance": driver.tolerance,
        "terms": {
            name: {
                "report": str(step),
                "verdict": step.verdict,
                "weighed": as_json(step, number=1),
                **_by_hand(driver, name, step, of_reference),
            }
            for name, step in terms.items()
        },
        "missing": [name for name in driver.terms if name not in terms],
        "logged": {
            name: [value, reference.loss(wanted, driver.logged(name))]
            for name, value in logged.items()
        },
    }


def _name(aggregation: Aggregation) -> str:
    from megatron_lossagg.verify.cases import Case

    return str(Case(aggregation=aggregation))


def _by_hand(
    driver: Driver, name: str, step: Weighed, wanted: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Compare a term's weights with those by hand, if the driver knows it.

    ``relative``: the smallest and the largest of a sequence over what is wanted; None if other
    sequences have weights. ``error``: how far they are from 1.
    """
    if name not in driver.terms:
        return {"follows": None, "coefficient": None, "relative": None, "error": None}
    kind, factor = driver.terms[name]
    found = sorted(
        (one.tokens, one.weight_sum / one.tokens, one.weight_min, one.weight_max)
        for one in step.sequences
        if one.tokens
    )
    pairs = zip(found, sorted((n, w * factor) for n, w in wanted), strict=False)
    ratios = [a / w for (_, *weights), (_, w) in pairs for a in weights]
    is_same = [n for n, *_ in found] == [n for n, _ in wanted]
    return {
        "follows": kind in driver.follow,
        "coefficient": factor,
        "relative": [min(ratios), max(ratios)] if is_same else None,
        "error": max(abs(ratio - 1) for ratio in ratios) if is_same else math.inf,
    }


def run_job(
    job: DriverJob,
    *,
    timeout: float = TIMEOUT,
    take: Callable[[Event], None] = lambda event: None,
    report: Callable[[Outcome], None],
) -> None:
    """Run a job in processes of its own; ``take`` gets each step, ``report`` each outcome.

    Processes that end early, or are ended after ``timeout`` seconds, leave an outcome that says so:
    a driver's failed if the framework was imported.
    """
    began: list[Event] = []
    ended: list[Event] = []

    def event(found: Event) -> None:
        if "imported" in found:
            began.append(found)
            return
        ended.append(found)
        if "outcome" in found:
            report(Outcome(**found["outcome"]))
        else:
            take(found)

    reason = ""
    try:
        done = launched(job, event, processes=job.parallelism.world_size, timeout=timeout)
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {timeout:g} s: give it more by --timeout"
    else:
        reason = failure_of(done)
        if not reason and len(ended) < (number := began[0]["steps"] if began else 1):
            reason = f"its process ended itself after {len(ended)} of {number} steps, with status 0"
        if reason and not began:
            reason += f"\nImport {FRAMEWORKS[job.framework].package} by itself"
    if reason:
        begins = "the steps that follow" if began else f"import of {job.framework}"
        state = FAIL if began else NOT_RUN
        report(Outcome(check=begins, function="", state=state, explanation=reason))


def run_framework(
    framework: str,
    aggregation: Aggregation | None = None,
    *,
    layout: Parallelism | None = None,
    timeout: float = TIMEOUT,
    report: Callable[[dict[str, Any]], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Train a mode, or each, by a framework's driver; ``layout``: by default DP 2.

    Returns the verification's part about it. ::

        {"name", "seconds", "passed": none failed and one ran, "checks": [Outcome, ...]}

    ``report`` gets each outcome as it is known.
    """
    begun = time.monotonic()
    outcomes: list[dict[str, Any]] = []

    def take(outcome: Outcome) -> None:
        outcomes.append(asdict(outcome))
        report(outcomes[-1])

    job = DriverJob(
        framework=framework,
        parallelism=layout or layout_of(),
        setting=None,
        aggregations=None if aggregation is None else [aggregation],
        edges=True,
    )
    run_job(
        job,
        timeout=timeout,
        take=lambda event: take(outcome_of(event, framework)),
        report=take,
    )
    failed = any(outcome["state"] == FAIL for outcome in outcomes)
    return {
        "name": framework,
        "seconds": time.monotonic() - begun,
        "passed": not failed and not none_ran(outcomes),
        "checks": outcomes,
    }
