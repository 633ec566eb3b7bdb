"""Runs a framework's driver, in processes of their own.

Importing a framework may be slow, may fail, and may end the process.
"""

from __future__ import annotations

import gc
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_lossagg.errors import ContractError, ProofError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers import imports
from megatron_lossagg.verify.drivers.outcome import (
    FAIL,
    NOT_RUN,
    NotRunError,
    Outcome,
    ended_by,
    none_ran,
    outcome_of,
)
from megatron_lossagg.verify.drivers.table import FRAMEWORKS, driver_of
from megatron_lossagg.verify.job import Event, failure_of, launched
from megatron_lossagg.verify.parallelism import Parallelism

if TYPE_CHECKING:
    from megatron_lossagg.verify.drivers.driver import Driver, Reference
    from megatron_lossagg.weigh.compare import Weighed

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
            del driver, weighing  # whose models hold groups
        dist.barrier()  # a launcher ends the others as soon as one rank has failed
        gc.collect()  # a group that is still held aborts the process at its end
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
        reason += f"\nImport {job.framework} by itself" if reason and not began else ""
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
