"""The steps of a check of a loss function: on each rank, in a world of each split's size.

The model is a table: the output of a token is an entry, so that the gradient of an entry, as
Megatron-Core reduces it, is what the token is trained with. Shape suffixes: Y = tokens of all
sequences, and one entry of padding.
"""

from __future__ import annotations

import gc
import math
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from megatron_lossagg.contract.scaling import LossScaling
from megatron_lossagg.errors import ProofError
from megatron_lossagg.reduction.aggregation import resolved
from megatron_lossagg.verify.job import Event
from megatron_lossagg.verify.own_loss import SIGNATURE, LossCase, LossJob, checked_batch, trained
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.small_gpt import config_of, run_schedule
from megatron_lossagg.verify.step_data import LENGTHS
from megatron_lossagg.verify.world import split_world
from megatron_lossagg.weigh.causes import equal_to
from megatron_lossagg.weigh.compare import TOLERANCE, Weighed
from megatron_lossagg.weigh.weighing import Weighing

_BY_TOKEN, _BY_SAMPLE, _AS_IT_IS = "token_mean", "sample_mean", "weights"


def run_loss_job(job: LossJob) -> Iterator[Event]:
    """Run a check on this rank, as :meth:`LossJob.run` says."""
    store, rank, _ = next(rendezvous("env://"))
    loss_func = resolved(job.path, "loss_func", SIGNATURE)
    if rank == 0:
        store.set("batch", pickle.dumps(_batch_of(job)))
    sequences = pickle.loads(store.get("batch"))
    gc.freeze()  # else every collection walks all that was imported
    yield {"event": "start"}
    for loss_scaling in job.loss_scalings:
        one = Parallelism(microbatches=1)
        with _world(PrefixStore(f"{loss_scaling} {rank}", store), 0, one):
            alone = _Step(loss_func, sequences, one, loss_scaling)
            terms = alone.run()
        reference_Y = alone.gradient_Y
        if not reference_Y.isfinite().all() or not reference_Y.any() or reference_Y[-1] != 0:
            raise ProofError(
                f"{job.path} trains on one process in one microbatch "
                f"{'nothing' if not reference_Y.any() else 'padding, NaN or inf'}, expected finite "
                "weights of tokens of the batch"
            )
        trains = _trains(terms[_AS_IT_IS])
        yield {"event": "reference", "loss_scaling": loss_scaling, "trains": trains}
        for number, split in enumerate(job.splits):
            case = None
            if rank < split.world_size:
                with _world(PrefixStore(f"{loss_scaling} split {number}", store), rank, split):
                    step = _Step(loss_func, sequences, split, loss_scaling, reference_Y)
                    case = asdict(_case(split, loss_scaling, step.run()))
                    del step
            yield {"event": "case" if case else "", "case": case}
    yield {"event": "end"}


def _batch_of(job: LossJob) -> list[dict[str, Tensor]]:
    rng = random.Random(5)
    made = job.batch
    if made is None:
        masks = [[1, *(int(rng.random() < 0.8) for _ in range(n - 1))] for n in LENGTHS[:12]]
        made = [{"loss_mask": [float(m) for m in mask]} for mask in masks]
    elif isinstance(made, str):
        made = resolved(made, "batch", "batch()")()
    checked = checked_batch(made, job.splits)
    generator = torch.Generator().manual_seed(5)
    for columns in checked:
        drawn = 0.5 + torch.rand(len(columns["loss_mask"]), generator=generator)
        columns["output"] = columns.get("output", drawn).float()
    return checked


@contextmanager
def _world(store: Any, rank: int, split: Parallelism) -> Iterator[None]:
    """Be a rank of a world of the split's size, with Megatron's groups, and leave it."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=split.world_size)
    with split_world(replace(split, float32=True)):
        yield
        gc.collect()  # of the model, which holds the groups
    dist.destroy_process_group()


class _Table(torch.nn.Module):
    """The output of token t is entry t."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, output_Y: Tensor) -> None:
        super().__init__()
        self.output_Y = torch.nn.Parameter(output_Y.clone())

    def set_input_tensor(self, tensor: Any) -> None:
        """Take nothing: there is one stage."""

    def forward(self, index: Tensor) -> Tensor:
        return self.output_Y[index]


class _Columns(dict[str, Any]):
    """A microbatch, as a loss function reads it."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"no sequence has {name!r}: give it as a column of batch (--batch)")


class _Step:
    """One step of a split on this rank."""

    def __init__(
        self,
        loss_func: Callable[[dict[str, Any], Tensor], Any],
        sequences: Sequence[dict[str, Tensor]],
        split: Parallelism,
        loss_scaling: LossScaling,
        reference_Y: Tensor | None = None,
    ) -> None:
        self.loss_func = loss_func
        self.split = split
        self.m = split.m_of_ranks[0]
        lengths = [len(columns["loss_mask"]) for columns in sequences]
        self.starts = [0, *accumulate(lengths)]
        outputs = [columns["output"] for columns in sequences]
        config = config_of(split, per_token=loss_scaling == "per_token")
        table = _Table(torch.cat([*outputs, torch.ones(1)]))
        self.chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), table)
        self.is_relative = reference_Y is not None
        if reference_Y is None:
            reference_Y = torch.ones(self.starts[-1] + 1)
        self.trained_Y = reference_Y != 0
        n_Y = torch.ones_like(reference_Y)
        for begin, end in zip(self.starts, self.starts[1:], strict=False):
            n_Y[begin:end] = self.trained_Y[begin:end].sum()
        n, b = self.trained_Y.sum(), (n_Y[self.starts[:-1]] > 0).sum()
        self.to_token_Y, self.to_sample_Y = 1 / (n * reference_Y), n / (b * n_Y)
        self.longest = max(lengths)
        dp_rank = parallel_state.get_data_parallel_rank()
        keys = _assigned(len(sequences), split.dp, self.m)
        self.microbatches = [
            self._packed(sequences, [i for i, key in enumerate(keys) if key == (dp_rank, m)])
            for m in range(self.m)
        ]
        for columns, _, _ in self.microbatches:
            columns["step"] = [columns for columns, _, _ in self.microbatches]

    @property
    def gradient_Y(self) -> Tensor:
        """Return what each token was trained with."""
        gradient: Tensor = self.chunk.module.output_Y.main_grad.clone()
        return gradient

    def _packed(
        self, sequences: Sequence[dict[str, Tensor]], indices: Sequence[int]
    ) -> tuple[dict[str, Any], Tensor, list[int]]:
        """Return a microbatch's columns, index in Y of its tokens here, tokens of its sequences."""
        bshd = self.split.packing == "bshd"
        padded = [
            self.split.padded(self.longest if bshd else len(sequences[i]["loss_mask"]))
            for i in indices
        ]
        offsets = [0, *accumulate(padded)]
        held = torch.tensor(self.split.held(offsets, parallel_state.get_context_parallel_rank()))
        shape = (len(indices), -1) if bshd else (1, -1)

        def here(parts: Sequence[Tensor], fill: int) -> Tensor:
            whole = [
                torch.nn.functional.pad(part, (0, goal - len(part)), value=fill)
                for part, goal in zip(parts, padded, strict=True)
            ]
            return torch.cat(whole)[held].view(shape)

        columns: dict[str, Any] = {}
        for name, first in sequences[indices[0]].items():
            parts = [sequences[i][name] for i in indices]
            columns[name] = here(parts, 0) if first.dim() else torch.stack(parts)
        del columns["output"]
        numbers = [torch.full((goal,), at) for at, goal in enumerate(padded)]
        columns["sequence"] = here(numbers, 0)
        columns["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
        places = [torch.arange(*self.starts[i : i + 2]) for i in indices]
        lengths = torch.bincount(columns["sequence"].flatten(), minlength=len(indices))
        return columns, here(places, self.starts[-1]), lengths.tolist()

    def run(self) -> dict[str, Weighed]:
        """Train the step; return the weights, as they are and relative to the reference's, which
        then count as those of a token mean and as those of a sample mean.
        """
        weighing = Weighing([self.chunk], num_microbatches=self.m)

        def forward_step(iterator: Any, model: Any) -> Any:
            columns, index, lengths = next(iterator)
            output = model(index)
            mask = self.trained_Y[index] if self.is_relative else None
            listen = partial(weighing.losses, mask=mask, lengths=lengths)

            def loss_func(output: Tensor) -> Any:
                if self.is_relative:  # from here on, in the backward pass's order from below
                    output = listen(output, term=_BY_SAMPLE)
                    output = _times(output, self.to_sample_Y[index])
                    output = listen(output, term=_BY_TOKEN)
                    output = _times(output, self.to_token_Y[index])
                return self.loss_func(_Columns(columns), listen(output, term=_AS_IT_IS))

            return output, loss_func

        with weighing:
            run_schedule(forward_step, [self.chunk], self.microbatches)  # type: ignore[arg-type]
        return weighing.terms()


def _times(output: Tensor, factor: Tensor) -> Tensor:
    """Change no value, and multiply a gradient that is not 0."""
    same = output.clone()
    listen: Any = same.register_hook
    listen(lambda gradient: torch.where(gradient == 0, 0.0, gradient * factor))
    return same


def _assigned(num_sequences: int, dp: int, m: int) -> list[tuple[int, int]]:
    """Assign sequences to ranks and microbatches: one to each, and of the others more to earlier
    ranks, so that no count of a rank is every rank's.
    """
    slots = [(rank, number) for number in range(m) for rank in range(dp)]
    ranks = [rank for rank in range(dp) for _ in range(dp - rank)]
    rest = range(num_sequences - len(slots))
    return slots + [(ranks[at % len(ranks)], at * at % m) for at in rest]


def _simplest(*relative: Weighed) -> list[str]:
    """Name the causes next to the mode by which a weight relative to the reference needs least."""
    costs = [min((one.cost for one in weighed.explained), default=math.inf) for weighed in relative]
    views = zip(relative, costs, strict=True)
    causes = [cause for weighed, cost in views if cost == min(costs) for cause in weighed.causes]
    return [*dict.fromkeys(causes)]


def _case(split: Parallelism, loss_scaling: LossScaling, terms: dict[str, Weighed]) -> LossCase:
    by_token, by_sample, as_it_is = (terms[name] for name in (_BY_TOKEN, _BY_SAMPLE, _AS_IT_IS))
    smallest, largest = by_token.modes.get(_BY_TOKEN, (0.0, 0.0))
    factor = by_token.factors.get(_BY_TOKEN)
    sizes = {name: by_token.sizes[name] for name in ("M", "DP", "CP")}
    equals = [] if factor is None else equal_to(factor, sizes, {}, tolerance=TOLERANCE)
    causes = _simplest(by_token, by_sample) if factor is None else []
    return LossCase(
        split=str(split),
        loss_scaling=loss_scaling,
        smallest=smallest,
        largest=largest,
        factor=factor,
        equals=equals,
        causes=causes,
        trains=_trains(as_it_is),
        passed=by_token.fits_mode(_BY_TOKEN),
    )


def _trains(step: Weighed) -> str:
    return "" if step.unknown else trained(step.factors)
