"""What loss_func returns to Megatron's schedule: loss, num_tokens and report, in its shapes.

Megatron adds both entries of a report over microbatches, data- and context-parallel ranks and
evaluation steps and divides them, so a report is a pair of a sum and a count: of a partial loss
``[partial loss * D, D / (M DP CP)]``. D is 1 in a training step. In an evaluation it is the total
of the mode (N, B, P or Z), so that the quotient is the mode's loss over all that was evaluated, or
1 for a mean over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Number, Real

import torch
from torch import Tensor

from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.reducer import Reducer

Means = Mapping[str, tuple[Tensor, Tensor | float]]
Outputs = tuple[Tensor, Tensor, dict[str, Tensor]]


def outputs(
    loss: Tensor,
    reducer: Reducer,
    scaling: Scaling,
    *,
    cp_rank: int,
    report: Mapping[str, Tensor],
    means: Means,
    total: float = 1.0,
    without_total: Collection[str] = (),
) -> Outputs:
    """Return loss times K, num_tokens, and the reports with the weight-sum check's two.

    ``total``: D, except of the reports that ``without_total`` names, whose D is 1.
    """
    scaled = _widened(loss) * scaling.k
    counted = scaling.num_tokens(reducer.counted_tokens, cp_rank)
    num_tokens = torch.full((), counted, dtype=torch.int32, device=scaled.device)
    for name, value in report.items():
        check_scalar(name, value)
    sums, constants = dict(report), {}
    weight_sum, expected = reducer.weight_sum(), reducer.plan.expected_weight
    if weight_sum is not None:
        sums["lossagg/weight_sum"] = weight_sum
        if expected is not None:
            constants["lossagg/weight_expected"] = expected
    names = [*sums, *constants]
    totals = {name: total for name in names if name not in without_total}
    reports = _pairs(sums, constants, totals, scaling, scaled.device)
    for name, (local_sum, count) in means.items():
        reports[name] = _mean(name, local_sum, count)
    return scaled, num_tokens, reports


def shadow_reports(
    shadows: Mapping[str, Tensor], totals: Mapping[str, float], scaling: Scaling
) -> dict[str, Tensor]:
    """Return ``lossagg/shadow/NAME`` for each partial loss by its mode's name; ``totals``: D."""
    if not shadows:
        return {}
    named = {f"lossagg/shadow/{mode}": loss for mode, loss in shadows.items()}
    totals = {f"lossagg/shadow/{mode}": total for mode, total in totals.items()}
    return _pairs(named, {}, totals, scaling, next(iter(shadows.values())).device)


def stock_report(loss: Tensor, num_tokens: Tensor, scaling: Scaling) -> dict[str, Tensor]:
    """Return ``lossagg/shadow/stock``: what stock Megatron trains for its own ``loss``.

    In the average loss scaling the mean over microbatches and DP CP ranks of each rank's
    ``loss / num_tokens``, which depends on the parallelism, and in an evaluation the mean over its
    steps; in the per-token loss scaling the sum of all losses over the sum of all num_tokens.
    """
    loss = _widened(loss.detach().reshape(()))
    count = moved(num_tokens.detach().reshape(()), loss.device)
    is_mean = scaling.loss_scaling == "average"
    pair = torch.stack([loss, (torch.clamp(count, min=1) if is_mean else count).to(loss.dtype)])
    if is_mean:
        pair = pair / (pair[1] * scaling.m_dp_cp)
    return {"lossagg/shadow/stock": pair}


def check_reported(report: Mapping[str, Tensor], means: Means) -> None:
    """Raise :class:`ContractError` for what is not reported by name, or twice.

    A name that starts with ``lossagg/`` is the package's.
    """
    are_pairs = isinstance(means, Mapping)
    for pair in means.values() if are_pairs else ():
        is_pair = getattr(pair, "shape", None) == (2,)
        are_pairs &= is_pair or (isinstance(pair, (tuple, list)) and len(pair) == 2)
    if not isinstance(report, Mapping) or not are_pairs:
        raise ContractError(
            f"got report {report!r} and means {means!r}, expected partial losses by name, and "
            "(sum, count) by name"
        )
    names = [*report, *means]
    taken = set()
    for name in names:
        if not isinstance(name, str) or names.count(name) > 1 or name.startswith("lossagg/"):
            taken.add(name)
    if taken:
        raise ContractError(
            f"got the reported names {sorted(map(str, taken))}, expected strings, each once and "
            "none that starts with lossagg/: rename them"
        )


def check_coefficient(coefficient: float) -> None:
    """Raise :class:`ContractError` for a coefficient of 0, or one that is not a finite number."""
    is_number = isinstance(coefficient, Real) and not isinstance(coefficient, bool)
    if not is_number or not math.isfinite(coefficient) or coefficient == 0:
        raise ContractError(
            f"got coefficient={coefficient!r}, expected a finite number other than 0: what "
            "multiplies the partial loss under the step's aggregation"
        )


def check_scalar(name: str, value: Tensor) -> None:
    """Raise :class:`ContractError` for what is not a 0-dim floating-point tensor."""
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        raise ContractError(
            f"{name} is {value!r}: expected a 0-dim floating-point tensor, as mb.reduce returns"
        )


def _pairs(
    sums: Mapping[str, Tensor],
    constants: Mapping[str, float],
    totals: Mapping[str, float],
    scaling: Scaling,
    device: torch.device,
) -> dict[str, Tensor]:
    """Make pairs whose sums over the step divide to the sum of each, and to each constant.

    ``totals``: D of each, 1 by default. All are views of one tensor ``[pairs, 2]``, in the widest
    dtype of the sums.
    """
    names = [*sums, *constants]
    if not sums:
        return {}
    sum_N = _widened(torch.stack([moved(value.detach(), device) for value in sums.values()]))
    pair_N2 = sum_N.new_full((len(names), 2), scaling.report_count)
    pair_N2[: len(sums), 0].copy_(sum_N)
    for place, constant in enumerate(constants.values(), start=len(sums)):
        pair_N2[place, :1].fill_(constant * scaling.report_count)
    for place, name in enumerate(names):
        if totals.get(name, 1) != 1:  # of an evaluation
            pair_N2[place] *= totals[name]
    return dict(zip(names, pair_N2.unbind(), strict=True))


def _mean(name: str, total: Tensor, count: Tensor | float) -> Tensor:
    check_scalar(f"the sum of {name}", total)
    if not isinstance(count, Tensor | Number) or (isinstance(count, Tensor) and count.dim()):
        raise ContractError(
            f"the count of {name} is {count!r}: expected a number or a 0-dim tensor"
        )
    total = _widened(total.detach())
    if isinstance(count, Tensor):
        return torch.stack([total, moved(count.detach(), total.device).to(total.dtype)])
    return torch.stack([total, torch.full_like(total, count)])


def _widened(value: Tensor) -> Tensor:
    return value if value.is_floating_point() and value.dtype.itemsize >= 4 else value.float()
