"""A verification as a value, and what each rank of it does.

The command line pickles a :class:`Job`; every rank runs it; rank 0 reports events, one
JSON-ready dict each.
"""

from __future__ import annotations

import gc
import math
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lossagg.errors import ProofError
from megatron_lossagg.scaling import LOSS_SCALINGS, LossScaling
from megatron_lossagg.text import number_of
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.parallelism import ModelShape, Parallelism

__all__ = ["Event", "Job", "references_of", "run_job"]

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The layouts, cases and loss scalings to verify; all layouts have one number of ranks."""

    layouts: Sequence[Parallelism]
    cases: Sequence[Case]
    loss_scalings: Sequence[LossScaling] = LOSS_SCALINGS
    references: str | None = None
    """Folder that keeps the references for later jobs; None: computed anew."""

    def __post_init__(self) -> None:
        for name in ("layouts", "cases", "loss_scalings"):  # a list and a tuple are equal jobs
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = {layout.world_size for layout in self.layouts}
        if len(sizes) != 1:
            raise ProofError(f"got layouts for {sorted(sizes)} ranks, expected one number of ranks")
        hooked = any(layout.hooked for layout in self.layouts)
        sums = [str(case) for case in self.cases if case.second is not None]
        if hooked and sums:
            raise ProofError(
                f"got the case {sums[0]}, expected one aggregation with a hooked schedule: the "
                "hook replaces one loss"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world_size

    @property
    def num_verdicts(self) -> int:
        """Number of verdicts: one per layout, case and loss scaling."""
        return len(self.layouts) * len(self.cases) * len(self.loss_scalings)

    def write(self, file: Path) -> None:
        """Write it for the ranks."""
        file.write_bytes(pickle.dumps(self))

    @staticmethod
    def read(file: Path) -> Job:
        """Read what :meth:`write` wrote; run no file of anybody else."""
        job: Job = pickle.loads(file.read_bytes())
        return job


def run_job(job: Job, report: Callable[[Event], None]) -> bool:
    """Run a job on this rank; ``report`` is called on rank 0 only. Return whether all passed.

    Installs the CPU stand-ins where there is no CUDA, so call it before Megatron-Core is
    imported. Initializes torch.distributed (NCCL with CUDA, gloo without) from the
    launcher's environment, and destroys it after rank 0 has reported the ``end``. Events:
    ``start`` with Megatron-Core's version, device, backend and hosts, ``case`` after each case,
    ``layout`` with the layout's verdicts and groups, ``end``.
    """
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        import megatron_lossagg.cpu as cpu

        cpu.install()
    from megatron_lossagg.verify import model
    from megatron_lossagg.verify.verdict import prove

    world = model.join_world()
    if dist.get_world_size() != job.world_size:
        raise ProofError(
            f"{job.layouts[0]}: got {number_of(dist.get_world_size(), 'rank')} from the launcher, "
            f"expected {job.world_size}. Change --dp, or the number of processes"
        )
    first = dist.get_rank() == 0
    if first:
        report({"event": "start", "megatron": model.megatron_version(), **asdict(world)})
    references = _references(job.layouts, job.references) if first else {}
    box = [references]
    dist.broadcast_object_list(box, src=0, device=model.device())
    references = box[0]
    passed = True
    for layout in job.layouts:
        verdicts = list(
            prove(
                layout,
                job.cases,
                references[_key(layout)],
                loss_scalings=job.loss_scalings,
                progress=lambda verdict: report({"event": "case"}) if first else None,
            )
        )
        gc.collect()  # of the models, which hold the layout's groups
        passed = passed and all(verdict.passed for verdict in verdicts)
        with model.split_world(layout):
            groups = model.groups_over_hosts(world.hosts)
        if first:
            written = [{**asdict(v), "passed": v.passed} for v in verdicts]
            name = str(layout)
            report({"event": "layout", "layout": name, "verdicts": written, "groups": groups})
    if first:
        report({"event": "end"})
    dist.barrier()  # a launcher ends the others as soon as one rank has failed
    gc.collect()  # a group that is still held aborts the process at its end
    dist.destroy_process_group()
    return passed


def _copies(layout: Parallelism) -> int:
    """Return how often the 14 sequences are drawn: most microbatches get one, at most
    four times.
    """
    return min(4, math.ceil(sum(layout.m_of_ranks) / 14))


def _key(layout: Parallelism) -> tuple[ModelShape, int]:
    return layout.shape, _copies(layout)


def references_of(layouts: Sequence[Parallelism]) -> dict[tuple[ModelShape, int], int]:
    """Return the references that layouts need: (shape, copies), and what sequences are
    padded to.
    """
    multiples: dict[tuple[ModelShape, int], int] = {}
    for layout in layouts:
        key = _key(layout)
        multiples[key] = math.lcm(multiples.get(key, 1), layout.padded(1))
    return multiples


def _references(
    layouts: Sequence[Parallelism], kept: str | None = None
) -> Mapping[tuple[ModelShape, int], Any]:
    from megatron_lossagg.verify.reference_gradient import reference

    with tempfile.TemporaryDirectory() as folder:
        return {
            (shape, copies): reference(
                shape, copies=copies, padded=padded, folder=Path(kept or folder)
            )
            for (shape, copies), padded in references_of(layouts).items()
        }
