"""miles' own functions from conversion to train_one_step; :mod:`slime_miles_worker` runs them."""

import os
from pathlib import Path

import pytest
import torch
from megatron.core import mpu
from slime_miles_data import BELOW_ONE, arguments

from megatron_lossagg import Aggregation
from megatron_lossagg.integrations import miles as miles_hooks
from megatron_lossagg.verify.drivers import miles, slime_and_miles
from megatron_lossagg.verify.drivers.driver import aggregations, draw


class Miles:
    """miles' functions; its weights are carried in the rollout manager."""

    hooks, aggregations = miles_hooks.HOOKS, {**aggregations(), **BELOW_ONE}

    def __init__(self):
        from miles.backends.training_utils import cp_utils
        from miles.utils.misc import load_function

        self.cp_utils, self.load_function = cp_utils, load_function
        self.parsed = slime_and_miles.parsed(self.hooks)

    def start(self, args):
        from miles.utils import object_store

        object_store.init_instance(args)
        miles.take(args)
        if args.loss_type == "policy_loss" and mpu.get_context_parallel_world_size() == 1:
            self.parsed.true_on_policy_mode = True

    def converted(self, args):
        from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
        from miles.utils.types import Sample

        hook = self.load_function(args.custom_convert_samples_to_train_data_path)
        samples = slime_and_miles.make_samples(draw(), Sample)
        return convert_samples_to_train_data(args, samples, {}, hook, None)

    def split(self, args, data, parallelism):
        from miles.ray.rollout.train_data_conversion import split_train_data_by_dp

        parallelism = {**parallelism, "microbatch_group_size_per_vp_stage": None}
        return split_train_data_by_dp(args, dict(data), parallelism)

    def received(self, args, refs):
        from miles.backends.training_utils.data import get_rollout_data

        return get_rollout_data(args, refs)[0]

    def carry(self, args, data):
        pass

    def iterator(self, args, chunk, data):
        from miles.backends.training_utils.data import get_data_iterator, get_num_rollouts

        iterator, num_microbatches = get_data_iterator(args, [chunk], data)
        return iterator, num_microbatches, get_num_rollouts(args, data, len(num_microbatches))

    def train_one_step(self, *given):
        from miles.backends.megatron_utils.model import train_one_step

        return train_one_step(*given, witness_info=None, attempt=0)[0]

    def wiring(self):
        """Steps are those of build_dp_schedule, a smaller last one included; FSDP's actor."""
        from miles.utils.dp_schedule import build_dp_schedule

        for partial in (False, True):
            given = {"global_batch_size": 5, "allow_partial_train_step": partial}
            stock = self.converted(arguments(self, **given))
            given |= slime_and_miles.args_with_weights(self.hooks, Aggregation("token_mean"))
            data = self.converted(arguments(self, **given))
            config = {"dp_size": 1, "cp_size": 1, "vpp_size": 1}
            (sequences,), (microbatches,), num_microbatches, rollouts = build_dp_schedule(
                arguments(self, **given),
                {**config, "microbatch_group_size_per_vp_stage": None},
                [len(tokens) for tokens in data["tokens"]],
                global_batch_size=5,
                rollout_indices=data["rollout_ids"],
            )
            assert len(rollouts) == 1 + partial
            own, wanted = iter(microbatches), list(stock["rollout_mask_sums"])
            for m, g in zip(num_microbatches, rollouts, strict=True):
                members = [sequences[sequence] for _ in range(m) for sequence in next(own)]
                active = sum(sum(data["loss_masks"][sequence]) for sequence in members)
                for sequence in members:
                    wanted[sequence] = active / g if any(data["loss_masks"][sequence]) else 1
            assert data["rollout_mask_sums"] == pytest.approx(wanted, rel=1e-12)
        self.reduces_without_megatrons_arguments()
        # Why FSDP is refused: its actor asks get_batch for other fields.
        actor = Path(os.environ["FRAMEWORKS_DIR"], "miles/miles/backends/fsdp_utils/actor.py")
        assert "get_batch(" in actor.read_text()
        assert "rollout_mask_sums" not in actor.read_text()

    def reduces_without_megatrons_arguments(self):
        """The reducer at CP 2 where Megatron-LM is imported and its arguments are not set."""
        from megatron.training import global_vars
        from miles.backends.training_utils import parallel
        from miles.utils.ft_utils.process_group_utils import GroupInfo

        with pytest.raises(AssertionError, match="args is not initialized"):
            global_vars.get_args()
        one = GroupInfo(rank=0, size=1, group=None)
        groups = dict.fromkeys(
            ("intra_dp", "intra_dp_cp", "tp", "pp", "ep", "etp", "indep_dp"), one
        )
        masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
        lengths, total = ([5, 4], [3, 2]), 0.0
        for rank in range(2):
            cp = GroupInfo(rank=rank, size=2, group=None)
            parallel.set_parallel_state(parallel.ParallelState(cp=cp, **groups))
            whole = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])]
            held = [
                self.cp_utils.slice_log_prob_with_cp(*one)
                for one in zip(whole, *lengths, strict=True)
            ]
            total += miles_hooks.constant_10(*lengths, masks, False)(torch.cat(held)).item()
        assert total == pytest.approx((1 + 3 + 4 + 5) / 10)
        parallel.set_parallel_state(None)
