"""slime's own functions from conversion to train_one_step; :mod:`slime_miles_worker` runs them."""

import datetime
import sys
from argparse import Namespace

import framework_step
import pytest
import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state
from slime_miles_data import BELOW_ONE, GLOBAL_BATCH, ROLLOUTS, arguments, rollout_data

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.integrations import slime as slime_hooks
from megatron_lossagg.verify.drivers import slime, slime_and_miles
from megatron_lossagg.verify.drivers.driver import aggregations, draw

BY_MICROBATCH = Aggregation("microbatch_token_mean")


class Slime:
    """slime's functions; its weights are carried in the actor."""

    hooks = slime_hooks.HOOKS

    def __init__(self):
        self.aggregations = {**aggregations(), **BELOW_ONE, BY_MICROBATCH.mode: BY_MICROBATCH}
        slime.use_cpu()
        from slime.backends.megatron_utils import cp_utils
        from slime.utils.misc import load_function

        self.cp_utils, self.load_function = cp_utils, load_function
        self.parsed = slime_and_miles.parsed(self.hooks)

    def start(self, args):
        pass

    def converted(self, args):
        from slime.utils.types import Sample

        return slime.manager(args)._convert_samples_to_train_data(
            slime_and_miles.make_samples(draw(), Sample)
        )

    def split(self, args, data, parallelism):
        manager = slime.manager(args)
        manager.train_parallel_config = {**parallelism, "microbatch_group_size_per_vp_stage": 1}
        return manager._split_train_data_by_dp(data)

    def received(self, args, refs):
        return slime.received(args, refs)

    def carry(self, args, data):
        if args.rollout_data_postprocess_path:
            self.load_function(args.rollout_data_postprocess_path)(args, 0, data)

    def iterator(self, args, chunk, data):
        from slime.backends.megatron_utils.data import get_data_iterator

        return get_data_iterator(data), data["num_microbatches"], data["global_batch_sizes"]

    def train_one_step(self, *given):
        from slime.backends.megatron_utils.model import train_one_step

        return train_one_step(*given)[0]

    def wiring(self):
        """Groups that slime destroys and rebuilds; flags that it does not know; a refusal."""
        from slime.utils import reloadable_process_group as reloadable
        from slime.utils.distributed_utils import init_gloo_group

        # slime's actor: patch, WORLD, register, Megatron's groups.
        reloadable.monkey_patch_torch_dist()
        dist.init_process_group("gloo")
        init_gloo_group()
        reloadable.register_default_process_group(datetime.timedelta(minutes=1))
        parallel_state.initialize_model_parallel()
        group = mpu.get_data_parallel_group(with_context_parallel=False)
        assert isinstance(group, reloadable.ReloadableProcessGroup)
        args = arguments(
            self, **slime_and_miles.args_with_weights(self.hooks, Aggregation("token_mean"))
        )
        active = sum(sum(one.mask) for one in draw() if one.sample < GLOBAL_BATCH)
        for _ in range(2):
            data, _ = rollout_data(self, args, self.converted(args))
            self.carry(args, data)
            first = data["micro_batch_indices"][0][0]
            assert data["loss_masks"][first].any()
            assert data["rollout_mask_sums"][first] == active / GLOBAL_BATCH
            reloadable.destroy_process_groups()
            reloadable.reload_process_groups()
        # slime swallows what it does not know: our flags, and a misspelled hook.
        from megatron.training.arguments import parse_args
        from slime.utils.arguments import get_slime_extra_args_provider

        sys.argv = ["train.py", "--rollout-batch-size", "4", "--loss-aggregation", "constant"]
        parsed = parse_args(get_slime_extra_args_provider(None), ignore_unknown_args=True)
        assert not hasattr(parsed, "loss_aggregation")
        with pytest.raises(LossAggregationError, match="got loss_agregation"):
            slime_hooks.check(Namespace(**{**vars(parsed), "loss_agregation": "constant"}))
        misspelled = slime_and_miles.args_with_weights(self.hooks, Aggregation("token_mean"))
        misspelled["rollout_data_postproces_path"] = misspelled.pop(self.hooks.carry_argument)
        args = arguments(self, **misspelled)
        assert args.rollout_data_postprocess_path is None  # slime's default
        slime_hooks.check(args)
        with pytest.raises(LossAggregationError, match="None did not call carry_weights"):
            self.carry(args, rollout_data(self, args, self.converted(args))[0])

    def check_logged_rollouts(self):
        """What slime logs of a rollout batch is weighted too: sum of w m x, averaged over steps."""
        from slime.observability import train_metric_utils

        logged, gather = [], train_metric_utils.gather_log_data
        train_metric_utils.logging_utils.log = lambda *_, **__: None
        train_metric_utils.gather_log_data = lambda *given: logged.append(gather(*given))
        for aggregation in ("sample_mean", "constant"):  # the first one is slime's own
            chosen = self.aggregations[aggregation]
            args = arguments(self, **slime_and_miles.args_with_weights(self.hooks, chosen))
            data, _ = rollout_data(self, args, self.converted(args))
            if aggregation == "constant":
                self.carry(args, data)
            train_metric_utils.log_rollout_data(0, args, data)
        if dist.get_rank():
            return
        sums, counts = [0.0] * ROLLOUTS, [0] * ROLLOUTS
        for one in draw():
            sums[one.sample] += float(one.old_log_probs @ torch.tensor(one.mask).double())
            counts[one.sample] += sum(one.mask)
        mean = sum(total / max(n, 1) for total, n in zip(sums, counts, strict=True)) / ROLLOUTS
        wanted = [mean, sum(sums) / framework_step.L / ROLLOUTS]
        assert [one["rollout/log_probs"] for one in logged] == pytest.approx(wanted, rel=1e-5)
