"""Train one step of every case in a layout, compare it with the reference, and explain what fails.

Called on every rank.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_lossagg.contract.megatron_options import megatron_version
from megatron_lossagg.contract.scaling import LossScaling
from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.cases import Case, Expected, expected
from megatron_lossagg.verify.causes import (
    CAUSES,
    EXPERTS_APART,
    FORWARD_ONLY,
    MASKED_LOSSES_REACH,
    symbols,
    weights_error,
)
from megatron_lossagg.verify.job import Event, Job
from megatron_lossagg.verify.own_reducer import NOT_ADDITIVE, not_additive
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE, Parallelism
from megatron_lossagg.verify.reference_gradient import Reference, compute, relative
from megatron_lossagg.verify.step_data import assign_sequences
from megatron_lossagg.verify.text import number_of
from megatron_lossagg.verify.train_step import WEIGHT_EXPECTED, WEIGHT_SUM, Measured, Run
from megatron_lossagg.verify.world import device, groups_over_hosts, join_world, split_world

_CLEARLY = 0.1
"""Two predictions that are nearer than this are one."""


@dataclass(kw_only=True)
class Verdict:
    """What was measured for one case in one layout and loss scaling, and whether it is right."""

    layout: str
    case: str
    formula: str
    """w_s of each term, with the divisor's value."""
    loss_scaling: LossScaling
    k: int
    """``Step.k``: what the package multiplied partial losses by."""
    gradient_error: float
    """Largest over all parameters of norm(g - g_reference), relative to norm(g_reference) or, where
    its terms cancel, to the root of the sum over tokens of their squared norms."""
    loss_error: float
    """Relative error of the reported loss, likewise, of training and of a forward-only call."""
    weights_error: float | None
    """Largest relative error, over sequences, of the weights that arrived at the losses, as they
    are weighed; None under the hook."""
    weight_sum_error: float | None
    """Relative error of ``lossagg/weight_sum`` and ``lossagg/weight_expected``, as above; None for
    a reducer of one's own."""
    measured_factor: float
    """The gradient's multiple of the reference's, by projection; 1 is right."""
    tolerance: float
    causes: list[str] = field(default_factory=list)
    """Where it failed: names of the causes that explain all cases of this layout."""
    explanation: str = ""
    """Where it failed: what a step raised; then the likely cause in words, or what was measured."""

    @property
    def passed(self) -> bool:
        """Whether gradient, reported loss and weight sum are those of the configured loss, and no
        step raised."""
        right = self.gradient_error < self.tolerance and self.loss_is_right and not self.explanation
        weighed = self.weights_error is None or self.weights_error < self.tolerance
        return (
            right
            and weighed
            and (self.weight_sum_error is None or self.weight_sum_error < WEIGHT_SUM_TOLERANCE)
        )

    @property
    def loss_is_right(self) -> bool:
        """Whether the reported loss is the configured one."""
        return self.loss_error < self.tolerance

    @property
    def tolerance_of_causes(self) -> float:
        """Largest relative error at which what a cause predicts is what was measured."""
        return max(self.tolerance, min(100 * self.tolerance, _CLEARLY))

    @property
    def is_finite(self) -> bool:
        """Whether no NaN or inf reached gradient or reported loss."""
        return math.isfinite(max(self.gradient_error, self.loss_error))


def run_job(job: Job) -> Iterator[Event]:
    """Run a job on this rank, as :meth:`Job.run` says."""
    world = join_world()
    gc.freeze()  # else every collection walks all that was imported
    if dist.get_world_size() != job.world_size:
        raise ProofError(
            f"{job.layouts[0]}: got {number_of(dist.get_world_size(), 'rank')} from the launcher, "
            f"expected {job.world_size}. Change --dp, or the number of processes"
        )
    yield {"event": "start", "megatron": megatron_version(), **asdict(world)}
    references = _references(job)
    wanted: dict[Any, list[Expected]] = {}  # layouts that assign sequences alike share it
    for layout in job.layouts:
        reference, key = references[layout.reference], (layout.reference, *layout.m_of_ranks)
        if key not in wanted:
            assignment = assign_sequences(reference.sequences, layout.m_of_ranks)
            wanted[key] = [expected(case, reference, assignment) for case in job.cases]
        yield {"event": "begin", "layout": str(layout)}
        yield _proven(layout, job, reference, wanted[key], world.hosts)
        gc.collect()  # of the models, which hold the layout's groups
    yield {"event": "end"}
    dist.barrier()  # a launcher ends the others as soon as one rank has failed
    gc.collect()  # a group that is still held aborts the process at its end
    dist.destroy_process_group()


def _references(job: Job) -> dict[Any, Reference]:
    """Compute the reference of each layout on rank 0, for all ranks."""
    references: dict[Any, Reference] = {}
    with split_world(Parallelism(dp=job.world_size)):  # which splits no model
        for shape, copies, padded in dict.fromkeys(layout.reference for layout in job.layouts):
            box: list[Any] = [None]
            if dist.get_rank() == 0:
                box = [compute(shape, copies=copies, padded=padded)]
            dist.broadcast_object_list(box, src=0, device=device())
            references[shape, copies, padded] = box[0]
    return references


def _proven(
    layout: Parallelism,
    job: Job,
    reference: Reference,
    wanted_of_cases: Sequence[Expected],
    hosts: Sequence[str],
) -> Event:
    """Run every case of a layout in each loss scaling; all ranks get the same verdicts.

    The first case of each loss scaling and count is evaluated too: what a forward-only step has of
    its own, K and the report, depends on these two and not on the case.

    The failed ones of a layout are explained together, after its last case: a cause has to
    agree with every case of it.
    """
    done: list[_Done] = []
    with split_world(layout):
        groups = groups_over_hosts(hosts)
        for loss_scaling in job.loss_scalings:
            run = Run(layout, reference, per_token=loss_scaling == "per_token")
            run.check_every_parameter_is_compared()
            evaluated: set[str] = set()
            for case, wanted in zip(job.cases, wanted_of_cases, strict=True):
                steps = [run.train(case)]
                if case.aggregation.count not in evaluated:
                    evaluated.add(case.aggregation.count)
                    steps.append(run.evaluate(case))
                verdict = _verdict(run, case, wanted, steps)
                done.append(_Done(run, case, wanted, steps, verdict))
        _explain(done)
    verdicts = [{**asdict(each.verdict), "passed": each.verdict.passed} for each in done]
    return {"event": "layout", "layout": str(layout), "verdicts": verdicts, "groups": groups}


class _Done(NamedTuple):
    """A case that was trained, and what came out."""

    run: Run
    case: Case
    wanted: Expected
    steps: list[Measured]
    """The training step and, if there was one, the forward-only step."""
    verdict: Verdict


def _verdict(run: Run, case: Case, wanted: Expected, steps: Sequence[Measured]) -> Verdict:
    measured = steps[0]
    (gradient_error,), factor = run.compared(
        measured, wanted.slope_Y[None], wanted.gradient_P[None]
    )
    sums = {WEIGHT_SUM: wanted.weight_sum, WEIGHT_EXPECTED: wanted.weight_expected}
    terms = run.reference.size_of_loss_terms(wanted.slope_Y)
    loss_error = max(relative(s.worst("loss", wanted.loss), wanted.loss, terms) for s in steps)
    weight_sum_error = max(
        (
            relative(s.worst(name, right), right)
            for s in steps
            for name, right in sums.items()
            if right is not None
        ),
        default=None,
    )
    return Verdict(
        layout=str(run.parallelism),
        case=str(case),
        formula=case.formula,
        loss_scaling=run.aggregator.loss_scaling,
        k=int(measured.values[0]["k"]),
        gradient_error=gradient_error,
        loss_error=loss_error,
        weights_error=None
        if measured.weighed is None
        else weights_error(measured.weighed, run.facts, wanted.slope_Y),
        weight_sum_error=weight_sum_error,
        measured_factor=factor,
        explanation=next((step.fault for step in steps if step.fault), ""),
        tolerance=run.parallelism.tolerance,
    )


def _explain(done: Sequence[_Done]) -> None:
    """Find the causes that agree with every verdict of the layout, for the failed ones.

    A training step that is not finite is run again without inf at masked positions; if it is
    right then, the inf is the cause. A case whose training step is right failed in its forward-only
    step.
    """
    if all(each.verdict.passed for each in done):
        return
    likely = {cause.name: cause for cause in CAUSES}
    right_without_inf = right_in_training = True
    for run, case, wanted, steps, verdict in done:
        measured = steps[0]
        trained = again = _verdict(run, case, wanted, [measured])
        if not trained.is_finite:
            measured = run.train(case, poison=False)
            again = _verdict(run, case, wanted, [measured])
        reported = steps[-1] if trained.passed else measured
        tolerance = verdict.tolerance_of_causes
        predicted = {name: cause.predict(run.facts, case, wanted) for name, cause in likely.items()}
        slopes_HY = torch.stack([wanted.slope_Y, *(slope for slope, _ in predicted.values())])
        (_, *errors), _ = run.compared(measured, slopes_HY, slopes_HY @ run.reference.gradients_YP)
        terms = run.reference.size_of_loss_terms(wanted.slope_Y)
        loss = reported.worst("loss", wanted.loss)
        if not verdict.passed:
            is_inf = again.passed and not trained.passed
            right_without_inf = right_without_inf and is_inf
            right_in_training = right_in_training and trained.passed
            loss_factor = loss / wanted.loss
            words = _measured_in_words(run, verdict, again.measured_factor, loss_factor, is_inf)
            fault = f" ({verdict.explanation})" if verdict.explanation else ""
            verdict.explanation = words + fault
        agree = [
            name
            for name, error in zip(likely, errors, strict=True)
            if error < tolerance and relative(loss, predicted[name][1], terms) < tolerance
        ]
        box = [agree]  # rank 0's: all ranks continue with the same causes
        dist.broadcast_object_list(box, src=0, device=device())
        likely = {name: likely[name] for name in box[0]}
    causes = {cause.name: cause.what for cause in likely.values()}
    if right_without_inf:
        causes = MASKED_LOSSES_REACH
    if right_in_training:
        causes = FORWARD_ONLY
    parallelism = done[0].run.parallelism
    for each in (each for each in done if not each.verdict.passed):
        named = _of_own_reducer(each) or causes
        why = "; or: ".join(named.values())
        if not why and parallelism.moe and parallelism.ep < parallelism.tp:
            why = EXPERTS_APART
        each.verdict.causes = list(named)
        words = why or "no known cause explains every case of the layout"
        each.verdict.explanation += f": {words}"


def _of_own_reducer(done: _Done) -> dict[str, str]:
    """Find whether a reducer of one's own is the cause: whatever Megatron does, it is no sum."""
    if not done.case.is_custom:
        return {}
    tolerance = done.verdict.tolerance
    why = not_additive(done.case.aggregation, done.run.facts, done.wanted.loss, tolerance)
    return {NOT_ADDITIVE: why} if why else {}


def _measured_in_words(
    run: Run, verdict: Verdict, factor: float, loss_factor: float, right_without_inf: bool
) -> str:
    if right_without_inf:
        return "not finite with inf at masked positions, right without"
    tolerance = verdict.tolerance_of_causes

    def factor_text(what: str, factor: float) -> str:
        names = symbols(factor, run.facts, tolerance=tolerance) if math.isfinite(factor) else []
        return f"{what}: measured factor {' = '.join([f'{factor:.12g}', *names])}, expected 1"

    parts = []
    if verdict.gradient_error >= verdict.tolerance:
        parts.append(factor_text("gradient", factor))
    if not verdict.loss_is_right:
        parts.append(factor_text("reported loss", loss_factor))
    if not parts and verdict.explanation:
        return "gradient and reported loss are right, and the step raised"
    if not parts and (verdict.weights_error or 0.0) >= verdict.tolerance:
        parts.append("the weights that arrived at the losses are not the reference's")
    return "; ".join(parts or ["the reported weight sum is not the reference's"])
