"""Writes the record of a run: one line for each training step that finished.

The hash of a step is the sum of its ranks' hashes, so it is gathered once, when the step has
finished. The line is written by the first rank of the last pipeline stage, the only stage that
knows a step's counts: without pipeline parallelism that is rank 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import megatron_lossagg
from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.record.step_record import RecordError, StepRecord, hash_weights, read_record
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.table import Counted

_START = b'{"step": '


class RecordFile:
    """The file to which a run appends its steps, on the one rank that writes it.

    A file that exists is continued; the rest of a line that a killed run has left is cut off. Two
    runs at the same time need two files: if another one has written, this one ends its record.

    Raises :class:`RecordError` for a file that is no record or cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).absolute()  # a script may change its folder
        self._has_failed = False
        self._last = 0
        try:
            if self._path.is_file():
                self._continue()
            with self._path.open("ab") as file:
                self._end = file.tell()
        except OSError as error:
            raise RecordError(
                f"--loss-aggregation-record {path} cannot be written ({error.strerror}), expected "
                "a file in a folder that exists: name another file"
            ) from None

    def _continue(self) -> None:
        self._last = next(reversed(read_record(self._path)), 0)
        content = self._path.read_bytes()
        end = content.rfind(b"\n") + 1
        if content[end : end + len(_START)] != _START[: len(content) - end]:
            raise RecordError(
                f"--loss-aggregation-record {self._path} is no record of steps: name another file"
            )
        with self._path.open("r+b") as file:
            file.truncate(end)

    def number(self, given: int | None) -> int:
        """Number the next step: as given, or one more than the last line's."""
        self._last = self._last + 1 if given is None else given
        return self._last

    def append(self, record: StepRecord) -> None:
        """Append a line. If that fails it warns once, and writes no further line."""
        if self._has_failed:
            return
        why = "another run has written to it"
        try:
            with self._path.open("ab") as file:
                self._has_failed = file.tell() != self._end
                if not self._has_failed:
                    file.write(record.line().encode())
                    self._end = file.tell()
        except OSError as error:
            self._has_failed, why = True, str(error.strerror)
        if self._has_failed:
            warnings.warn(
                f"--loss-aggregation-record {self._path} cannot be written any more "
                f"({why}): step {record.step} and those after it are not recorded",
                RuntimeWarning,
                stacklevel=2,
            )


def opened_record(
    path: str | None, groups: LiveGroups
) -> tuple[ProcessGroup | None, RecordFile | None]:
    """Return the group that gathers a step's record, and on its first rank the file.

    None and None if no record was asked for, and on ranks that have no part in it: of earlier
    stages, and all but the first of tensor parallelism. Raises :class:`ContractError` with dynamic
    context parallelism, and :class:`RecordError` as :class:`RecordFile`.
    """
    if path is not None and groups.is_dynamic:
        raise ContractError(
            "got a record with dynamic_context_parallel, expected none: a line holds the "
            "hash of whole sequences' weights, and each rank has parts of them; drop "
            "--loss-aggregation-record"
        )
    if path is None or not groups.is_last_stage or dist.get_rank(groups.tp_group) != 0:
        return None, None
    return groups.dp_cp_group, RecordFile(path) if groups.is_first else None


class StepRecorder:
    """Writes what a step trained, once it has finished, in one line.

    ``exchange``: over data- and context-parallel ranks. ``file``: on its first rank, else None.
    ``iteration``: the step's number; None is one more than the last.
    """

    def __init__(self, exchange: Exchange, file: RecordFile | None, iteration: int | None) -> None:
        self._exchange = exchange
        self._file = file
        self._iteration = iteration
        self._trained: list[Tensor] = []
        """The sum of each microbatch's trained weights, 0-dim float64."""

    @staticmethod
    def of(
        group: ProcessGroup | None, file: RecordFile | None, iteration: int | None
    ) -> StepRecorder | None:
        """Make it of what :func:`opened_record` returned; None without a group."""
        return None if group is None else StepRecorder(Exchange(group), file, iteration)

    def add(self, microbatch: Microbatch, *, is_first: bool) -> None:
        """Note a microbatch; ``is_first``: of a pass over the whole step. No host sync."""
        if is_first:
            self._trained.clear()
        trained = microbatch.weight_sum(torch.float64)
        if trained is not None:
            self._trained.append(trained)

    def finish(
        self,
        plans: Sequence[StepPlan],
        scaling: Scaling,
        groups: LiveGroups,
        recorded: Mapping[str, Any],
        *,
        counted: Counted | None = None,
        total: float = 1.0,
    ) -> None:
        """Gather the step and append its line; every rank of ``exchange`` calls.

        ``plans``: of its schedule calls. ``recorded``: what the step's guards found, by the field
        of the line. ``counted``: over several calls. ``total``: what the weights are over that
        were trained. One all-gather, one host sync for it and one to read the sums.
        """
        plan = plans[0]
        counted = counted or plan.counted
        has_weights = plan.aggregation.mode != CUSTOM
        own = 0
        if has_weights and groups.cp_rank == 0:
            own = sum(map(_hash_of, plans)) % 2**64
        trained = [w / total for w in torch.stack(self._trained).tolist()] if self._trained else []
        weights, weight_sum = _gathered(self._exchange, own, trained)
        if self._file is None:
            return
        aggregation = plan.aggregation
        self._file.append(
            StepRecord(
                step=self._file.number(self._iteration),
                mode=aggregation.mode,
                divisor=aggregation.divisor,
                exponent=aggregation.exponent,
                count_empty=bool(aggregation.count_empty),
                count=aggregation.count,
                active_tokens=counted.get("active_tokens"),
                samples=_of_kind(plans, counted, "samples"),
                prompts=_of_kind(plans, counted, "prompts"),
                weights=weights if has_weights else "",
                weight_sum=weight_sum if has_weights else None,
                weight_expected=_sum_of([one.expected_weight for one in plans]),
                k=scaling.k,
                loss_scaling=scaling.loss_scaling,
                num_microbatches=scaling.num_microbatches,
                data_parallel_size=groups.dp_size,
                context_parallel_size=groups.cp_size,
                coefficients=list(recorded.get("coefficients", ())),
                ratios=list(recorded.get("ratios", ())),
                warned=list(recorded.get("warned", ())),
                version=megatron_lossagg.__version__,
                counted=counted,
            )
        )


def _hash_of(plan: StepPlan) -> int:
    """Hash the weights of a plan's sequences on this rank."""
    weight_S, is_left_out_S = plan.weight_S, plan.is_left_out_S
    if is_left_out_S is not None:  # as of a run that does not have them
        weight_S = weight_S[~is_left_out_S]
    sequences, columns = plan.counted_sequences, [weight_S]
    if plan.aggregation.count == "weights":
        columns.append(sequences.token_weight_sums)
    return hash_weights(sequences.active_tokens, *columns)


def _of_kind(plans: Sequence[StepPlan], counted: Counted, name: str) -> Any:
    """Sum a count over plans; None if they share some."""
    letter = {"samples": "B", "prompts": "P"}[name]
    return _sum_of([plan.counts.known(letter) for plan in plans]) if name in counted else None


def _sum_of(values: Sequence[Any]) -> Any:
    """Sum numbers; None if one is not known."""
    return None if None in values else sum(values)


def _gathered(exchange: Exchange, own_hash: int, trained: Sequence[float]) -> tuple[str, float]:
    """Return the step's hash, 16 hexadecimal digits, and the sum of its trained weights.

    ``exchange``: over data- and context-parallel ranks. ``own_hash``: of this data-parallel rank's
    weights, on context-parallel rank 0 only and 0 on the others. ``trained``: sums of this rank's
    trained weights. One all-gather of two integers and one host sync.
    """
    bits = np.array([math.fsum(trained)]).view(np.int64)[0]
    own = np.array([np.array([own_hash], dtype=np.uint64).view(np.int64)[0], bits], dtype=np.int64)
    hash_W, bits_W = np.ascontiguousarray(exchange.integers(own).T)
    total = int(hash_W.view(np.uint64).sum(dtype=np.uint64))
    return f"{total:016x}", math.fsum(bits_W.view(np.float64))
