"""miles: its conversion of rollouts, its split over ranks, and ``train_one_step``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lossagg.integrations.miles import HOOKS
from megatron_lossagg.verify.drivers.driver import Drawn
from megatron_lossagg.verify.drivers.slime_and_miles import RolloutDriver, make_samples
from megatron_lossagg.verify.parallelism import Parallelism


class FrameworkDriver(RolloutDriver):
    """miles' step; its weights are carried in the rollout manager."""

    hooks = HOOKS
    function = "miles.backends.megatron_utils.model.train_one_step"
    cp_utils = "miles.backends.training_utils.cp_utils"

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        import miles.backends.megatron_utils.model
        import miles.ray.rollout.train_data_conversion  # noqa: F401

        # Else Megatron-Core's cross entropy rounds to bfloat16. With context parallelism miles
        # fails in this mode where a rank holds one token of a response.
        if self.parallelism.cp == 1:
            self.parsed.true_on_policy_mode = True

    def begin(self, args: Namespace) -> None:
        """Make miles' object store, and its parallel state from Megatron's groups."""
        from miles.utils import object_store

        object_store.init_instance(args)
        take(args)

    def converted(self, args: Namespace) -> Any:
        """Go through the conversion, which carries weights."""
        from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
        from miles.utils.misc import load_function
        from miles.utils.types import Sample

        hook = load_function(args.custom_convert_samples_to_train_data_path)
        samples = make_samples(self.drawn, Sample)
        return convert_samples_to_train_data(args, samples, {}, hook, None)

    def split(self, args: Namespace, converted: Any, sizes: dict[str, int]) -> Any:
        """Go through miles' split."""
        from miles.ray.rollout.train_data_conversion import split_train_data_by_dp

        given = {**sizes, "microbatch_group_size_per_vp_stage": None}
        return split_train_data_by_dp(args, dict(converted), given)

    def received(self, args: Namespace, refs: Any) -> dict[str, Any]:
        """Receive them as miles' actor does."""
        from miles.backends.training_utils.data import get_rollout_data

        data: dict[str, Any] = get_rollout_data(args, refs)[0]
        return data

    def iterator(self, args: Namespace, chunk: Any, data: Any) -> tuple[Any, Any, Any]:
        """Return miles' iterator, and its counts."""
        from miles.backends.training_utils.data import get_data_iterator, get_num_rollouts

        iterator, num_microbatches = get_data_iterator(args, [chunk], data)
        return iterator, num_microbatches, get_num_rollouts(args, data, len(num_microbatches))

    def train_one_step(self, *given: Any) -> Mapping[str, Any]:
        """Run miles'."""
        from miles.backends.megatron_utils.model import train_one_step

        losses: Mapping[str, Any] = train_one_step(*given, witness_info=None, attempt=0)[0]
        return losses


def take(args: Namespace) -> None:
    """Make ``args`` the process's, and miles' parallel state from Megatron's groups."""
    from megatron.training import global_vars
    from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    global_vars.set_args(args)
    set_parallel_state(create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
