"""Batches of verl's, planned as its engine plans them."""

import torch

from megatron_lossagg.integrations import verl

MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
UIDS = ["a", "b", "a", f"pad{'0' * 32}"]


def planned(name, mask=MASK, uids=UIDS, sessions=None, **more):
    columns = {"loss_mask": mask, "uid": uids, "session_id": sessions, **more}
    data = {column: values for column, values in columns.items() if values is not None}
    read = verl.LossMode.named(name)
    return verl.plan_batch(read.aggregation(4), data, None, counts_zero=read.count_zero)
