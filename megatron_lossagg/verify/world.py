"""The ranks of a verification: their device, how they meet, Megatron's groups of them.

On a CPU the stand-ins of ``megatron_lossagg.cpu`` must be installed before this is imported.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.parallelism import Parallelism

_SEED = 3
"""Of Megatron's random states."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What the ranks of a verification run on, the same on each of them."""

    device: str
    """``cuda`` or ``cpu``."""
    backend: str
    """``nccl`` with CUDA, else ``gloo``."""
    hosts: list[str]
    """Name of each rank's machine."""
    cards: list[str]
    """Name of each rank's GPU, the same for ranks that share one; empty on a CPU."""


def join_world() -> World:
    """Initialize torch.distributed from the launcher's environment: NCCL with CUDA, else gloo.

    All ranks raise the same :class:`ProofError` if one of them has no GPU of its own, a different
    device than the others, or a different one than ``LOSSAGG_DEVICE`` names, if it is set: each
    writes what it has to the launcher's store and reads all before any group is made.
    """
    store, rank, size = next(rendezvous("env://"))
    box = PrefixStore("lossagg", store)
    box.set(str(rank), json.dumps(_found_here(rank)))
    found = [json.loads(box.get(str(other))) for other in range(size)]
    devices, hosts, cards, faults = (list(column) for column in zip(*found, strict=True))
    faults = [fault for fault in faults if fault]
    if len(set(devices)) > 1:
        least, most = devices.index("cpu"), devices.index("cuda")
        faults.append(
            f"got CUDA on rank {most} ({hosts[most]}) and none on rank {least} ({hosts[least]}), "
            "expected it on all ranks or on none: repair the driver, or hide the GPUs of all"
        )
    if faults:
        if box.add("read", 1) == size:  # rank 0 may keep the store, and ends last
            box.set("all read", "")
        box.wait(["all read"], timedelta(seconds=60))
        raise ProofError(faults[0])
    backend = "nccl" if devices[0] == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(_local_rank())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return World(device=devices[0], backend=backend, hosts=hosts, cards=cards)


def _found_here(rank: int) -> tuple[str, str, str, str]:
    """Return this rank's device, its host, its GPU, and what is wrong with them."""
    host, wanted = socket.gethostname(), os.environ.get("LOSSAGG_DEVICE", "")
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = "cuda" if number else "cpu"
    fault = ""
    if wanted not in ("", device):
        fault = (
            f"DEVICE: got {wanted}, and rank {rank} on {host} sees {number} CUDA devices: repair "
            "the driver or torch's build, or set DEVICE to what the ranks have"
        )
    elif number and _local_rank() >= number:
        fault = (
            f"got local rank {_local_rank()}, expected one rank per GPU, {host} has {number}: "
            "start as many processes as GPUs, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    card = ""
    if number and not fault:  # indices differ where a rank sees only its own GPU
        properties = torch.cuda.get_device_properties(_local_rank())
        card = str(getattr(properties, "uuid", f"{host} {_local_rank()}"))
    return device, host, card, fault


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def split_world(parallelism: Parallelism) -> Iterator[None]:
    """Initialize Megatron's groups and random states; destroy the groups at the end."""
    more = {}
    if parallelism.optimizer_instances > 1:
        more["num_distributed_optimizer_instances"] = parallelism.optimizer_instances
    if parallelism.moe:  # gloo cannot gather uneven splits of an expert over TP
        more["expert_tensor_parallel_size"] = 1
    parallel_state.initialize_model_parallel(
        parallelism.tp,
        parallelism.pp,
        virtual_pipeline_model_parallel_size=parallelism.vpp if parallelism.vpp > 1 else None,
        context_parallel_size=parallelism.cp,
        expert_model_parallel_size=parallelism.ep,
        **more,
    )
    default = torch.get_default_dtype()
    try:
        # finalize_model_grads computes 1 / num_tokens in the default dtype.
        torch.set_default_dtype(dtype_of(parallelism))
        model_parallel_cuda_manual_seed(_SEED)
        yield
        dist.barrier()  # no rank still uses a group
        destroy_groups()
    finally:
        torch.set_default_dtype(default)
        parallel_state.destroy_model_parallel()


def destroy_groups() -> None:
    """Destroy this rank's groups, most of which ``destroy_model_parallel`` only forgets.

    A gloo group has a thread that wakes 100 times per second until the group is garbage.
    """
    known = vars(parallel_state).values()
    groups = {group for group in known if isinstance(group, dist.ProcessGroup)}
    for group in groups - {dist.group.WORLD}:
        dist.destroy_process_group(group)


def groups_over_hosts(hosts: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count the groups of more than one rank by kind, and those that span several hosts.

    ``hosts``: of each rank. Inside :func:`split_world`; gathers the members of each rank's groups.
    """
    of = parallel_state
    kinds = {
        "DP x CP": of.get_data_parallel_group(with_context_parallel=True),
        "DP": of.get_data_parallel_group(),
        "CP": of.get_context_parallel_group(),
        "TP": of.get_tensor_model_parallel_group(),
        "PP": of.get_pipeline_model_parallel_group(),
        "EP": of.get_expert_model_parallel_group(),
    }
    mine = {kind: dist.get_process_group_ranks(group) for kind, group in kinds.items()}
    all_ranks: list[dict[str, list[int]]] = [{} for _ in hosts]
    dist.all_gather_object(all_ranks, mine)
    counted = {}
    for kind in kinds:
        groups = {tuple(groups[kind]) for groups in all_ranks}
        size = len(mine[kind])
        if size > 1:
            over = sum(len({hosts[rank] for rank in group}) > 1 for group in groups)
            counted[kind] = {"groups": len(groups), "ranks": size, "over_hosts": over}
    return counted


def device() -> torch.device:
    """Return this rank's device: its GPU if it has one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def dtype_of(parallelism: Parallelism) -> torch.dtype:
    """Return the dtype of losses and gradients, and of weights but for bfloat16's."""
    return torch.float32 if parallelism.megatrons_losses else torch.float64
