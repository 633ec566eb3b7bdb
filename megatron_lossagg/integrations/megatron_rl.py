"""``train_rl.py`` of Megatron-LM, from core_v0.16 on: its turns, rollouts and groups.

A sequence is a turn of a rollout; after 0.19 it is a whole rollout whose turns continue each other.
Which rollout and which group a turn belongs to decides nothing after its advantage, and Megatron-LM
drops it before the batches are made. A mean over samples needs the rollout if it has several turns,
``prompt_mean`` needs the group: so two functions of ``megatron.rl.rl_utils`` are wrapped
(:meth:`RLIntegration.prepare`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import count_segments, imported, to_numpy
from megatron_lossagg.integrations.megatron_lm import MaskedSumIntegration
from megatron_lossagg.loop.aggregator import LossAggregator
from megatron_lossagg.loop.schedule_hook import FrameworkLoss
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.exchange import together
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.sequences import Sequences


class RLIntegration(MaskedSumIntegration):
    """Turns of rollouts, one per entry of the batch or several packed into a bin.

    The per-token losses hold policy, KL and entropy terms together. A sample is a rollout with all
    its turns, a prompt its group. Mask and losses have no value for a sequence's last logit, which
    predicts nothing: one of mask 0 is added, so that they are split as tokens are. With context
    parallelism every rank has gathered all log-probabilities (after 0.19; earlier releases split
    nothing, and are refused), and weighs those of its own logits.
    """

    gives_prompts = True
    gives_token_weights = False

    def __init__(self) -> None:
        super().__init__()
        self._turns = _Turns()

    def prepare(self, aggregations: Sequence[Aggregation]) -> None:
        """Wrap the functions of ``megatron.rl.rl_utils`` that see rollouts and groups.

        Both return what they returned. With packing, one all-gather over data-parallel
        ranks per collection of rollouts. Raises :class:`ContractError` if a function is missing
        or takes other arguments.
        """
        super().prepare(aggregations)
        module = imported(
            "megatron.rl.rl_utils",
            expected="a Megatron-LM checkout (core_v0.16 or later): run in it, with what its "
            "train_rl.py imports installed",
        )
        around = {
            "prepare_data_for_update": (self._turns.follow, [{"rollouts", "sequence_packing"}]),
            "prepare_trajectories": (self._turns.note, [{name} for name in _LISTS]),
        }
        for name, (_, known) in around.items():
            found = getattr(module, name, None)
            given = set() if found is None else set(inspect.signature(found).parameters)
            if not any(needed <= given for needed in known):
                takes = "missing" if found is None else f"{name}{inspect.signature(found)}"
                expected = " or ".join(", ".join(sorted(needed)) for needed in known)
                raise ContractError(
                    f"got a train_rl.py whose megatron.rl.rl_utils.{name} is {takes}, expected the "
                    f"one of Megatron-LM core_v0.16 to d98e8a64, with {expected}: use one of these "
                    "releases, or train without --loss-aggregation"
                )
        for name, (method, _) in around.items():
            setattr(module, name, _wrapped(getattr(module, name), method))

    def sequences(self, data: Any) -> Sequences:
        """Count rollouts: ``data`` is ``prepare_data_for_update``'s list, or a bin's index."""
        from megatron.training import get_args

        args = get_args()
        from megatron.rl import rl_utils

        if args.context_parallel_size > 1 and not hasattr(rl_utils, _SPLITS):
            raise ContractError(
                "got train_rl.py with context parallelism and a megatron.rl.rl_utils without "
                f"{_SPLITS}, expected --context-parallel-size 1: releases up to core_v0.19 give "
                "every context-parallel rank all tokens; use a later Megatron-LM (d98e8a64)"
            )
        if args.rl_use_sequence_packing:
            return self._bin(rl_utils.get_rl_runtime_state().packing_context, int(data[0]))
        mask = to_numpy(data[3])[:, 1:]
        turns = self._turns.of_entries(data)
        sample, prompt = self._ids(turns)
        return Sequences(
            active_tokens=(mask != 0).sum(1),
            lengths=np.full(len(mask), mask.shape[1] + 1),
            sample=sample,
            prompt=prompt,
            is_padding=[int(turn == _NO_TURN) for turn in turns],
        )

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Take mask and losses ``[b, s - 1]``, and add the last logit's, of mask 0."""
        found = super().loss(loss_func, output)

        def whole(values: Tensor) -> Tensor:
            return pad(values.view(output.shape), (0, 1)).reshape(-1)

        return replace(found, losses=whole(found.losses), mask=whole(found.mask))

    def layout(self, aggregator: LossAggregator, lengths: Sequence[int]) -> Layout:
        """Split as Transformer Engine does, whatever ``cp_partition_mode`` says, and gathered."""
        cp_size, cp_rank = aggregator.cp_size, aggregator.cp_rank
        offsets = [0, *itertools.accumulate(lengths)]
        layout = Layout.thd_zigzag(offsets, cp_size=cp_size, cp_rank=cp_rank)
        return layout.gathered(sums_gradients=True)

    def _bin(self, context: Any, index: int) -> Sequences:
        mask = np.append(to_numpy(context.packed_loss_mask[index, 1:]), 0)
        info = context.packing_info
        sequences = list(info.bin_seq_indices[index])
        start_S = list(info.seq_starts[index]) or [0]  # and the last end; an empty bin has none
        turns = [*self._turns.of_packed(sequences), _NO_TURN]  # the tail; it may be empty
        sample, prompt = self._ids(turns)
        is_padding = [turn == _NO_TURN for turn in turns]
        return replace(count_segments(start_S, is_padding, mask), sample=sample, prompt=prompt)

    def _ids(self, turns: Sequence[_Turn]) -> tuple[list[int] | None, list[int] | None]:
        """Return samples if a rollout has several turns, and prompts if they are needed.

        Each kind of id costs the plan an exchange of all sequences. Every rank decides alike.
        """
        samples = [turn.rollout for turn in turns] if self._turns.are_several else None
        prompts = [turn.group for turn in turns] if self.needs_prompts else None
        if samples or prompts:
            _warn_of_several_steps()
        return samples, prompts


def _warn_of_several_steps() -> None:
    """Warn once if a collection of rollouts is trained in several optimizer steps."""
    from megatron.training import get_args

    args = get_args()
    collected = args.grpo_prompts_per_step * args.grpo_group_size
    if args.global_batch_size < collected:
        warn_once(
            "a collection over several steps",
            f"a collection of {collected} rollouts is trained in steps of {args.global_batch_size}:"
            " a prompt, or a rollout of several turns, that has sequences in several steps weighs "
            "as a whole in each; set --global-batch-size to that of the collection",
        )


class _Turn(NamedTuple):
    """Which rollout and which group a turn belongs to, both numbered over all ranks."""

    rollout: int
    group: int


_NO_TURN = _Turn(-1, -1)
_SPLITS = "_scatter_for_context_parallel"
"""Of ``megatron.rl.rl_utils``: splits tokens over context-parallel ranks, after 0.19."""
_LISTS = ("rollouts", "rollout_turns", "rows")
"""What ``prepare_trajectories`` calls this rank's list: 0.16 to 0.18, 0.19, and after it."""


class _Turns:
    """Follows turns from a collection of rollouts to its batches."""

    def __init__(self) -> None:
        self.are_several = False
        """Whether a rollout of the collection has more than one turn; the same on every rank."""
        self._of: dict[int, _Turn] = {}
        self._local: list[_Turn] = []
        self._global: list[_Turn] = []

    def follow(self, stock: Callable[..., Any], **given: Any) -> Any:
        """Run ``prepare_data_for_update``; its iterator's batches keep their turns."""
        rollouts = [
            (rollout, group) for group, many in enumerate(given["rollouts"]) for rollout in many
        ]
        # At most: after 0.19 turns that continue each other are one sequence.
        self.are_several = any(len(rollout.trajectory) > 1 for rollout, _ in rollouts)
        # By identity: what follows drops the nesting and splits the list over ranks.
        self._of = {id(found): _Turn(i, group) for i, (found, group) in enumerate(rollouts)}
        self._of[id(None)] = _NO_TURN  # a row that keeps ranks alike, from 0.19 on
        prepared = stock(**given)
        if given["sequence_packing"]:
            from megatron.core import mpu

            with together(mpu.get_data_parallel_group(), "pack its rollouts") as ranks:
                ranks.own = self._local
            self._global = [turn for rank in ranks.of_ranks for turn in rank]
            return prepared
        iterator = prepared[0] if isinstance(prepared, tuple) else prepared  # a tuple from 0.17 on
        iterator.iterable = self._numbered(iterator.iterable)
        return prepared

    def note(self, stock: Callable[..., Any], **given: Any) -> Any:
        """Run ``prepare_trajectories``, which gets this rank's rollouts, turns or rows."""
        name = next(name for name in _LISTS if name in given)
        self._local = [
            self._of[id(entry[0] if isinstance(entry, tuple) else entry)]
            for entry in given[name]
            for _ in (entry.trajectory if name == "rollouts" else [entry])
        ]
        return stock(**given)

    def _numbered(self, batches: Iterator[Any]) -> Iterator[_Batch]:
        """Give each batch the turns of its sequences; the batches repeat in order."""
        turns, position = list(self._local), 0
        for fields in batches:
            batch = _Batch(fields)
            count = len(fields[0])
            batch.turns = turns[position : position + count]
            position = (position + count) % len(turns)
            yield batch

    def of_entries(self, data: Any) -> list[_Turn]:
        """Return the turn of each sequence of a batch."""
        if not isinstance(data, _Batch):
            raise ContractError(
                f"got a {type(data).__name__} from the data iterator, expected a batch of "
                "prepare_data_for_update's: which rollouts its sequences belong to is not known"
            )
        return data.turns

    def of_packed(self, sequences: Sequence[int]) -> list[_Turn]:
        """Return the turn of each sequence of a bin, by its index over all ranks."""
        return [self._global[sequence] for sequence in sequences]


class _Batch(list[Any]):
    """A batch that knows the turns of its sequences; Megatron-LM unpacks it as the list it is."""

    turns: list[_Turn]


def _wrapped(stock: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``around(stock, ...)`` with every argument by name."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        return around(stock, **signature.bind(*args, **kwargs).arguments)

    return run
