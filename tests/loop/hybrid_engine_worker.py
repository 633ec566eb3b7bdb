"""What Megatron-FSDP in two optimizer instances does to a loss, and what is refused; DP 4."""

import itertools

import tiny_gpt
import torch
from check_runner import run_checks
from engine_worker import BOTH, Live, by_hand, same
from live_steps import refused

from megatron_lossagg import LossAggregator
from megatron_lossagg.contract.megatron_options import megatron_release
from megatron_lossagg.reduction.aggregation import Options

HYBRID = {"num_distributed_optimizer_instances": 2}


def trained(live, *, per_token):
    """Whether stock trains what its loss scaling says, and an aggregation its own gradient."""
    is_right = same(live.stock(), by_hand(live, per_token=per_token))
    if is_right:
        live.ours(LossAggregator(live.chunk, "token_mean"))
        assert same(live.gradient(), live.sum() / live.all_tokens)
    return is_right


def check_instances_train_one_gradient_under_a_no_sync_of_theirs():
    since_17 = ["optim"] if megatron_release() >= (0, 17) else []
    names = ["no_shard", *since_17, "optim_grads", "optim_grads_params"]
    for name, per_token in itertools.product(names, BOTH):
        live = Live(name, per_token=per_token, overlap_grad_reduce=True, **HYBRID)
        assert trained(live, per_token=per_token), (name, per_token)
        live = Live(name, per_token=per_token, overlap_grad_reduce=True, no_sync=False, **HYBRID)
        assert not same(live.stock(), by_hand(live, per_token=per_token))
        aggregator = LossAggregator(live.chunk, "token_mean", options=Options(probe=False))
        with refused("no_sync_func is None"):
            aggregator.step(live.counts, num_microbatches=len(live.counts))


def check_instances_that_reduce_within_themselves_are_refused():
    for per_token in BOTH:
        live = Live("optim", per_token=per_token, **HYBRID)
        assert not same(live.stock(), by_hand(live, per_token=per_token))
        with refused("in several optimizer instances without overlap_grad_reduce"):
            LossAggregator(live.chunk, "token_mean", options=Options(probe=False))


def check_outer_sharding_that_does_not_average_is_refused():
    for per_token in BOTH:
        options = {"outer_dp_sharding_strategy": "optim", **HYBRID}
        live = Live("optim_grads_params", per_token=per_token, overlap_grad_reduce=True, **options)
        is_right = per_token or megatron_release() < (0, 17)
        assert trained(live, per_token=per_token) == is_right
        if not is_right:
            with refused("outer_dp_sharding_strategy in the average loss scaling"):
                LossAggregator(live.chunk, "token_mean", options=Options(probe=False))


def main():
    tiny_gpt.start(dtype=torch.float32, num_distributed_optimizer_instances=2)
    run_checks(globals())


if __name__ == "__main__":
    main()
