"""slime: its rollout manager, its actor's data, and ``train_one_step``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_lossagg.integrations.slime import HOOKS
from megatron_lossagg.verify.drivers.driver import Drawn
from megatron_lossagg.verify.drivers.slime_and_miles import RolloutDriver, make_samples
from megatron_lossagg.verify.parallelism import Parallelism


class FrameworkDriver(RolloutDriver):
    """slime's step; its weights are carried in the actor."""

    hooks = HOOKS
    function = "slime.backends.megatron_utils.model.train_one_step"
    cp_utils = "slime.backends.megatron_utils.cp_utils"

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        use_cpu()
        import slime.backends.megatron_utils.actor
        import slime.backends.megatron_utils.model
        import slime.ray.rollout  # noqa: F401

    def converted(self, args: Namespace) -> Any:
        """Go through the manager."""
        from slime.utils.types import Sample

        return manager(args)._convert_samples_to_train_data(make_samples(self.drawn, Sample))

    def split(self, args: Namespace, converted: Any, sizes: dict[str, int]) -> Any:
        """Go through the manager."""
        made = manager(args)
        made.train_parallel_config = {**sizes, "microbatch_group_size_per_vp_stage": 1}
        return made._split_train_data_by_dp(converted)

    def received(self, args: Namespace, refs: Any) -> dict[str, Any]:
        """Go through the actor, and what carries weights."""
        from slime.utils.misc import load_function

        data = received(args, refs)
        if args.rollout_data_postprocess_path:
            load_function(args.rollout_data_postprocess_path)(args, 0, data)
        return data

    def iterator(self, args: Namespace, chunk: Any, data: Any) -> tuple[Any, Any, Any]:
        """Return slime's iterator, and counts that travelled with the data."""
        from slime.backends.megatron_utils.data import get_data_iterator

        return get_data_iterator(data), data["num_microbatches"], data["global_batch_sizes"]

    def train_one_step(self, *given: Any) -> Mapping[str, Any]:
        """Run slime's."""
        from slime.backends.megatron_utils.model import train_one_step

        losses: Mapping[str, Any] = train_one_step(*given)[0]
        return losses


def manager(args: Namespace) -> Any:
    """Return a rollout manager without Ray."""
    from slime.ray.rollout import RolloutManager

    made = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    made.args = args
    made.custom_convert_samples_to_train_data_func = None
    made.custom_reward_post_process_func = None
    return made


def received(args: Namespace, refs: Any) -> dict[str, Any]:
    """Return this rank's data as slime's actor receives it."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    actor = object.__new__(MegatronTrainRayActor)
    actor.args = args
    data: dict[str, Any] = actor._get_rollout_data(refs)
    return data


def use_cpu() -> None:
    """Tell slime that its accelerator is this CPU."""
    from slime.utils import accelerator
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    class CPUAccelerator(TorchAccelerator):  # type: ignore[misc]
        """A CPU with gloo."""

        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def _module(self) -> Any:
            return torch.cpu

        def is_available(self) -> bool:
            """Return that it is here."""
            return True

        def device(self, index: int | None = None) -> torch.device:
            """Return the CPU."""
            return torch.device("cpu")

        def current_device(self) -> str:
            """Return the CPU's name."""
            return "cpu"

        def mem_get_info(self, device: Any = None) -> tuple[int, int]:
            """Say that there is memory."""
            return (1 << 40, 1 << 40)

        def memory_allocated(self, device: Any = None) -> int:
            """Return nothing used."""
            return 0

        memory_reserved = memory_allocated

    accelerator.set_accelerator(CPUAccelerator())
