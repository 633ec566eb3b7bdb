"""Weigh SkyRL's policy loss, whose weights its trainer multiplies into advantages.

The worker's loss is a sum, so that a token weighs what its advantage was multiplied by. The trainer
leaves that in the batch, column ``SCALE``, with ids of its sequences, ``IDS``; the worker copies no
column that it does not know into its microbatches, and is made to here. Sources: SkyRL a9564572
``RayPPOTrainer.build_models``, ``BaseBatchIterator.batch_to_experience``,
``MegatronPolicyWorkerBase.forward_backward``.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import imported
from megatron_lossagg.weigh.listen import own

SCALE = "loss_aggregation_scale"
"""Column of a batch, ``[sequences, 1 or s]``: what advantages were multiplied by."""
IDS = "loss_aggregation_ids"
"""Column of a batch, int64 ``[sequences, 3]``: sample, prompt and group, -1 if not known."""
_KINDS = ("sample", "prompt", "group")
_WORKERS = "skyrl.backends.skyrl_train.workers"
_EXPECTED = "SkyRL's Megatron workers: use skyrl 0.3.0, 0.4.0 or a9564572"


def column_of(num: int, **ids: Sequence[Hashable] | None) -> Tensor:
    """Return ``IDS`` of so many sequences, from ids that may be anything, by their kind."""
    made = torch.full((num, len(_KINDS)), -1)
    for number, kind in enumerate(_KINDS):
        of_kind = ids.get(kind)
        if of_kind is not None and len(of_kind) == num:
            first: dict[Hashable, int] = {}
            made[:, number] = torch.tensor([first.setdefault(one, len(first)) for one in of_kind])
    return made


def ids_of(batch: Any, first: Sequence[int]) -> dict[str, Any]:
    """Return the ids of a microbatch's sequences, for weighing."""
    columns = batch[IDS].T.tolist() if IDS in batch else []
    return {
        kind: [None if one < 0 else one for one in column]
        for kind, column in zip(_KINDS, columns, strict=False)
        if max(column) >= 0
    }


def weighing_actor(actor: Any, aggregation: Any = None) -> Any:
    """Return a Ray actor class of SkyRL's Megatron policy worker, whose process is weighed.

    ``aggregation``: the trainer's, None for SkyRL's own.
    """
    import ray

    return ray.remote(num_gpus=1)(weighed_worker(actor.__ray_actor_class__, aggregation))


def weighed_worker(worker: Any, aggregation: Any = None) -> Any:
    """Return a subclass of a policy worker that weighs the first step of its process."""

    class WeighedPolicyWorker(worker):  # type: ignore[misc]
        """SkyRL's policy worker; it listens before it builds a model."""

        def init_model(self, *args: Any, **kwargs: Any) -> Any:
            from megatron_lossagg.integrations import weigh_rl

            own[:] = [] if aggregation is None else [aggregation]
            weigh_rl.install("skyrl")
            return super().init_model(*args, **kwargs)

    return WeighedPolicyWorker


def carry() -> None:
    """Let this process's workers copy ``SCALE`` into the microbatches that they train.

    Where a policy batch lacks it, a worker then raises :class:`ContractError`.
    """
    iterator = imported(f"{_WORKERS}.worker_utils", expected=_EXPECTED).BaseBatchIterator
    wrapper = imported(
        f"{_WORKERS}.megatron.megatron_model_wrapper", expected=_EXPECTED
    ).MegatronModelWrapper
    convert, run = iterator.batch_to_experience, wrapper.forward_backward_mini_batch
    heard: list[tuple[Tensor | None, Tensor | None]] = []
    """Both columns of the microbatches that were made since the last step."""

    @functools.wraps(convert)
    def batch_to_experience(batch: Mapping[str, Any]) -> Any:
        heard.append((batch.get(SCALE), batch.get(IDS)))
        return convert(batch)

    @functools.wraps(run)
    def forward_backward_mini_batch(
        self: Any, micro_batches: Sequence[MutableMapping[str, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        columns = heard[-len(micro_batches) :]
        heard.clear()
        if not kwargs.get("forward_only", False):
            _put(micro_batches, columns)
        return run(self, micro_batches, *args, **kwargs)

    iterator.batch_to_experience = staticmethod(batch_to_experience)
    wrapper.forward_backward_mini_batch = forward_backward_mini_batch


def _put(
    micro_batches: Sequence[MutableMapping[str, Any]],
    columns: Sequence[tuple[Tensor | None, Tensor | None]],
) -> None:
    """Put the columns into the microbatches of a policy; 0 and -1 for sequences that SkyRL has
    added.
    """
    for microbatch, (scale, ids) in zip(micro_batches, columns, strict=True):
        if microbatch.get("sub_seq_lengths") is not None:
            raise ContractError(
                "got rows of several sequences, expected one in a row, since rows are weighed: "
                "set use_sequence_packing=false"
            )
        advantages = microbatch["advantages"]
        if advantages is None:  # SFT, whose loss mask has the weights
            continue
        if scale is None and not microbatch.get("is_padding_batch", False):
            raise ContractError(
                "got a batch without what SkyRL's trainer multiplied advantages by, expected the "
                f"column {SCALE}: set LOSSAGG_WEIGH=1 for our entry point, or make the trainer "
                "with aggregated(RayPPOTrainer, None)"
            )
        if scale is None:
            scale = advantages.new_zeros(0, 1)
        added = len(advantages) - len(scale)
        microbatch[SCALE] = pad(scale, (0, 0, 0, added))
        if ids is None:
            ids = torch.full((len(scale), len(_KINDS)), -1)
        microbatch[IDS] = pad(ids, (0, 0, 0, added), value=-1)
