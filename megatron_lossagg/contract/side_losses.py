"""Which of stock Megatron's side losses (MoE, MTP) depend on context parallelism."""

from __future__ import annotations

from typing import Any

from megatron_lossagg.contract.release import megatron_release, megatron_version
from megatron_lossagg.contract.scaling import LossScaling

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
