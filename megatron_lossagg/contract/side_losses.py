"""Stock Megatron's side losses (MoE, MTP): which depend on context parallelism, and their scale.

From megatron-core 0.19 on the schedule asks ``config.moe_grad_scale_func`` and
``config.mtp_grad_scale_func`` what to multiply the gradients of these losses by; under ``follow``
:class:`SideLossScale` answers while one step runs. Source: ``schedules.forward_step_calc_loss``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_lossagg.contract.megatron_options import megatron_release, megatron_version
from megatron_lossagg.contract.scaling import LossScaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.modes import CUSTOM

if TYPE_CHECKING:
    from megatron_lossagg.reduction.plan import StepPlan


_MOE_FREE_OF_CP = {"average": (0, 16), "per_token": (0, 19)}
"""The release from which the gradient of the MoE side losses does not depend on CP."""
_MTP_NEVER_FREE_OF_CP = (0, 17)
"""The release from which MTP's gradient depends on CP in both loss scalings."""


def side_losses_of(config: Any) -> list[str]:
    """Name the side losses that a model's config trains."""
    coefficients = getattr(config, "moe_aux_loss_coeff", 0)
    is_balanced = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    trained = {
        "MTP": config.mtp_num_layers,
        "MoE": config.num_moe_experts and (is_balanced or config.moe_z_loss_coeff),
        "DSA": getattr(config, "dsa_indexer_loss_coeff", None),
    }
    return [name for name, is_trained in trained.items() if is_trained]


def note_on_side_losses(config: Any, loss_scaling: LossScaling, *, follows: bool = False) -> str:
    """Say which of stock's side losses depend on CP here; empty if none does.

    ``follows``: whether they are multiplied by the mode's sum of weights.

    MTP's does, but in the per-token loss scaling before megatron-core 0.17. Those of MoE routers do
    before 0.16 in the average loss scaling, and before 0.19 in the per-token loss scaling.
    """
    release = megatron_release()
    trained, remedies = side_losses_of(config), {}
    has_moe = "MoE" in trained
    if "MTP" in trained and (loss_scaling == "average" or release >= _MTP_NEVER_FREE_OF_CP):
        has_remedy = not has_moe and release < _MTP_NEVER_FREE_OF_CP
        remedies["MTP"] = (
            "train with --calculate-per-token-loss"
            if has_remedy
            else "compare runs at one CP size only"
        )
    if has_moe and release < _MOE_FREE_OF_CP[loss_scaling]:
        major, minor = _MOE_FREE_OF_CP[loss_scaling]
        remedies["MoE"] = f"install megatron-core>={major}.{minor}"
    if not remedies:
        return ""
    changed = (
        "--loss-aggregation-side-losses follow multiplies them by the sum of weights"
        if follows
        else "no --loss-aggregation changes them"
    )
    return (
        f"side losses ({' and '.join(remedies)}) are Megatron's own and {changed}; "
        f"in the {loss_scaling} loss scaling of megatron-core "
        f"{megatron_version()} their gradient depends on CP: {' and '.join(remedies.values())}"
    )


_FUNCTIONS = ("moe_grad_scale_func", "mtp_grad_scale_func")


def check_follow(config: Any, aggregation: Aggregation) -> None:
    """Refuse ``follow`` for a Megatron-Core that does not ask, and for weights that nobody knows.

    Raises :class:`ContractError`. No collective.
    """
    asked = "--loss-aggregation-side-losses follow (Options.side_losses)"
    if not all(hasattr(config, name) for name in _FUNCTIONS):
        raise ContractError(
            f"got {asked} with megatron-core {megatron_version()}, which has no "
            f"{' and '.join(_FUNCTIONS)}: install megatron-core>=0.19, or leave side_losses stock"
        )
    if aggregation.mode == CUSTOM:
        raise ContractError(
            f"got {asked} with {aggregation}, whose sum of weights is not known: name a mode, or "
            "leave side_losses stock"
        )


def weight_sum_of(plan: StepPlan) -> float:
    """Return W of a step; raises :class:`ContractError` if its totals do not say it."""
    if plan.expected_weight is None:
        raise ContractError(
            f"got --loss-aggregation-side-losses follow (Options.side_losses) with "
            f"{plan.aggregation}, and this step's sum of weights is not known: pass all totals "
            "(totals=), leave sequence_weight out, or leave side_losses stock"
        )
    return plan.expected_weight


class SideLossScale:
    """Multiplies the side losses' gradients by the sum of the main loss's weights in a step.

    Stands in for both functions of the first chunk's config until :meth:`end`. The scale is W
    times what the schedule would take: the config's own function if it has one, else
    ``config.grad_scale_func``. No collective, no host sync.

    Args:
        chunk: The first chunk of this rank.
        weight_sum: W, the sum of w_s n_s over the step; None on a pipeline stage that has no plan,
            until it is told.
    """

    def __init__(self, chunk: Any, weight_sum: float | None) -> None:
        self.weight_sum = weight_sum
        self.is_ended = False
        self._config = chunk.config
        self._device = next(chunk.parameters()).device
        self._before = {name: getattr(self._config, name) for name in _FUNCTIONS}
        self._config.moe_grad_scale_func = self.of_moe
        self._config.mtp_grad_scale_func = self.of_mtp

    def of_moe(self) -> Any:
        """Return the scale of MoE losses: 0-dim or ``[1]``, on the model's device."""
        return self._scaled("moe_grad_scale_func")

    def of_mtp(self) -> Any:
        """Return the scale of MTP's loss, likewise."""
        return self._scaled("mtp_grad_scale_func")

    def _scaled(self, name: str) -> Any:
        if self.weight_sum is None:
            raise ContractError(
                "this pipeline stage has side losses and does not know the step's weights: begin "
                "the step with aggregator.step or begin_together on every stage, or leave "
                "--loss-aggregation-side-losses stock"
            )
        own = self._before[name]
        while (earlier := _scale_of(own)) is not None:
            own = earlier._before[name]
        if own is not None:
            return self.weight_sum * own()
        ones = torch.ones(1, device=self._device)
        scale = self._config.grad_scale_func
        return self.weight_sum * (ones if scale is None else scale(ones))

    def end(self) -> None:
        """Put the config's own functions back, unless a later step's scale stands before them."""
        self.is_ended = True
        for name in _FUNCTIONS:
            function = getattr(self._config, name)
            while (scale := _scale_of(function)) is not None and scale.is_ended:
                function = scale._before[name]
            setattr(self._config, name, function)


def _scale_of(function: Any) -> SideLossScale | None:
    """Return the scale whose function this is, if it is one's."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, SideLossScale) else None
