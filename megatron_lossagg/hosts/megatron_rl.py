"""``train_rl.py`` of Megatron-LM, core_v0.16 and 0.17: its rollouts and their groups.

A rollout's group decides nothing after its advantage, and Megatron-LM drops it before the batches
are made. ``prompt_mean`` needs it, and only for ``prompt_mean`` two functions of
``megatron.rl.rl_utils`` are wrapped (:meth:`RLAdapter.prepare`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.buffer import MicrobatchRows
from megatron_lossagg.errors import ContractError
from megatron_lossagg.hosts.megatron_lm import PretrainAdapter, count_segments, on_host

__all__ = ["RLAdapter"]


class RLAdapter(PretrainAdapter):
    """Rollouts, one turn of one per entry of the batch or several packed into a bin.

    The per-token losses hold policy, KL and entropy terms together. A mask is shifted by one
    against its tokens, as log-probabilities are. A turn of a rollout is a row; a group's rollouts
    have one prompt. Context parallelism is refused: train_rl.py does not split its tokens.
    """

    gives_prompts = True

    def __init__(self) -> None:
        super().__init__()
        self._groups: _Groups | None = None

    def prepare(self, aggregation: Aggregation) -> None:
        """Wrap the functions of ``megatron.rl.rl_utils`` that see the groups, for ``prompt_mean``.

        Both return what they returned. With packing, one ``all_gather_object`` over data-parallel
        ranks per collection of rollouts. Raises :class:`ContractError` where a name is missing.
        """
        if aggregation.mode != "prompt_mean":
            return
        module = importlib.import_module("megatron.rl.rl_utils")
        groups = self._groups = _Groups()
        around = {"prepare_data_for_update": groups.follow, "prepare_trajectories": groups.note}
        for name in around:
            if not hasattr(module, name):
                raise ContractError(
                    f"got megatron.rl.rl_utils without {name}, expected that of Megatron-LM "
                    "core_v0.16 or 0.17: prompt ids come from there; choose another "
                    "--loss-aggregation"
                )
        for name, method in around.items():
            setattr(module, name, _wrapped(getattr(module, name), method))

    def rows(self, data: Any) -> MicrobatchRows:
        """Count rollouts: ``data`` is ``prepare_data_for_update``'s list, or a bin's index."""
        from megatron.training import get_args

        args = get_args()
        if args.context_parallel_size > 1:
            raise ContractError(
                "got train_rl.py with context parallelism, expected --context-parallel-size 1: "
                "core_v0.16 to 0.19 give every context-parallel rank all tokens, and how later "
                "ones gather log-probabilities is not known here"
            )
        if not args.rl_use_sequence_packing:
            mask = on_host(data[3])[:, 1:]
            return MicrobatchRows(
                active_tokens=(mask != 0).sum(1),
                lengths=np.full(len(mask), mask.shape[1]),
                prompt=None if self._groups is None else self._groups.of_entries(data),
            )
        from megatron.rl.rl_utils import get_rl_runtime_state

        return self._bin(get_rl_runtime_state().packing_context, int(data[0]))

    def _bin(self, context: Any, index: int) -> MicrobatchRows:
        mask = on_host(context.packed_loss_mask[index, 1:])
        info = context.packing_info
        rows = list(info.bin_seq_indices[index])
        length_S = [info.seq_lengths[row] for row in rows]
        start_S = list(info.seq_starts[index])[: len(length_S)]
        if start_S[:1] not in ([], [0]):
            raise ContractError(f"got a bin whose first row begins at {start_S[0]}, expected 0")
        is_filler = [False] * len(start_S)
        prompts = None if self._groups is None else self._groups.of_packed(rows)
        end = start_S[-1] + length_S[-1] if length_S else 0
        if end < len(mask):
            start_S, is_filler = [*start_S, end], [*is_filler, True]
            prompts = None if prompts is None else [*prompts, -1]
        return count_segments(start_S, is_filler, mask, prompts)


class _Groups:
    """Which group a turn belongs to, from a collection of rollouts to its batches."""

    def __init__(self) -> None:
        self._group_of: dict[int, int] = {}
        self._local: list[int] = []
        self._global: list[int] = []

    def follow(self, stock: Any, **given: Any) -> Any:
        """Run ``prepare_data_for_update``; its iterator's batches keep their groups."""
        # By identity: what follows drops the nesting and splits the list over ranks.
        self._group_of = {
            id(rollout): group for group, many in enumerate(given["rollouts"]) for rollout in many
        }
        prepared = stock(**given)
        if given["sequence_packing"]:
            from megatron.core import mpu

            ranks: list[list[int]] = [[]] * mpu.get_data_parallel_world_size()
            dist.all_gather_object(ranks, self._local, group=mpu.get_data_parallel_group())
            self._global = [group for rank in ranks for group in rank]
            return prepared
        iterator = prepared[0] if isinstance(prepared, tuple) else prepared  # a tuple from 0.17 on
        iterator.iterable = self._numbered(iterator.iterable)
        return prepared

    def note(self, stock: Any, **given: Any) -> Any:
        """Run ``prepare_trajectories``, which gets this rank's rollouts."""
        self._local = [
            self._group_of[id(rollout)] for rollout in given["rollouts"] for _ in rollout.trajectory
        ]
        return stock(**given)

    def _numbered(self, batches: Iterator[Any]) -> Iterator[_Batch]:
        """Give each batch the groups of its rows; the batches repeat in order."""
        groups, position = list(self._local), 0
        for fields in batches:
            batch = _Batch(fields)
            count = len(fields[0])
            batch.groups = groups[position : position + count]
            position = (position + count) % len(groups)
            yield batch

    def of_entries(self, data: Any) -> list[int]:
        """Return the group of each row of a batch."""
        if not isinstance(data, _Batch):
            raise ContractError(
                f"got a {type(data).__name__} from the data iterator, expected a batch of "
                "prepare_data_for_update's: its rollouts' prompts are not known"
            )
        return data.groups

    def of_packed(self, rows: Sequence[int]) -> list[int]:
        """Return the group of each row of a bin, by its index over all ranks."""
        return [self._global[row] for row in rows]


class _Batch(list[Any]):
    """A batch that knows the groups of its rows; Megatron-LM unpacks it as the list it is."""

    groups: list[int]


def _wrapped(stock: Any, around: Any) -> Any:
    """Call ``around(stock, ...)`` with every argument by name."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        return around(stock, **signature.bind(*args, **kwargs).arguments)

    return run
