"""GRPO of ms-swift on Megatron: ``install(aggregation)`` in a file of ``--external_plugins``.

Its ``loss_func`` computes per-token losses, multiplies them by a bool mask, sums and divides, and
returns the scalar. It runs as it is, once per microbatch. While it runs, both factors of every such
product are kept, and those of the product that the scalar was summed from are the losses and the
mask. Summed with what ms-swift 4.6.0 multiplies each token's loss by, they must give the scalar and
its gradient again, in every microbatch: a term or a factor that is not known here is an error.

Every context-parallel rank gathers all log-probabilities, with a gradient for its own, and
``loss_func`` sums all tokens on each. Here a rank weighs a part of them, and the gradients with
respect to the log-probabilities are summed over the ranks: a ratio of a whole sequence needs that.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import field_of, to_numpy
from megatron_lossagg.integrations.ms_swift import (
    TrainerIntegration,
    bound_to,
    installed,
    trainer_class,
)
from megatron_lossagg.integrations.weigh_rl import Reduction, Where
from megatron_lossagg.loop.aggregator import LossAggregator
from megatron_lossagg.loop.schedule_hook import FrameworkLoss, ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.sequences import Sequences

_MODULE = "swift.megatron.trainers.grpo_trainer"
_PER_SAMPLE, _PER_WIDTH = ("grpo", "sapo"), ("dr_grpo",)
_PER_TOKEN = ("bnpo", "cispo", "dapo", "fipo")
"""The ``loss_type``s whose loss is a sum over tokens, by what they divide it by."""
_PROMPT = "lossagg_prompt"
"""Attribute of ms-swift's samples and batches: the prompt of a completion."""


class GRPOIntegration(TrainerIntegration):
    """``MegatronGRPOTrainer`` (``megatron rlhf --rlhf_type grpo``), padding-free or padded.

    A sequence is a completion, a prompt its group. Its active tokens are those of ms-swift's
    ``completion_mask``; a completion that ``overlong_filter`` masks has none. The per-token losses
    are ms-swift's, with clipping, KL, entropy mask and importance weights. ``loss_type`` chooses
    them, and not the mean. A ``loss_type`` that is not a sum over tokens is refused before the
    first step. ``trains``: whether the configured loss is trained, and not ms-swift's.
    """

    gives_prompts = True
    trainer_at = (_MODULE, "MegatronGRPOTrainer")
    commands = "megatron rlhf --rlhf_type grpo"

    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        self._trains = trains

    def prepare(self, aggregations: Sequence[Aggregation]) -> None:
        """Number the prompts when their completions are repeated, if a mode needs them."""
        super().prepare(aggregations)
        if self.needs_prompts:
            _number_prompts()

    def check(self, trainer: Any, call: Mapping[str, Any]) -> None:
        """Raise for a loss that is not a sum over tokens."""
        known = (*_PER_SAMPLE, *_PER_WIDTH, *_PER_TOKEN)
        if trainer.loss_type not in known:
            raise ContractError(
                f"loss_type is {trainer.loss_type!r}, expected one of {', '.join(known)}, whose "
                "loss is a sum over tokens: choose one of these, or train without megatron_lossagg"
            )
        if self.needs_prompts:
            _warn_of_split_prompts(trainer)

    def sequences(self, data: Any) -> Sequences:
        """Count the completions of a microbatch, as the trainer's rollout made it."""
        batch = field_of(data, "grpo_batch", "ms-swift's rollout")
        mask = to_numpy(batch.completion_mask) != 0
        if self.trainer.args.overlong_filter:
            mask = mask & ~to_numpy(batch.truncated_mask)[:, None]
        b, s = mask.shape
        return Sequences(
            active_tokens=mask.sum(1),
            lengths=np.full(b, s + self._num_added(s)),
            prompt=_prompts(batch) if self.needs_prompts else None,
        )

    def layout(self, aggregator: LossAggregator, lengths: Sequence[int]) -> Layout:
        """Give each context-parallel rank one interval of every completion, gathered."""
        size, rank = aggregator.cp_size, aggregator.cp_rank
        layout = Layout.bshd_contiguous(len(lengths), lengths[0], cp_size=size, cp_rank=rank)
        return layout.gathered(sums_gradients=True)

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Run ``partial(trainer.loss_func, data=...)``, and take what it sums.

        Under context parallelism the backward pass adds one all-reduce of ``[b, s]`` numbers over
        the context-parallel group.
        """
        batch = field_of(bound_to(loss_func, "data"), "grpo_batch", "ms-swift's rollout")
        has_gradient = torch.is_grad_enabled()
        if not has_gradient:
            output = output.detach().requires_grad_()  # an evaluation: products are found by it
        elif self._trains and self.trainer.args.context_parallel_size > 1:
            output = _SummedOverCP.apply(output)  # type: ignore[no-untyped-call]
        with torch.enable_grad(), _MaskedProducts() as products:
            returned = loss_func(output)
        theirs = returned[0]
        losses, mask = products.summed_into(theirs)
        check = self._check(batch, output, theirs, losses, mask)
        added = (0, self._num_added(output.shape[1]))
        return FrameworkLoss(
            losses=pad(losses if has_gradient else losses.detach(), added).reshape(-1),
            mask=pad(mask, added).reshape(-1),
            returned=returned,
            to_check=(check, _describe),
        )

    def _num_added(self, width: int) -> int:
        """Count the positions of mask 0 that make a width a multiple of CP."""
        return -width % int(self.trainer.args.context_parallel_size)

    def _check(
        self, batch: Any, output: Tensor, theirs: Tensor, losses: Tensor, mask: Tensor
    ) -> list[Tensor]:
        """Sum the losses as ms-swift does; return both scalars and how far the gradients differ."""
        with torch.enable_grad():
            terms = torch.where(mask, losses, 0).float() * self._factors(batch, mask)
            ours = terms.sum()
        wanted, found = (
            torch.autograd.grad(loss, output, retain_graph=True)[0].float()
            for loss in (theirs, ours)
        )
        return [
            theirs.detach().clone(),  # under a shadow Megatron divides it in place
            ours,
            terms.abs().sum(),
            (wanted - found).abs().max(),
            wanted.abs().max(),
        ]

    def _factors(self, batch: Any, mask: Tensor) -> Tensor | float:
        """Return what ms-swift 4.6.0 multiplies a token's loss by, 0-dim or ``[b, 1]``."""
        from megatron.core import parallel_state

        trainer = self.trainer
        if trainer.loss_type in _PER_SAMPLE:
            return 1 / (mask.sum(1, keepdim=True).clamp(min=1) * len(mask))
        if trainer.loss_type in _PER_WIDTH:
            return 1 / float(trainer.micro_batch_size * trainer.max_completion_length)
        tokens: Tensor = batch.num_items_in_batch / parallel_state.get_data_parallel_world_size()
        return int(trainer.args.num_microbatches) / tokens.clamp(min=1)


class _MaskedProducts(TorchFunctionMode):
    """Keeps the factors of each product of losses and a bool mask, by its node in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self._factors: dict[Any, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and keep its arguments if it is such a product."""
        made = func(*args, **(kwargs or {}))
        if _is_product(made) and len(args) == 2 and all(isinstance(one, Tensor) for one in args):
            losses, mask = args if args[1].dtype == torch.bool else args[::-1]
            if mask.dtype == torch.bool and mask.shape == losses.shape:
                self._factors[made.grad_fn] = losses, mask
        return made

    def summed_into(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and mask of the product that is nearest to a loss in its graph."""
        nodes: dict[Any, None] = {loss.grad_fn: None}
        seen: set[Any] = set()
        while nodes:
            found = [self._factors[node] for node in nodes if node in self._factors]
            if len(found) == 1:
                return found[0]
            if found:
                break
            seen.update(nodes)
            before = [one for node in nodes for one, _ in getattr(node, "next_functions", ())]
            nodes = {node: None for node in before if node is not None and node not in seen}
        raise ContractError(
            "ms-swift's GRPO loss was not summed from one product of losses and a bool mask, "
            "expected that of 4.6.0: use that release, or train without megatron_lossagg"
        )


def _is_product(made: Any) -> bool:
    node = made.grad_fn if isinstance(made, Tensor) else None
    return node is not None and node.name() == "MulBackward0"


class _SummedOverCP(torch.autograd.Function):
    """The identity; its backward pass sums the gradients over context-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Return the same numbers."""
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """One all-reduce over the context-parallel group."""
        from megatron.core import parallel_state

        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total


def _describe(values: list[float]) -> str:
    theirs, ours, scale, difference, gradient = values
    if not math.isfinite(theirs + scale + gradient):
        return ""  # a loss that is not finite is found elsewhere
    if abs(theirs - ours) <= 1e-4 * scale and difference <= 1e-4 * gradient:
        return ""
    return (
        f"ms-swift's GRPO loss gave {theirs:.6g}, what it sums per token gives {ours:.6g}, "
        f"with gradients that differ by {difference:.3g} of {gradient:.3g}: it has terms or "
        "factors that 4.6.0 has not, and they would be lost; use that release, or train without "
        "megatron_lossagg"
    )


def _warn_of_split_prompts(trainer: Any) -> None:
    """Warn once if a rank's steps cut the groups of completions that it trains in order."""
    from megatron.core import parallel_state

    if trainer.steps_per_generation == 1:
        return
    of_rank = trainer.global_batch_size // parallel_state.get_data_parallel_world_size()
    if of_rank % trainer.num_generations:
        warn_once(
            "prompts over several steps",
            f"prompt_mean counts a prompt within one optimizer step, and a rank's {of_rank} "
            f"completions per step cut groups of {trainer.num_generations}: a prompt weighs as a "
            "whole in each of its steps; make global_batch_size a multiple of num_generations on "
            "each rank",
        )


def _prompts(batch: Any) -> list[int]:
    found = getattr(batch, _PROMPT, [None])
    if None in found:
        raise ContractError(
            "got completions whose prompts are not known, expected those of the samples that "
            "get_local_rollout_batch repeated: call install before the first rollout, or choose "
            "another mode than prompt_mean"
        )
    return list(found)


def _number_prompts() -> None:
    """Let each microbatch keep the prompts of its completions.

    ``get_local_rollout_batch`` gets a data-parallel rank's prompts and repeats each;
    ``collate_to_grpo_micro_batch`` gets what became of them.
    """
    trainer = trainer_class(*GRPOIntegration.trainer_at)
    module: Any = importlib.import_module(_MODULE)
    repeat, collate = trainer.get_local_rollout_batch, module.collate_to_grpo_micro_batch
    numbers = itertools.count()

    @functools.wraps(repeat)
    def numbered(self: Any, batch: Any) -> Any:
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        size = parallel_state.get_data_parallel_world_size()
        for sample in batch:
            setattr(sample, _PROMPT, rank + size * next(numbers))
        return repeat(self, batch)

    @functools.wraps(collate)
    def collated(samples: Any, *args: Any, **kwargs: Any) -> Any:
        inputs, batch = collate(samples, *args, **kwargs)
        setattr(batch, _PROMPT, [getattr(sample, _PROMPT, None) for sample in samples])
        return inputs, batch

    trainer.get_local_rollout_batch = numbered
    module.collate_to_grpo_micro_batch = collated


def install(
    aggregation: Aggregation | str | None, *, options: Options | None = None
) -> ScheduleHook:
    """Rebind ms-swift's schedule in this process; return the hook, which counts its steps.

    As :func:`megatron_lossagg.integrations.ms_swift.install`, but ``prompt_mean`` is possible.
    """
    return installed(aggregation, GRPOIntegration(trains=aggregation is not None), options)


HEARD = Where(
    "swift.megatron.trainers.base",
    [
        Reduction(
            *(_MODULE, "MegatronGRPOTrainer.loss_func"),
            *("per_token_loss", "completion_mask", "inside"),
        ),
        Reduction(__name__, "GRPOIntegration.loss", "losses", None, "returned"),
    ],
    sums_gradients=False,
    has_names=False,
)
"""The functions by which its loss is weighed, ms-swift's and ours.

Sources: ms-swift 4.6.0 ``MegatronGRPOTrainer.loss_func``, ``reconstruct_tensor_cp``.
"""
