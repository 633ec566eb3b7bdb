"""Check a loss function of one's own: does its gradient depend on how the step is split?

The function runs on one process in one microbatch, which is the reference, and then on ranks of
this machine's CPU, with the same sequences split over microbatches, data- and context-parallel
ranks, through Megatron-Core's own schedule, DistributedDataParallel and finalize. What each token
is trained with is weighed (``megatron_lossagg/weigh``). No part of this package trains.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_lossagg.contract.scaling import LOSS_SCALINGS, LossScaling
from megatron_lossagg.errors import ProofError, ReducerPathError
from megatron_lossagg.reduction.aggregation import resolved
from megatron_lossagg.verify.job import (
    Event,
    RanksTimedOut,
    failure_of,
    first_failure,
    launched,
)
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.text import number_of
from megatron_lossagg.weigh.causes import is_near, written
from megatron_lossagg.weigh.compare import TOLERANCE

if TYPE_CHECKING:
    from torch import Tensor

SPLITS: tuple[dict[str, Any], ...] = (
    {"microbatches": 3},
    {"microbatches": 1, "dp": 2},
    {"microbatches": 1, "cp": 2},
    {"microbatches": 1, "packing": "bshd"},
    {"microbatches": 3, "dp": 2, "cp": 2},
    {"microbatches": 3, "dp": 2, "cp": 2, "packing": "bshd"},
)
"""M, DP, CP and packing, each by itself, and together."""
SIGNATURE = "loss_func(microbatch, output)"
TIMEOUT = 300.0
_LARGEST = 1000
"""The largest k for which a factor is written as 1/k."""


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """What a loss trains in one split."""

    split: str
    loss_scaling: LossScaling
    smallest: float
    """A token's weight, relative to the one on one process in one microbatch; NaN or infinite if
    other tokens are trained than there."""
    largest: float
    factor: float | None
    """That weight if it is the same for all tokens; 1 is right."""
    equals: Sequence[str]
    """The quotients of M, DP and CP that the factor equals, such as ``1/(M DP)``."""
    causes: Sequence[str]
    """What explains weights that are not the same for all tokens."""
    trains: str
    """The mode that it equals, with a factor if it has one; empty if none."""
    passed: bool
    """Whether it trains what one process trains in one microbatch."""

    @property
    def measured(self) -> str:
        """Say in a line what was measured, and what explains it."""
        if self.passed:
            return "1"
        if self.factor is not None:
            return " = ".join([_number(self.factor), *self.equals])
        if not math.isfinite(self.smallest + self.largest):
            return "not finite, or of tokens that one process does not train"
        causes = self.causes or ["no known cause"]
        return f"{self.smallest:.4g} to {self.largest:.4g}: {'; '.join(causes)}"


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """The outcome of :func:`check_loss`; as text, its report."""

    loss_func: str
    references: Mapping[str, str]
    """The mode that one process trains in one microbatch, in each loss scaling; empty if none."""
    cases: Sequence[LossCase]
    failure: str = ""
    """Why the ranks ended early, if they did."""

    @property
    def passed(self) -> bool:
        """Whether every case trains what one process trains in one microbatch."""
        return bool(self.cases) and not self.failure and all(case.passed for case in self.cases)

    @property
    def _right_in_one_scaling(self) -> LossScaling | None:
        """The loss scaling whose cases pass, if others' do not: what the loss is written for."""
        wrong = {case.loss_scaling for case in self.cases if not case.passed}
        right = {case.loss_scaling for case in self.cases} - wrong
        return right.pop() if wrong and len(right) == 1 and not self.failure else None

    def __str__(self) -> str:
        """Return the report."""
        right = sum(case.passed for case in self.cases)
        result = f"{'PASS' if self.passed else 'FAIL'}: {self.loss_func} trains what one process "
        result += f"trains in {right} of {number_of(len(self.cases), 'case')}"
        if not self.cases:
            result = f"FAIL: {self.loss_func} was not measured"
        lines = [textwrap.fill(result, 80)]
        if only := self._right_in_one_scaling:
            run = f"{'with' if only == 'per_token' else 'without'} --calculate-per-token-loss"
            lines.append(f"It is right {run} only (--loss-scaling {only})")
        for loss_scaling, mode in self.references.items():
            trains = f", which trains {mode}" if mode else ""
            relative = f"{loss_scaling}: relative to one process, one microbatch{trains}"
            lines += ["", textwrap.fill(relative, 80)]
            for case in (case for case in self.cases if case.loss_scaling == loss_scaling):
                also = f", trains {case.trains}" if case.trains and not case.passed else ""
                line = f"  {case.split:<22}  {case.measured}{also}"
                lines.append(textwrap.fill(line, 80, subsequent_indent=" " * 26))
        return "\n".join([*lines, *filter(None, [self.failure])])


@dataclass(frozen=True, kw_only=True)
class LossJob:
    """A check as a value: pickled, and run on every rank."""

    path: str
    batch: Any
    """Sequences, the path of a function that returns them if only ranks can import it, or None for
    those built in."""
    splits: Sequence[Parallelism]
    loss_scalings: Sequence[LossScaling]
    import_from: Sequence[str] = field(repr=False)
    """``sys.path`` of who checks."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return max(split.world_size for split in self.splits)

    def run(self) -> Iterator[Event]:
        """Run it on this rank of a launcher: ``reference`` of each loss scaling, ``case`` of each
        split, which ranks outside of the split have without a verdict.
        """
        import megatron_lossagg.cpu as cpu

        cpu.install()
        sys.path += [path for path in self.import_from if path not in sys.path]
        from megatron_lossagg.verify.loss_steps import run_loss_job

        return run_loss_job(self)


def check_loss(
    loss_func: Callable[[dict[str, Any], Tensor], Any] | str,
    batch: Sequence[Mapping[str, Any]] | str | None = None,
    *,
    loss_scaling: LossScaling | Sequence[LossScaling],
    splits: Sequence[Mapping[str, Any]] = SPLITS,
    timeout: float = TIMEOUT,
) -> LossCheck:
    """Check that the gradient of a loss function of one's own does not depend on the split.

    Each token's ``d loss / d output``, as Megatron-Core reduces it, is compared with the same on
    one process in one microbatch, to 1e-4, in float32.

    Args:
        loss_func: A function of a module, or ``pkg.mod:name``. Called as
            ``loss_func(microbatch, output)``, it returns what Megatron's schedule expects:
            ``(loss, num_tokens, report)`` or ``(loss, report)``. It may communicate over Megatron's
            groups. ``output``: the losses of this rank's tokens, as a GPTModel returns them,
            float32, ``[1, T]`` or, unpacked, ``[b, s]``.
            ``microbatch``: each column of ``batch``, of tokens like ``output``, padded with 0, of
            sequences ``[S]``; ``sequence``, the number of each token's sequence; ``cu_seqlens``,
            int32 ``[S + 1]``, before slicing; ``step``, all microbatches of this rank.
        batch: At least 7 sequences, as mappings: ``loss_mask`` and every other column of tokens as
            lists, arrays or tensors of one length, columns of sequences as numbers; ``output`` is
            drawn if it is left out. Or ``pkg.mod:name`` of a function that returns them. None: 12
            sequences of ``loss_mask``. Only if the loss is linear in ``output``, with equal
            coefficients, a mode can be named.
        loss_scaling: ``per_token`` if the run has ``calculate_per_token_loss``, else ``average``;
            or both.
        splits: What to compare, by default six: ``dp``, ``cp``, ``microbatches`` (3), ``packing``
            (thd, or bshd for unpacked sequences) and ``cp_partition`` (zigzag or contiguous).
        timeout: Seconds after which the ranks are ended.

    It starts as many processes as the largest split has ranks, by default four, on gloo.

    Returns:
        The cases, and as text their report. What ``loss_func`` raises is its ``failure``.

    Raises:
        ProofError: Wrong arguments.

    Examples:
        ``assert check.passed, str(check)`` is the whole of a test. What a batch has to have:

        >>> sequences = [{"loss_mask": [1, 1, 0], "advantage": 0.5}] * 5
        >>> try:
        ...     check = check_loss("my_losses:policy", sequences, loss_scaling="per_token")
        ... except ValueError as error:
        ...     print(error)
        batch: got 5 sequences, expected at least 7: one more than microbatches of the largest split
    """
    scalings = _checked_scalings(loss_scaling)
    layouts = _checked_splits(splits)
    job = LossJob(
        batch=_batch_of(batch, layouts),
        path=_path_of(loss_func),
        splits=layouts,
        loss_scalings=scalings,
        import_from=list(sys.path),
    )
    references: dict[str, str] = {}
    cases: list[LossCase] = []
    failure = ""

    def take(event: Event) -> None:
        if event["event"] == "reference":
            references[event["loss_scaling"]] = event["trains"]
        elif event["event"] == "case":
            cases.append(LossCase(**event["case"]))

    try:
        done = launched(job, take, processes=job.world_size, timeout=timeout)
        failure = failure_of(done)
    except RanksTimedOut as expired:
        what = "\n".join([f"The ranks did not finish in {timeout:g} s", *expired.last])
        failure = first_failure(what, str(expired.stderr))
    return LossCheck(loss_func=job.path, references=references, cases=cases, failure=failure)


def checked_batch(
    batch: Sequence[Mapping[str, Any]], splits: Sequence[Parallelism]
) -> list[dict[str, Tensor]]:
    """Return a batch's sequences with tensors as columns, or raise :class:`ProofError`."""
    needed = 1 + max(split.dp * max(split.m_of_ranks) for split in splits)
    if not isinstance(batch, Sequence) or len(batch) < needed:
        got = number_of(len(batch), "sequence") if isinstance(batch, Sequence) else repr(batch)
        raise ProofError(
            f"batch: got {got}, expected at least {needed}: one more than microbatches of the "
            "largest split"
        )
    made = []
    for index, sequence in enumerate(batch):
        if "loss_mask" not in sequence or {*sequence} != {*batch[0]}:
            raise ProofError(
                f"batch: got the columns {[*sequence]} in sequence {index}, expected loss_mask and "
                f"those of the first, {[*batch[0]]}"
            )
        if reserved := _OWN.intersection(sequence):
            raise ProofError(f"batch: got the column {min(reserved)!r}, which is made here: rename")
        columns = {name: _column(value) for name, value in sequence.items()}
        length = columns["loss_mask"].numel()
        wrong = [n for n, column in columns.items() if column.dim() and len(column) != length]
        if wrong or not length:
            raise ProofError(
                f"batch: got columns of other lengths than loss_mask, {length}, in sequence "
                f"{index}: {wrong}; expected one entry per token, or one number"
            )
        made.append(columns)
    return made


_OWN = {"sequence", "cu_seqlens", "step"}


def _column(value: Any) -> Tensor:
    import torch

    column = torch.as_tensor(value).detach().cpu()
    if column.dtype == torch.bool:
        return column
    return column.float() if column.is_floating_point() else column.long()


def _checked_scalings(loss_scaling: object) -> tuple[LossScaling, ...]:
    given = [loss_scaling] if isinstance(loss_scaling, str) else loss_scaling
    if not isinstance(given, (list, tuple)) or not given or not {*given} <= {*LOSS_SCALINGS}:
        raise ProofError(f"loss_scaling: got {loss_scaling!r}, expected one of {LOSS_SCALINGS}")
    return tuple(given)


def _checked_splits(splits: Sequence[Mapping[str, Any]]) -> list[Parallelism]:
    if not splits:
        raise ProofError(f"got no splits, expected some, such as {SPLITS[0]}")
    return [_checked_split(split) for split in splits]


def _checked_split(given: Mapping[str, Any]) -> Parallelism:
    known = {"microbatches", "dp", "cp", "packing", "cp_partition"}
    if not {*given} <= known or not isinstance(given.get("microbatches", 1), int):
        raise ProofError(
            f"got the split {dict(given)}, expected {', '.join(sorted(known))}, with one number of "
            "microbatches: a loss function is checked without a model"
        )
    split = Parallelism(**given)
    if split.packing not in ("thd", "bshd"):
        raise ProofError(f"got the packing {split.packing!r}, expected thd or bshd")
    return split


def _path_of(loss_func: Any) -> str:
    if isinstance(loss_func, str):
        _found(loss_func, "loss_func", SIGNATURE)
        return loss_func
    module, name = getattr(loss_func, "__module__", ""), getattr(loss_func, "__qualname__", "")
    if module in ("", "__main__") or not name.isidentifier():
        raise ProofError(
            f"loss_func: got {loss_func!r}, expected a function of a module, which other processes "
            "can import: define it there, or pass pkg.mod:name"
        )
    return f"{module}:{name}"


def _batch_of(batch: Any, splits: Sequence[Parallelism]) -> Any:
    """Call the function of a path here, before any rank starts, if its module can be imported."""
    made = batch
    if isinstance(batch, str):
        function = _found(batch, "batch", "batch()")
        if function is None:
            return batch
        try:
            made = function()
        except Exception as error:  # of the user's code: any
            raise ProofError(f"batch {batch!r} raised {error!r}") from error
    return None if batch is None else checked_batch(made, splits)


def _found(path: str, name: str, signature: str) -> Any:
    """Import what is at a path; None if its module can be imported by the ranks at most, which have
    stand-ins for CUDA.
    """
    try:
        return resolved(path, name, signature)
    except ReducerPathError as error:
        if isinstance(error.__cause__, RuntimeError | AssertionError):  # as torch without CUDA
            return None
        raise ProofError(str(error)) from error


def trained(factors: Mapping[str, float]) -> str:
    """Write the mode and the factor that say most: ``0.142857 = 1/7 times token_mean``.

    ``factors``: of each mode that fits but for a factor, of which one without is chosen, then one
    whose factor is 1/k or k.
    """
    if right := [mode for mode, factor in factors.items() if is_near(factor, 1, TOLERANCE)]:
        return right[0]
    written = {mode: _number(factor) for mode, factor in factors.items()}
    neat = sorted(written, key=lambda mode: " = " not in written[mode])
    return f"{written[neat[0]]} times {neat[0]}" if neat else ""


def _number(factor: float) -> str:
    """Write a factor, and as 1/k or k if it is one."""
    near = Fraction(factor).limit_denominator(_LARGEST) if math.isfinite(factor) else Fraction()
    is_one = 1 in (abs(near.numerator), near.denominator) and near
    is_equal = is_one and is_near(factor, float(near), TOLERANCE / 10)
    return written(factor, [str(near)] if is_equal and str(near) != f"{factor:.6g}" else [])
