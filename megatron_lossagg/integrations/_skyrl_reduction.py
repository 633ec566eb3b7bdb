"""In place of SkyRL's reduction of advantages, which its trainer applies to each mini-batch.

Sources: SkyRL a9564572 and 0.4.0 ``RayPPOTrainer._normalize_advantages``,
``apply_loss_reduction_to_advantages_minibatch``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._advantage_groups import advantage_groups
from megatron_lossagg.integrations._refusals import not_a_mask, replaced
from megatron_lossagg.integrations._weigh_skyrl import column_of
from megatron_lossagg.loop.first_step import say_counted
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences

LAST_STEPS = "loss_aggregation_is_last_step"
"""Where the batch keeps ``is_last_step``, which SkyRL's synchronous loop drops."""
_REDUCTION = "apply_loss_reduction_to_advantages_minibatch"
_VERSIONS = "use skyrl 0.3.0, 0.4.0 or a9564572"


@dataclass(eq=False)
class Reduction:
    """What reduces the advantages of a step's mini-batches: a mode of ours, or SkyRL's own."""

    aggregation: Aggregation | None
    """None: SkyRL's own."""
    boundaries: Sequence[tuple[int, int]]
    samples: list[int] | None
    """Sample of each sequence, if SkyRL trains step by step; None: each sequence is one."""
    weights: list[Tensor] = field(default_factory=list)
    """What each mini-batch's advantages were multiplied by, ``[its sequences, 1 or s]``."""
    groups: list[str] = field(default_factory=list)
    """Of each sequence, if they are counted."""

    @contextmanager
    def in_place(self, trainer: Any) -> Iterator[None]:
        """Replace SkyRL's in the module whose ``_normalize_advantages`` runs.

        Raises :class:`ContractError` unless it is then called once for each mini-batch.
        """
        module = sys.modules[trainer._normalize_advantages.__module__]
        own = getattr(module, _REDUCTION, None)
        if own is None:
            raise ContractError(
                f"{module.__name__} has no {_REDUCTION}: {_VERSIONS}, or a trainer that does not "
                "override _normalize_advantages"
            )
        reduce = partial(self._own, own) if self.aggregation is None else self._planned
        with replaced(module, **{_REDUCTION: reduce}):
            yield
        if len(self.weights) != len(self.boundaries):
            raise ContractError(
                f"SkyRL reduced {len(self.weights)} of {len(self.boundaries)} mini-batches: this "
                f"version does not call {_REDUCTION} once for each; {_VERSIONS}"
            )

    def column(self, like: Tensor) -> Tensor:
        """Return the weights of all sequences, ``[sequences, 1 or s]``; 0 for those in no step."""
        width = max([1, *(weights.shape[1] for weights in self.weights)])
        weight_S = like.new_zeros(len(like), width)
        for (start, end), weights in zip(self.boundaries, self.weights, strict=True):
            weight_S[start:end] = weights.to(like)
        return weight_S

    def ids(self, data: Any, prompt_boundaries: Sequence[tuple[int, int]] | None) -> Tensor:
        """Return the ids of all sequences for weighing, int64 ``[sequences, 3]``."""
        num = len(data["advantages"])
        prompts = data.metadata.get("uids")
        if prompts is None and prompt_boundaries is not None:
            prompts = [n for n, (a, b) in enumerate(prompt_boundaries) for _ in range(b - a)]
        samples = range(num) if self.samples is None else self.samples
        return column_of(num, sample=samples, prompt=prompts, group=self.groups)

    def _own(self, own: Callable[..., Tensor], *, advantages: Tensor, **given: Any) -> Tensor:
        """Return what SkyRL's own does, which is proportional to advantages; keep its weights."""
        self.weights.append(own(advantages=torch.ones_like(advantages), **given))
        return own(advantages=advantages, **given)

    def _planned(
        self,
        advantages: Tensor,
        loss_mask: Tensor,
        loss_reduction: str,
        micro_batch_size: int,
        max_seq_len: int | None,
        prompt_boundaries: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor:
        """Return A w_s; ``advantages``, ``loss_mask``: ``[sequences of the mini-batch, s]``."""
        assert self.aggregation is not None
        start, end = self.boundaries[len(self.weights)]
        if end - start != len(advantages):
            raise ContractError(
                f"SkyRL reduces {len(advantages)} sequences, and the mini-batch has {end - start}: "
                f"{_VERSIONS}"
            )
        if not bool(((loss_mask == 0) | (loss_mask == 1)).all()):
            raise not_a_mask("loss_mask", "make it 0 or 1, and scale advantages to weigh a token")
        prompts = None
        if prompt_boundaries is not None:
            prompts = [n for n, (a, b) in enumerate(prompt_boundaries) for _ in range(b - a)]
        samples = None if self.samples is None else self.samples[start:end]
        groups = None
        if self.aggregation.mode == "balanced" and prompts is not None:
            groups = advantage_groups(prompts, advantages.cpu(), loss_mask.cpu(), samples)
            self.groups += groups
        plan = plan_step(
            self.aggregation,
            Sequences(
                active_tokens=loss_mask.sum(-1).to("cpu", torch.int64),
                sample=samples,
                prompt=prompts if self.aggregation.reads("prompt") else None,
                group=groups,
            ),
        )
        say_counted(plan, leave_out="loss_aggregation_count_empty=false (count_empty=False)")
        self.weights.append(plan.weights[:, None])
        return advantages * plan.weights.to(advantages)[:, None]


def samples_of(cfg: Any, data: Any) -> list[int] | None:
    """Number the trajectories of step-wise training, whose sequences are contiguous.

    None if each sequence is a sample. Raises :class:`ContractError` if the trainer lost them.
    """
    is_last_step = data.metadata.get(LAST_STEPS, data.metadata.get("is_last_step"))
    num_sequences = len(data["advantages"])
    is_step_wise = getattr(getattr(cfg, "generator", None), "step_wise_trajectories", False)
    if is_last_step is None and not is_step_wise:
        return None
    if is_last_step is None or len(is_last_step) != num_sequences:
        got = "none" if is_last_step is None else f"{len(is_last_step)} of them"
        raise ContractError(
            f"got {got} of metadata['is_last_step'] for {num_sequences} sequences of step-wise "
            "trajectories, expected one for each: without it every turn would count as a sample. "
            "Use a trainer that calls compute_advantages_and_returns before it trains"
        )
    ends = [0, *accumulate(map(int, is_last_step))]
    return ends[:-1]
