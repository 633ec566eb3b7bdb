"""What a checkout's own Megatron-Core has of the options, and what is refused of it; a row.

The checkout comes first on the path. Its development branches import triton, which nothing here
calls: a stand-in takes its place.
"""

import dataclasses
import importlib
import itertools
import typing

import stand_ins
import typing_extensions

from megatron_lossagg.cpu import install

typing.override = typing_extensions.override  # Megatron-Core's, before Python 3.12
for name in ("torch._inductor.runtime.triton_compat", "torch.utils.flop_counter"):
    importlib.import_module(name)  # they look for triton, and must see that there is none
stand_ins.install(("triton",))
install()

import megatron.core  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402
from ranks import print_row  # noqa: E402

from megatron_lossagg import Layout  # noqa: E402
from megatron_lossagg.contract.megatron_options import check_options  # noqa: E402
from megatron_lossagg.errors import ContractError  # noqa: E402

VALUES = {
    "cp_partition_mode": "striped",
    "hybrid_context_parallel": True,
    "dynamic_context_parallel": True,
    "sequence_packing_scheduler": "default_dynamic_cp",
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
}
LENGTHS, CP_SIZE = (4, 8, 3, 0, 5), 2


def refusal(config):
    """Return the message, None where nothing is refused."""
    try:
        check_options("model config", config, cp_size=CP_SIZE)
    except ContractError as error:
        return str(error)
    return None


class Rank:
    """As much of a group as the split asks."""

    def __init__(self, rank):
        self.rank = lambda: rank
        self.size = lambda: CP_SIZE


def sequence_of_each_token(rank):
    """Split by the checkout's own function; return the sequence that each held token is of."""
    from megatron.core.datasets.data_schedule_utils import get_cp_slice_for_thd

    lengths = torch.tensor(LENGTHS)
    sequence_of = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    batch = {"loss_mask": sequence_of, "cu_seqlens_padded": offsets}
    get_cp_slice_for_thd(batch, Rank(rank), ["loss_mask"], cp_partition_mode="contiguous")
    return batch["loss_mask"].tolist()


def sequence_by_layout(rank):
    """Return the same by ``Layout.thd_contiguous``, of a whole mask and of a split one."""
    offsets = [0, *itertools.accumulate(LENGTHS)]
    layout = Layout.thd_contiguous(offsets, cp_size=CP_SIZE, cp_rank=rank)
    local = Layout.local(layout.local_lengths, cp_size=CP_SIZE, cp_rank=rank)
    return [np.repeat(one.segment_R, one.length_R).tolist() for one in (layout, local)]


def main():
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    config.context_parallel_size = CP_SIZE
    classes = (TransformerConfig, MLATransformerConfig)
    fields = {field.name for kind in classes for field in dataclasses.fields(kind)}
    found = {
        "file": megatron.core.__file__,
        "fields": sorted(fields),
        "by default": refusal(config),
        "refused": {},
    }
    for name in sorted(VALUES.keys() & fields):
        default = getattr(config, name)
        setattr(config, name, VALUES[name])
        found["refused"][name] = refusal(config)
        setattr(config, name, default)
    if "cp_partition_mode" in fields:
        found["contiguous"] = {
            "own": [sequence_of_each_token(r) for r in range(CP_SIZE)],
            "layout": [sequence_by_layout(r) for r in range(CP_SIZE)],
        }
    print_row(found)


if __name__ == "__main__":
    main()
