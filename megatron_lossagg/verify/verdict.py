"""Train one step of every case in a layout, compare it with the reference, and explain what fails.

Called on every rank. Shape suffixes: Y = tokens of all sequences and a padding sequence, padded; H
= hypotheses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.scaling import LOSS_SCALINGS, LossScaling
from megatron_lossagg.verify import model as megatron
from megatron_lossagg.verify.cases import Case, Expected, expected
from megatron_lossagg.verify.causes import CAUSES, EXPERTS_APART, MASKED_LOSSES_REACH, symbols
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE, Parallelism
from megatron_lossagg.verify.reference_gradient import Reference
from megatron_lossagg.verify.run import WEIGHT_EXPECTED, WEIGHT_SUM, Run, relative

__all__ = ["Verdict", "prove"]


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
    """Largest over all parameters of norm(g - g_reference) / norm(g_reference)."""
    loss_error: float | None
    """Relative error of the reported loss, of training and of a forward-only call; None where
    ranks have different M, because reported values assume one M."""
    weight_sum_error: float | None
    """Relative error of ``lossagg/weight_sum`` and ``lossagg/weight_expected``; None as above."""
    measured_factor: float
    """The gradient's multiple of the reference's, by projection; 1 is right."""
    tolerance: float
    causes: list[str] = field(default_factory=list)
    """Where it failed: names of the causes that explain all cases of this layout."""
    explanation: str = ""
    """Where it failed: the likely cause in words, or what was measured."""

    @property
    def passed(self) -> bool:
        """Whether gradient, reported loss and weight sum are those of the configured loss."""
        right = self.gradient_error < self.tolerance and self.loss_is_right
        return right and (
            self.weight_sum_error is None or self.weight_sum_error < WEIGHT_SUM_TOLERANCE
        )

    @property
    def loss_is_right(self) -> bool:
        """Whether the reported loss is the configured one, where it is defined."""
        return self.loss_error is None or self.loss_error < self.tolerance


def prove(
    parallelism: Parallelism,
    cases: Sequence[Case],
    reference: Reference,
    *,
    loss_scalings: Sequence[LossScaling] = LOSS_SCALINGS,
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> Iterator[Verdict]:
    """Run every case of a layout in both loss scalings; all ranks get the same verdicts.

    The failed ones of a layout are explained together, after its last case: a cause has to
    agree with every case of it.
    """
    done: list[tuple[Run, Case, Expected, Verdict]] = []
    with megatron.split_world(parallelism):
        for loss_scaling in loss_scalings:
            run = Run(parallelism, reference, per_token=loss_scaling == "per_token")
            run.check_every_parameter_is_compared()
            for case in cases:
                wanted = expected(case, reference, run.facts.assignment)
                verdict = _verdict(run, case, wanted)
                progress(verdict)
                done.append((run, case, wanted, verdict))
        _explain(done)
        del run
    yield from (verdict for *_, verdict in done)


def _verdict(run: Run, case: Case, wanted: Expected) -> Verdict:
    measured = run.train(case)
    (gradient_error,) = run.errors(measured, wanted.slope_Y[None])
    factor = run.factor_of(measured, wanted.slope_Y)
    loss_error = weight_sum_error = None
    if run.parallelism.one_m:
        sums = {WEIGHT_SUM: wanted.weight_sum, WEIGHT_EXPECTED: wanted.weight_expected}
        steps = (measured, run.evaluate(case))
        loss_error = max(relative(s.worst("loss", wanted.loss), wanted.loss) for s in steps)
        weight_sum_error = max(
            relative(measured.worst(name, right), right) for name, right in sums.items()
        )
    return Verdict(
        layout=str(run.parallelism),
        case=str(case),
        formula=case.formula,
        loss_scaling=run.aggregator.loss_scaling,
        k=int(measured.values[0]["k"]),
        gradient_error=gradient_error,
        loss_error=loss_error,
        weight_sum_error=weight_sum_error,
        measured_factor=factor,
        explanation=measured.fault,
        tolerance=run.parallelism.tolerance,
    )


def _explain(done: Sequence[tuple[Run, Case, Expected, Verdict]]) -> None:
    """Find the causes that agree with every verdict of the layout, for the failed ones.

    The failed cases are run again without inf at masked positions, so that the measured
    values are finite; where they are right then, the inf is the cause.
    """
    if all(verdict.passed for *_, verdict in done):
        return
    likely = {cause.name: cause for cause in CAUSES}
    right_without_inf = True
    for run, case, wanted, verdict in done:
        tolerance = min(100 * verdict.tolerance, _CLEARLY)
        predicted = {name: cause.predict(run.facts, case, wanted) for name, cause in likely.items()}
        slopes = [slope for slope, _ in predicted.values()]
        if verdict.passed:
            errors = _distances(run, wanted, slopes)
            loss = wanted.loss
        else:
            measured = run.train(case, poison=False)
            right, *errors = run.errors(measured, torch.stack([wanted.slope_Y, *slopes]))
            loss = measured.worst("loss", wanted.loss)
            is_right = max(right, relative(loss, wanted.loss)) < verdict.tolerance
            right_without_inf = right_without_inf and is_right
            factor = run.factor_of(measured, wanted.slope_Y)
            words = _measured_in_words(run, verdict, factor, loss / wanted.loss, is_right)
            fault = f" ({verdict.explanation})" if verdict.explanation else ""
            verdict.explanation = words + fault
        agree = [
            name
            for name, error in zip(likely, errors, strict=True)
            if error < tolerance
            and (verdict.loss_error is None or relative(loss, predicted[name][1]) < tolerance)
        ]
        box = [agree]  # rank 0's: all ranks continue with the same causes
        dist.broadcast_object_list(box, src=0, device=megatron.device())
        likely = {name: likely[name] for name in box[0]}
    if right_without_inf:
        likely = {MASKED_LOSSES_REACH.name: MASKED_LOSSES_REACH}
    why = "; or: ".join(cause.what for cause in likely.values())
    parallelism = done[0][0].parallelism
    if not why and parallelism.moe and parallelism.ep < parallelism.tp:
        why = EXPERTS_APART
    for *_, verdict in done:
        if not verdict.passed:
            verdict.causes = list(likely)
            verdict.explanation += ": " + (
                why or "no known cause explains every case of the layout"
            )


_CLEARLY = 0.1
"""Two predictions that are nearer than this are one, in bfloat16 too."""


def _distances(run: Run, wanted: Expected, slopes: Sequence[Tensor]) -> list[float]:
    """Return the relative distance of each predicted gradient from the right one."""
    if not slopes:
        return []
    gradient_P = wanted.slope_Y @ run.reference.gradients_YP
    others_HP = torch.stack(list(slopes)) @ run.reference.gradients_YP
    return [float(e) for e in (others_HP - gradient_P).norm(dim=1) / gradient_P.norm()]


def _measured_in_words(
    run: Run, verdict: Verdict, factor: float, loss_factor: float, right_without_inf: bool
) -> str:
    if right_without_inf:
        return "not finite with inf at masked positions, right without"
    tolerance = min(100 * verdict.tolerance, _CLEARLY)

    def factor_text(what: str, factor: float) -> str:
        names = symbols(factor, run.facts, tolerance=tolerance) if math.isfinite(factor) else []
        return f"{what}: measured factor {' = '.join([f'{factor:.12g}', *names])}, expected 1"

    parts = []
    if verdict.gradient_error >= verdict.tolerance:
        parts.append(factor_text("gradient", factor))
    if not verdict.loss_is_right:
        parts.append(factor_text("reported loss", loss_factor))
    return "; ".join(parts or ["the reported weight sum is not the reference's"])
