"""What a run reads of its live model, once, and on all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

from megatron_lossagg.contract.finalize import own_finalize
from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.contract.live import checked_loss_scaling
from megatron_lossagg.contract.release import megatron_version
from megatron_lossagg.contract.scaling import K_FORMULA
from megatron_lossagg.contract.side_loss_scale import check_follow
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.agreement import agreed
from megatron_lossagg.guards.before import RunFacts
from megatron_lossagg.guards.frozen import Frozen
from megatron_lossagg.guards.refilled import begin_run
from megatron_lossagg.guards.split import check_parts
from megatron_lossagg.record.writer import RecordFile, opened_record
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.options import Options


def read_run(
    chunks: Sequence[Any], aggregation: Aggregation, options: Options, *, counts_parts: bool
) -> tuple[RunFacts, ProcessGroup | None, RecordFile | None]:
    """Read what the live model is, and open the record; a refusal on one rank reaches all.

    Returns the run, and what :func:`opened_record` returns. ``counts_parts``: as in
    :func:`check_options`. Raises :class:`ContractError`, also if ranks run different settings. One
    all-gather over the world.
    """
    with agreed() as ranks:
        loss_scaling = checked_loss_scaling(chunks, counts_parts=counts_parts)
        if options.side_losses == "follow":
            check_follow(chunks[0].config, aggregation)
        frozen = Frozen.of(chunks, loss_scaling)
        groups = LiveGroups.of(chunks)
        for one in (aggregation, *options.shadows.values()):
            check_parts(groups, one)
        record_group, record_file = opened_record(options.record, groups)
        ranks.own = (
            f"megatron-core {megatron_version()}, loss scaling {loss_scaling}, {options}, "
            f"{_settings_of(aggregation)}"
        )
    begin_run()
    run = RunFacts(
        chunks=chunks,
        groups=groups,
        loss_scaling=loss_scaling,
        frozen=frozen,
        agreed={aggregation},
        finalize=own_finalize(chunks[0].config),
    )
    return run, record_group, record_file


def agree_further(run: RunFacts, aggregation: Aggregation) -> None:
    """Check that a run can train a further aggregation, which is the same on every rank.

    Raises :class:`ContractError` on every rank. One all-gather over the world.
    """
    with agreed() as ranks:
        check_parts(run.groups, aggregation)
        ranks.own = _settings_of(aggregation)
    run.agreed.add(aggregation)


def _settings_of(aggregation: Aggregation) -> str:
    """Write what must be the same on all ranks of an aggregation."""
    return f"{aggregation} ({aggregation!r})"  # a formula may not show count_empty


def aggregation_of(aggregation: Aggregation | str, numbers: dict[str, Any]) -> Aggregation:
    """Return what is trained: an aggregation, or a mode's name with its numbers."""
    given = {name: value for name, value in numbers.items() if value is not None}
    if not isinstance(aggregation, Aggregation):
        return Aggregation(aggregation, **given)
    if given:
        raise ContractError(
            f"got an Aggregation and {', '.join(given)}: set them in the Aggregation"
        )
    return aggregation


def described(aggregation: Aggregation, run: RunFacts, probe: object, note: str) -> str:
    """Write a line for the start of a run: mode, formula, loss scaling, K; then the note."""
    cp = "dynamic" if run.groups.is_dynamic else run.groups.cp_size
    line = (
        f"loss aggregation {aggregation}; loss scaling {run.loss_scaling}, K = "
        f"{K_FORMULA[run.loss_scaling]} (DP {run.groups.dp_size}, CP {cp}); probe: {probe or 'off'}"
    )
    return f"{line}\n{note}" if note else line
