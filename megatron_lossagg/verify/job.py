"""A verification as a value, and what each rank of it does.

The command line writes a :class:`Job`; every rank runs it; rank 0 tells what happens as
events, one JSON-ready dict each.
"""

from __future__ import annotations

import gc
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.parallelism import ModelShape, Parallelism

REGIMES = ("average", "per-token")
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Which splits, cases and regimes are proven; all splits on one number of ranks."""

    layouts: Sequence[Parallelism]
    cases: Sequence[Case]
    regimes: Sequence[str] = REGIMES
    references: str | None = None
    """Folder that keeps the oracle's references for later jobs; None: computed anew."""

    def __post_init__(self) -> None:
        for name in ("layouts", "cases", "regimes"):  # equal whatever sequence they came in
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = {layout.world_size for layout in self.layouts}
        if len(sizes) != 1:
            raise ProofError(f"a job runs on one number of ranks, got layouts for {sorted(sizes)}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world_size

    @property
    def num_rows(self) -> int:
        """Number of verdicts it will give."""
        return len(self.layouts) * len(self.cases) * len(self.regimes)

    def to_json(self) -> str:
        """Write it for another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """Read what :meth:`to_json` wrote."""
        data = json.loads(text)
        return Job(
            layouts=[_parallelism(layout) for layout in data["layouts"]],
            cases=[
                Case(**{k: a and Aggregation(**a) for k, a in case.items()})
                for case in data["cases"]
            ],
            regimes=data["regimes"],
            references=data["references"],
        )


def _parallelism(data: dict[str, Any]) -> Parallelism:
    m = data["microbatches"]
    return Parallelism(**{**data, "microbatches": m if isinstance(m, int) else tuple(m)})


def run_job(job: Job, tell: Callable[[Event], None]) -> bool:
    """Run a job on this rank; ``tell`` is called on rank 0 alone. Returns whether all passed.

    Installs the CPU stand-ins where there is no CUDA, so call it before Megatron-Core is
    imported. Initializes torch.distributed (NCCL with CUDA, gloo without) from the
    launcher's environment, and destroys it when rank 0 has told the ``end``. Events:
    ``start`` with Megatron-Core's version, ``row`` for each case as it is done, ``layout``
    with the layout's verdicts, ``end``.
    """
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        import megatron_lossagg.cpu as cpu

        cpu.install()
    from megatron_lossagg.verify import model
    from megatron_lossagg.verify.prove import prove

    model.join_world()
    if dist.get_world_size() != job.world_size:
        raise ProofError(
            f"{job.layouts[0]} is for {job.world_size} ranks, the launcher started "
            f"{dist.get_world_size()}: change --dp, or the number of processes"
        )
    first = dist.get_rank() == 0
    if first:
        tell({"event": "start", "megatron": model.megatron_version()})
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
                regimes=job.regimes,
                progress=lambda verdict: tell({"event": "row"}) if first else None,
            )
        )
        passed = passed and all(verdict.passed for verdict in verdicts)
        if first:
            told = [{**asdict(v), "passed": v.passed} for v in verdicts]
            tell({"event": "layout", "layout": str(layout), "verdicts": told})
    if first:
        tell({"event": "end"})
    dist.barrier()  # a launcher ends the others as soon as one rank has failed
    gc.collect()  # a group that is still held aborts the process at its end
    dist.destroy_process_group()
    return passed


def _copies(layout: Parallelism) -> int:
    """How often the 14 rows are drawn: so that most microbatches have one, four times at most."""
    return min(4, math.ceil(sum(layout.m_of_ranks) / 14))


def _key(layout: Parallelism) -> tuple[ModelShape, int]:
    return layout.shape, _copies(layout)


def references_of(layouts: Sequence[Parallelism]) -> dict[tuple[ModelShape, int], int]:
    """Return the references that layouts need: (shape, copies), and what rows are padded to."""
    multiples: dict[tuple[ModelShape, int], int] = {}
    for layout in layouts:
        key = _key(layout)
        multiples[key] = math.lcm(multiples.get(key, 1), layout.padded(1))
    return multiples


def _references(
    layouts: Sequence[Parallelism], kept: str | None = None
) -> Mapping[tuple[ModelShape, int], Any]:
    from megatron_lossagg.verify.reference import reference

    with tempfile.TemporaryDirectory() as folder:
        return {
            (shape, copies): reference(
                shape, copies=copies, padded=padded, folder=Path(kept or folder)
            )
            for (shape, copies), padded in references_of(layouts).items()
        }
