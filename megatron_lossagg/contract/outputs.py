"""What loss_func returns to Megatron's schedule: loss, num_tokens and report, in its shapes.

Megatron adds both entries of a report over microbatches, data- and context-parallel ranks and
evaluation steps and divides them, so a report is a pair of a sum and a count: of a partial loss
``[partial loss * D, D / (M DP CP)]``. D is 1 in a training step. In an evaluation it is the total
of the mode (N, B, P or Z), so that the quotient is the mode's loss over all that was evaluated, or
1 for a mean over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Number, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.microbatch import Means, Microbatch
from megatron_lossagg.reduction.microbatch import Outputs as Outputs

Reports = dict[str, Tensor]

_EXPECTED = "lossagg/weight_expected"
_WIDE = (torch.float32, torch.float64)


class StepOutputs:
    """Makes what loss_func returns in one step; what all its microbatches share is made once."""

    def __init__(self, scaling: Scaling, *, cp_rank: int) -> None:
        self._scaling = scaling
        self._cp_rank = cp_rank
        self._num_tokens: dict[torch.device, Tensor] = {}
        self._constants: dict[tuple[Any, ...], tuple[Tensor, Tensor | None]] = {}

    def of(
        self,
        microbatch: Microbatch,
        loss: Tensor,
        report: Mapping[str, Tensor],
        means: Means,
        total: float = 1.0,
        without_total: Collection[str] = (),
    ) -> Outputs:
        """Return loss times K, num_tokens, and the reports with the weight-sum check's two.

        ``total``: D, except of the reports that ``without_total`` names, whose D is 1.
        """
        scaling = self._scaling
        scaled = (loss if loss.dtype in _WIDE else loss.float()) * scaling.k
        device = scaled.device
        num_tokens = self._num_tokens.get(device)
        if num_tokens is None:
            counted = scaling.num_tokens(microbatch.line.known.counted_tokens, self._cp_rank)
            num_tokens = torch.full((), counted, dtype=torch.int32, device=device)
            if scaling.loss_scaling == "average":  # 1, which the schedule reads and never changes
                self._num_tokens[device] = num_tokens
        sums, expected = dict(report), None
        for name, value in report.items():
            if type(value) is not Tensor or value.dim() or value.dtype not in _WIDE:
                check_scalar(name, value)
            if type(name) is not str or name.startswith("lossagg/"):
                check_reported(report, means)
        weight_sum = microbatch.weight_sum()
        if weight_sum is not None:
            sums["lossagg/weight_sum"] = weight_sum
            expected = microbatch.plan.expected_weight
        totals = {}
        if total != 1:
            totals = dict.fromkeys([*sums, _EXPECTED], total) | dict.fromkeys(without_total, 1.0)
        reports = self._reports(sums, device, totals, expected)
        for name, (local_sum, count) in means.items():
            reports[name] = _mean(name, local_sum, count)
        return scaled, num_tokens, reports

    def of_shadows(self, losses: Mapping[str, Tensor], totals: Mapping[str, float]) -> Reports:
        """Return ``lossagg/shadow/MODE`` of each partial loss by its mode; ``totals``: D."""
        named = {f"lossagg/shadow/{mode}": loss for mode, loss in losses.items()}
        totals = {f"lossagg/shadow/{mode}": total for mode, total in totals.items()}
        return self._reports(named, next(iter(losses.values())).device, totals) if named else {}

    def _reports(
        self,
        sums: Mapping[str, Tensor],
        device: torch.device,
        totals: Mapping[str, float],
        expected: float | None = None,
    ) -> Reports:
        """Make pairs whose sums over the step divide to the sum of each.

        And to ``expected`` that of ``lossagg/weight_expected``, if it is known. ``totals``: D of
        each, 1 by default. All are views of one tensor ``[pairs, 2]``, in the widest dtype of the
        sums.
        """
        if not sums:
            return {}
        dtype, sum_N = torch.float32, []
        for value in sums.values():
            if value.dtype is torch.float64:
                dtype = value.dtype
            sum_N.append((value if value.device == device else moved(value, device)).detach())
        names = [*sums] if expected is None else [*sums, _EXPECTED]
        # Without totals: the first microbatch that reports these names says the D of each, so that
        # a zero of a later one without tokens has it too.
        key = *names, expected, dtype, device
        made = self._constants.get(key)
        if made is None:
            made = self._constants[key] = self._made(names, totals, expected, dtype, device)
        constant_N2, total_N = made
        pair_N2 = constant_N2.clone()
        torch.stack(sum_N, out=pair_N2[: len(sums), 0])
        if total_N is not None:
            pair_N2[:, 0] *= total_N
        return dict(zip(names, pair_N2.unbind(), strict=True))

    def _made(
        self,
        names: Sequence[str],
        totals: Mapping[str, float],
        expected: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the pairs without their sums; and D of each, if one is not 1."""
        count, total_N = self._scaling.report_count, np.array([totals.get(n, 1.0) for n in names])
        pair_N2 = np.stack([np.zeros(len(names)), total_N * count], axis=1)
        if expected is not None:
            pair_N2[-1, 0] = expected * count
        has_totals = (total_N != 1).any()
        return from_numpy(pair_N2, device).to(dtype), (
            from_numpy(total_N, device).to(dtype) if has_totals else None
        )


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
    return value if value.dtype in _WIDE else value.float()
