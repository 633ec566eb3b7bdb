"""Every aggregation for the policy loss of an unmodified SkyRL, by its entry point.

::

    python -m skyrl.train.entrypoints.main_base loss_aggregation=prompt_mean \\
        trainer.override_entrypoint=megatron_lossagg.integrations.skyrl ...

The arguments ``loss_aggregation``, ``loss_aggregation_divisor`` and
``loss_aggregation_count_empty`` are this module's, all others SkyRL's. With an entry point
or trainer of your own: ``aggregated(RayPPOTrainer, Aggregation("prompt_mean"))``.

SkyRL applies its own reductions to advantages, before a mini-batch is split over ranks, and its
policy losses then sum. While ``RayPPOTrainer._normalize_advantages`` runs, the function that
does so is replaced, and advantages leave as::

    A_t * w_s

A mini-batch is one optimizer step; the trainer has all of it, so counting needs no collective.
Afterwards SkyRL multiplies the sum by M DP, and Megatron by CP / M. KL and entropy stay as they
are in SkyRL: means of each microbatch; a patch of ``docs/integrations/patches`` changes it. The
loss of MTP heads (a draft model) stays SkyRL's too, with or without the patch. Sources: SkyRL
a9564572 and 0.4.0 ``RayPPOTrainer.train``, ``_normalize_advantages``,
``apply_loss_reduction_to_advantages_minibatch``, and ``loss_func`` of
``MegatronModelWrapper.forward_backward_mini_batch``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.aggregation import CUSTOM, Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.flags import aggregation_from_args
from megatron_lossagg.plan import plan_step
from megatron_lossagg.sequences import Sequences

__all__ = ["aggregated", "check_config", "main"]

_LINEAR = (
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "sapo",
    "importance_sampling",
    "dppo",
    "rollout_is",
)
"""SkyRL's policy losses whose per-token loss grows in proportion to the advantage."""
_NOT_LINEAR = ("clip_cov", "kl_cov", "cross_entropy")
_REDUCTION = "apply_loss_reduction_to_advantages_minibatch"
_NOT_HERE = (CUSTOM, "microbatch_token_mean")
_LAST_STEPS = "loss_aggregation_is_last_step"
"""Where the batch keeps ``is_last_step``, which SkyRL's synchronous loop drops."""
_PATCHES = (
    "docs/integrations/patches/skyrl-kl-entropy.patch (a9564572) or skyrl-0.4.0-kl-entropy.patch"
)
_VERSIONS = "use skyrl 0.3.0, 0.4.0 or a9564572"


def aggregated(trainer: Any, aggregation: Aggregation, *, carry_weights: bool = False) -> Any:
    """Make a subclass of a SkyRL trainer whose policy loss has our weights.

    ``carry_weights``: leave w_s in the batch too, ``loss_weights`` ``[sequences, 1]``, for a SkyRL
    with a patch of ``docs/integrations/patches``, whose KL and entropy then have them.
    Raises :class:`AggregationError` here for a mode that needs microbatches, and where the
    trainer is built for a policy loss that is not proportional to advantages.
    """
    if aggregation.mode in _NOT_HERE:
        raise AggregationError(
            f"got {aggregation}, expected a mode of whole steps: SkyRL's trainer knows no "
            "microbatches, and its losses sum; choose another mode"
        )

    class LossAggregationTrainer(trainer):  # type: ignore[misc]
        """A SkyRL trainer; every mini-batch's advantages are multiplied by w_s."""

        def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
            check_config(cfg, carry_weights=carry_weights)
            super().__init__(cfg, *args, **kwargs)

        def compute_advantages_and_returns(self, data: Any) -> Any:
            """Keep ``is_last_step``: SkyRL's loop drops it before :meth:`_normalize_advantages`."""
            is_last_step = data.metadata.get("is_last_step")
            data = super().compute_advantages_and_returns(data)
            if is_last_step is not None:
                data.metadata[_LAST_STEPS] = is_last_step
            return data

        def _normalize_advantages(
            self,
            data: Any,
            mini_batch_boundaries: Sequence[tuple[int, int]],
            prompt_boundaries: Sequence[tuple[int, int]] | None = None,
        ) -> Any:
            """Multiply by w_s where SkyRL applies ``loss_reduction``; no collective."""
            samples = _samples(self.cfg, data)
            weighing = _Weighing(aggregation, mini_batch_boundaries, samples)
            with _in_place_of_the_reduction(trainer, weighing):
                data = super()._normalize_advantages(data, mini_batch_boundaries, prompt_boundaries)
            if weighing.num_calls != len(mini_batch_boundaries):
                raise ContractError(
                    f"SkyRL reduced {weighing.num_calls} of {len(mini_batch_boundaries)} "
                    f"mini-batches: this version does not call {_REDUCTION} once for each; "
                    f"{_VERSIONS}"
                )
            if carry_weights:
                data["loss_weights"] = weighing.column(data["advantages"])
            return data

    return LossAggregationTrainer


@dataclass(eq=False)
class _Weighing:
    """Stands in for SkyRL's reduction of one mini-batch's advantages."""

    aggregation: Aggregation
    boundaries: Sequence[tuple[int, int]]
    samples: list[int] | None
    """Sample of each sequence, where SkyRL trains step by step; None: each sequence is one."""
    num_calls: int = 0
    weights: list[Tensor] = field(default_factory=list)

    def column(self, like: Tensor) -> Tensor:
        """Return w_s of all mini-batches, ``[sequences, 1]``; 0 for sequences in none of them."""
        weight_S = like.new_zeros(len(like), 1)
        for (start, end), weights in zip(self.boundaries, self.weights, strict=True):
            weight_S[start:end, 0] = weights.to(like)
        return weight_S

    def reduce(
        self,
        advantages: Tensor,
        loss_mask: Tensor,
        loss_reduction: str,
        micro_batch_size: int,
        max_seq_len: int | None,
        prompt_boundaries: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor:
        """Return A w_s; ``advantages``, ``loss_mask``: ``[sequences of the mini-batch, s]``."""
        start, end = self.boundaries[self.num_calls]
        self.num_calls += 1
        if end - start != len(advantages):
            raise ContractError(
                f"SkyRL reduces {len(advantages)} sequences, and the mini-batch has {end - start}: "
                f"{_VERSIONS}"
            )
        if not bool(((loss_mask == 0) | (loss_mask == 1)).all()):
            raise PlanError("loss_mask has values other than 0 and 1: give weights another way")
        prompts = None
        if prompt_boundaries is not None:
            prompts = [n for n, (a, b) in enumerate(prompt_boundaries) for _ in range(b - a)]
        plan = plan_step(
            self.aggregation,
            Sequences(
                active_tokens=loss_mask.sum(-1).to("cpu", torch.int64),
                sample=None if self.samples is None else self.samples[start:end],
                prompt=prompts if self.aggregation.mode == "prompt_mean" else None,
            ),
            group=None,
        )
        self.weights.append(plan.weights)
        return advantages * plan.weights.to(advantages)[:, None]


def _samples(cfg: Any, data: Any) -> list[int] | None:
    """Number the trajectories of step-wise training, whose sequences are contiguous.

    None where each sequence is a sample. Raises :class:`ContractError` where the trainer lost them.
    """
    is_last_step = data.metadata.get(_LAST_STEPS, data.metadata.get("is_last_step"))
    num_sequences = len(data["advantages"])
    is_step_wise = getattr(getattr(cfg, "generator", None), "step_wise_trajectories", False)
    if is_last_step is None and not is_step_wise:
        return None
    if is_last_step is None or len(is_last_step) != num_sequences:
        got = "none" if is_last_step is None else f"{len(is_last_step)} of them"
        raise ContractError(
            f"got {got} of metadata['is_last_step'] for {num_sequences} sequences of "
            f"step-wise trajectories, "
            "expected one for each: without it every turn would count as a sample. Use a trainer "
            "that calls compute_advantages_and_returns before it trains"
        )
    ends, number = [], count()
    current = next(number)
    for is_last in is_last_step:
        ends.append(current)
        if is_last:
            current = next(number)
    return ends


@contextmanager
def _in_place_of_the_reduction(trainer: Any, weighing: _Weighing) -> Iterator[None]:
    """Replace SkyRL's reduction in the module whose ``_normalize_advantages`` runs."""
    module = sys.modules[trainer._normalize_advantages.__module__]
    own: Callable[..., Tensor] | None = getattr(module, _REDUCTION, None)
    if own is None:
        raise ContractError(
            f"{module.__name__} has no {_REDUCTION}: {_VERSIONS}, or a trainer that does not "
            "override _normalize_advantages"
        )
    setattr(module, _REDUCTION, weighing.reduce)
    try:
        yield
    finally:
        setattr(module, _REDUCTION, own)


def check_config(cfg: Any, *, carry_weights: bool = False) -> None:
    """Refuse a policy loss whose weights cannot be carried by advantages; warn of KL, entropy."""
    algorithm = cfg.trainer.algorithm
    loss = str(algorithm.policy_loss_type)
    if loss in _NOT_LINEAR:
        raise AggregationError(
            f"policy_loss_type={loss} is not proportional to advantages, and SkyRL aggregates by "
            f"them: set trainer.algorithm.policy_loss_type to one of {', '.join(_LINEAR)}"
        )
    if loss not in _LINEAR:
        warnings.warn(
            f"policy_loss_type={loss} is not one of SkyRL's own: its per-token loss must be "
            "proportional to the advantage, and it must sum over tokens",
            RuntimeWarning,
            stacklevel=3,
        )
    terms = {"use_kl_loss": "KL", "use_entropy_loss": "entropy"}
    kept = [term for name, term in terms.items() if getattr(algorithm, name)]
    if kept and not carry_weights:
        warnings.warn(
            f"{' and '.join(kept)} stay SkyRL's means of each microbatch, whatever the "
            f"aggregation: turn them off, or apply {_PATCHES} and pass carry_weights=True",
            RuntimeWarning,
            stacklevel=3,
        )
    if getattr(getattr(cfg.trainer, "mtp", None), "enabled", False):
        warnings.warn(
            "got trainer.mtp.enabled=true: the loss of the MTP heads stays SkyRL's mean over each "
            "microbatch's tokens, whatever the aggregation, with the patch too. It reaches those "
            "heads alone; turn it off where they are to have the aggregation's weights",
            RuntimeWarning,
            stacklevel=3,
        )


def main() -> None:
    """Train as SkyRL's own entry point does, with the aggregation of ``loss_aggregation=...``."""
    aggregation, rest = _split(sys.argv[1:])
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    cfg = SkyRLTrainConfig.from_cli_overrides(rest)
    validate_cfg(cfg)
    check_config(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_train).remote(cfg, aggregation))


def _split(arguments: Sequence[str]) -> tuple[Aggregation, list[str]]:
    """Read our arguments; returns the aggregation and those of SkyRL."""
    known = ("loss_aggregation", "loss_aggregation_divisor", "loss_aggregation_count_empty")
    ours: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name.startswith("loss_aggregation"):
            if name not in known:
                raise AggregationError(f"got {argument!r}, expected one of {', '.join(known)}")
            ours[name] = value
        else:
            rest.append(argument)
    if "loss_aggregation_count_empty" in ours:
        value = ours["loss_aggregation_count_empty"].lower()
        if value not in ("true", "false"):
            raise AggregationError(
                f"got loss_aggregation_count_empty={value}, expected true or false"
            )
        ours["loss_aggregation_count_empty"] = value == "true"
    aggregation = aggregation_from_args(argparse.Namespace(**ours))
    if aggregation is None:
        raise AggregationError(
            "got no loss_aggregation: add loss_aggregation=prompt_mean or another mode, or drop "
            "trainer.override_entrypoint"
        )
    return aggregation, rest


def _train(cfg: Any, aggregation: Aggregation) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.trainer import RayPPOTrainer

    class Experiment(BasePPOExp):  # type: ignore[misc]
        def get_trainer(self, **arguments: Any) -> Any:
            return aggregated(RayPPOTrainer, aggregation)(**arguments)

    Experiment(cfg).run()
