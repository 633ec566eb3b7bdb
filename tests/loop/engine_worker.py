"""What Megatron-FSDP does to a loss, and what a LossAggregator trains on it; DP 2, two processes.

Its model has one weight per position, and a token's loss is ``w_t x_t``: gradients are computed by
hand, in float64.
"""

import functools
import itertools
import warnings
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from check_runner import run_checks
from einops import EinopsError
from engines import FSDP, fsdp, wrapped
from hooked_loop import OfDicts
from live_steps import refused
from megatron.core import parallel_state
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.contract.megatron_options import megatron_release
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.small_gpt import whole_gradient

T = 16
BOTH = (False, True)


class Unit(torch.nn.Module):
    def __init__(self, *, has_expert):
        super().__init__()
        self.dense = torch.nn.Parameter(torch.ones(T))
        if has_expert:
            self.experts = torch.nn.Module()
            self.experts.weight = torch.nn.Parameter(torch.ones(T))
            self.experts.weight.allreduce = False

    def forward(self, x):
        return sum(weight * x for weight in self.parameters())


class Model(MegatronModule):
    def __init__(self, config, unit):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.unit = unit

    def set_input_tensor(self, tensor):
        pass

    def forward(self, x):
        return self.unit(x)


class Live:
    """A chunk in Megatron-FSDP, and its data: per microbatch x and mask."""

    def __init__(self, name, *, per_token=False, m=3, has_expert=False, no_sync=True, **ddp):
        moe = {"num_moe_experts": 2, "add_bias_linear": False} if has_expert else {}
        config = tiny_gpt.config_of(per_token=per_token, **moe)
        unit = Unit(has_expert=has_expert)
        self.weight = unit.dense
        self.expert = unit.experts.weight if has_expert else None
        self.chunk = wrapped(config, Model(config, unit), unit=Unit, **fsdp(name, **ddp))
        if no_sync and self.chunk.ddp_config.overlap_grad_reduce:  # as megatron.training does
            config.no_sync_func = self.chunk.no_sync
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        self.xs = [torch.rand(T, generator=generator) for _ in range(m)]
        self.masks = [
            (torch.arange(T) < 1 + (5 * i + 3 * dist.get_rank()) % T).long() for i in range(m)
        ]

    @property
    def counts(self):
        return [int(mask.sum()) for mask in self.masks]

    def schedule(self, loss_func, *, zeroed=True, part=slice(None)):
        if zeroed:
            self.chunk.zero_grad_buffer()
        numbers = range(len(self.xs))[part]

        def forward_step(iterator, chunk):
            i = next(iterator)
            return chunk(self.xs[i]), lambda losses: loss_func(i, losses)

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(numbers),
            model=[self.chunk],
            num_microbatches=len(numbers),
            seq_length=T,
            micro_batch_size=1,
            forward_only=False,
        )

    def stock(self):
        """Train as Megatron-LM's own loss_func; return the dense weight's gradient."""

        def loss_func(i, losses):
            total, n = (losses * self.masks[i]).sum(), self.masks[i].sum().int()
            return total, n, {"loss": torch.stack([total.detach(), n])}

        self.schedule(loss_func)
        return self.gradient()

    def hooked(self, hook):
        """Train as a framework does whose schedule is hooked."""

        def loss_func(mask, losses):
            total, n = (losses * mask).sum(), mask.sum().int()
            return total, n, {"lm loss": torch.stack([total.detach(), n])}

        def forward_step(iterator, chunk):
            data = next(iterator)
            return chunk(data["x"]), functools.partial(loss_func, data["loss_mask"])

        pairs = zip(self.xs, self.masks, strict=True)
        self.chunk.zero_grad_buffer()
        hook.wrap(get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=iter([{"x": x[None], "loss_mask": mask[None]} for x, mask in pairs]),
            model=[self.chunk],
            num_microbatches=len(self.xs),
            seq_length=T,
            micro_batch_size=1,
            forward_only=False,
        )

    def ours(self, aggregator, *, zeroed=True, part=slice(None), change=lambda losses: losses):
        """Train a schedule call of an aggregation; ``change``: of what it reduces."""
        counts = self.counts[part]
        first = range(len(self.xs))[part].start
        with aggregator.step(counts, num_microbatches=len(counts)) as step:

            def loss_func(i, losses):
                mb = step.microbatch([i - first], self.masks[i], lengths=[T])
                return mb.outputs(mb.reduce(change(losses)))

            self.schedule(loss_func, zeroed=zeroed, part=part)

    def gradient(self, weight=None):
        return whole_gradient(self.chunk, self.weight if weight is None else weight).double()

    def over_ranks(self, gradient):
        dist.all_reduce(gradient)
        return gradient

    def sum(self, weights=None):
        """Sum mask * x, times a weight of the microbatch, over microbatches and ranks."""
        weights = [1.0] * len(self.xs) if weights is None else weights
        terms = [w * x.double() * m for w, x, m in zip(weights, self.xs, self.masks, strict=True)]
        return self.over_ranks(torch.stack(terms).sum(0))

    @property
    def all_tokens(self):
        return float(self.over_ranks(torch.tensor(float(sum(self.counts)))))


def same(found, wanted):
    return torch.allclose(found, wanted, rtol=2e-6, atol=1e-9)


def by_hand(live, *, per_token):
    """What Megatron's two loss scalings train: the sum over N, or the mean of means."""
    if per_token:
        return live.sum() / live.all_tokens
    m, size = len(live.xs), dist.get_world_size()
    return live.sum([1 / (n * m * size) for n in live.counts])


def check_stock_reduces_as_distributed_data_parallel_does():
    for name, per_token, m in itertools.product(FSDP, BOTH, (1, 3)):
        if not (per_token and "collective" in name):
            live = Live(name, per_token=per_token, m=m)
            for _ in range(2):
                assert same(live.stock(), by_hand(live, per_token=per_token)), (name, per_token, m)


def check_an_aggregation_is_trained_and_k_is_measured():
    for name, per_token in itertools.product(FSDP, BOTH):
        if per_token and "collective" in name:
            continue
        live = Live(name, per_token=per_token)
        before = [data.clone() for data in engine_of(live.chunk).gradients()]
        aggregator = LossAggregator(live.chunk, "token_mean")
        probe = aggregator.probe
        assert not probe.note, probe
        assert abs(probe.measured_k / probe.scaling.k - 1) < 1e-5, probe
        after = list(engine_of(live.chunk).gradients())
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        for _ in range(2):
            live.ours(aggregator)
            assert same(live.gradient(), live.sum() / live.all_tokens), (name, per_token)


def check_what_the_hook_asks_of_a_loss_reduces_no_gradient():
    for name, per_token in itertools.product(FSDP, BOTH):
        if per_token and "collective" in name:
            continue
        live = Live(name, per_token=per_token)
        hook = ScheduleHook("token_mean", OfDicts(), options=Options(probe=False))
        pipeline = param_and_grad_buffer.GradReducePipeline
        stock = pipeline.reduce_gradients
        with patch.object(pipeline, "reduce_gradients", autospec=True, side_effect=stock) as spy:
            live.stock()
            alone = spy.call_count
            live.hooked(hook)
        assert spy.call_count == 2 * alone, name
        assert same(live.gradient(), live.sum() / live.all_tokens), (name, per_token)


def check_a_wrong_factor_is_measured_by_the_probe():
    stock = param_and_grad_buffer.gradient_reduce_preprocessing

    def doubled(gradient, factor, ddp_config):
        return stock(gradient, 2 * (1.0 if factor is None else factor), ddp_config)

    for name, per_token in itertools.product(("optim", "optim_grads_params"), BOTH):
        live = Live(name, per_token=per_token)
        with (
            patch.object(param_and_grad_buffer, "gradient_reduce_preprocessing", doubled),
            refused("the startup probe measured K", "2 times that of its loss"),
        ):
            LossAggregator(live.chunk, "token_mean")


def check_a_no_sync_func_that_is_missing_or_reduces_twice_is_refused():
    for m in (1, 3):
        live = Live("no_shard", no_sync=False, m=m)
        assert not same(live.stock(), by_hand(live, per_token=False))
        aggregator = LossAggregator(live.chunk, "token_mean")
        with refused("no_sync_func is None", "by Megatron-FSDP never"):
            aggregator.step(live.counts, num_microbatches=m)
        live.chunk.config.no_sync_func = Live("no_shard").chunk.no_sync
        with refused("no_sync_func is not theirs"):
            aggregator.step(live.counts, num_microbatches=m)
        live.chunk.config.no_sync_func = live.chunk.module.no_sync
        live.ours(aggregator)
        assert same(live.gradient(), live.sum() / live.all_tokens)
    live = Live("optim", per_token=True)
    live.chunk.config.no_sync_func = live.chunk.no_sync
    is_right = same(live.stock(), by_hand(live, per_token=True))
    assert is_right == (megatron_release() >= (0, 20))
    aggregator = LossAggregator(live.chunk, "token_mean")
    if is_right:
        live.ours(aggregator)
        assert same(live.gradient(), live.sum() / live.all_tokens)
    else:
        with refused("config.no_sync_func without overlap_grad_reduce", "twice"):
            aggregator.step(live.counts, num_microbatches=3)
    live = Live("optim_grads", no_sync=False)  # reduces in each microbatch
    live.ours(LossAggregator(live.chunk, "token_mean"))
    assert same(live.gradient(), live.sum() / live.all_tokens)


def check_what_a_release_reduces_wrongly_is_refused_by_name():
    options = Options(probe=False)
    wrong = {
        ("no_shard", False): ((0, 18), "reduces no gradient: set it"),
        ("optim", True): ((0, 17), "adds a rank's own gradients"),
    }
    for (name, overlaps), (mended, words) in wrong.items():
        live = Live(name, overlap_grad_reduce=overlaps)
        is_right = same(live.stock(), by_hand(live, per_token=False))
        assert is_right == (megatron_release() >= mended)
        if not is_right:
            with refused(f"Megatron-FSDP of megatron-core .* with {name}", words):
                LossAggregator(live.chunk, "token_mean", options=options)
    live = Live("optim_grads")
    with patch("megatron.core.__version__", "0.15.3"), refused("0.15.3", "Megatron-LM#3023"):
        LossAggregator(live.chunk, "token_mean", options=options)


def check_experts_of_one_rank_each_are_refused_where_each_microbatch_changes_the_sum():
    since_17 = megatron_release() >= (0, 17)
    of_dtype = [{"megatron_fsdp_grad_comm_dtype": torch.bfloat16}] if since_17 else []
    for per_token, more in itertools.product(BOTH, ({}, *of_dtype)):
        live = Live("optim_grads", has_expert=True, per_token=per_token, **more)
        live.stock()
        terms = [x.double() * mask for x, mask in zip(live.xs, live.masks, strict=True)]
        m = len(terms) * dist.get_world_size()
        counts = [live.all_tokens if per_token else n * m for n in live.counts]
        wanted = sum(term / n for term, n in zip(terms, counts, strict=True))
        is_right = since_17 and per_token and not more
        assert same(live.gradient(live.expert), wanted) == is_right
        if is_right:
            live.ours(LossAggregator(live.chunk, "token_mean"))
            assert same(live.gradient(live.expert), wanted)
        else:
            with refused("optim_grads over one rank", "Megatron-LM#6660", "more ranks for each"):
                LossAggregator(live.chunk, "token_mean", options=Options(probe=False))
    live = Live("optim", has_expert=True)
    LossAggregator(live.chunk, "token_mean")
    live = Live("optim", has_expert=True, average_in_collective=True)
    with refused("average_in_collective with expert parallelism"):
        LossAggregator(live.chunk, "token_mean")


def check_stock_has_no_buffers_of_float64_and_no_mesh_of_pipeline_stages():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(KeyError, match=r"torch\.float64"):
            Live("optim")
    finally:
        torch.set_default_dtype(torch.float32)
    alone = parallel_state.get_tensor_model_parallel_group()
    with pytest.raises(EinopsError, match="Shape mismatch, 2 != 1"):
        mcore_fsdp_adapter._get_dp_tp_mesh(alone, alone)  # of two stages of one rank


def check_what_the_wheel_wraps_is_refused_by_name():
    live = Live("optim_grads")
    with refused("got a MegatronFSDP", "not the MegatronFSDP of the wheel megatron-fsdp"):
        LossAggregator(live.chunk.module, "token_mean")  # as the wheel makes it, without adapter


def check_gradients_of_an_earlier_call_and_a_flipped_loss_scaling_are_refused():
    live = Live("optim_grads_params")
    aggregator = LossAggregator(live.chunk, "token_mean")
    live.ours(aggregator)
    with refused("were not zero when the step's first loss"):
        live.ours(aggregator, zeroed=False)
    live.chunk.config.calculate_per_token_loss = True
    with refused("frozen when the model is built and wrapped"):
        aggregator.step(live.counts, num_microbatches=3)
    with refused("scales gradients by"):
        LossAggregator(live.chunk, "token_mean")


def check_a_factor_of_a_group_that_changed_is_refused():
    for name in FSDP:
        live = Live(name)
        aggregator = LossAggregator(live.chunk, "token_mean", options=Options(probe=False))
        group = live.chunk.param_and_grad_buffer.parameter_groups[-1]
        group.main_grad_buffer.gradient_scaling_factor = 0.25
        with refused("scales gradients by"):
            aggregator.step(live.counts, num_microbatches=3)


def check_the_weights_at_the_models_losses_are_measured():
    for name in FSDP:
        live = Live(name)
        aggregator = LossAggregator(live.chunk, "token_mean", options=Options(probe=False))
        faults._warned.discard("multiplied losses")
        words = "each token was trained with 2 = DP times its weight of token_mean"
        with pytest.warns(RuntimeWarning, match=words):
            live.ours(aggregator, change=lambda losses: 2 * losses)
        assert same(live.gradient(), 2 * live.sum() / live.all_tokens), name


def check_zero_gradients_are_warned_of_where_a_rank_adds_up_whole_ones():
    def of_a_leaf(losses):
        return losses.detach().requires_grad_()

    live = Live("optim")
    aggregator = LossAggregator(live.chunk, "token_mean", options=Options(probe=False))
    faults._warned.discard("zero gradients")
    with pytest.warns(RuntimeWarning, match="every gradient of the model that was looked at is 0"):
        live.ours(aggregator, change=of_a_leaf)
    faults._warned.discard("zero gradients")
    for name in ("optim_grads", "optim_grads_params"):
        live = Live(name)
        live.masks = [(torch.arange(T) < 3).long() for _ in live.xs]  # of the first rank's shard
        aggregator = LossAggregator(live.chunk, "token_mean", options=Options(probe=False))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            live.ours(aggregator)
        shards = [gradient.any() for gradient in engine_of(live.chunk).gradients()]
        assert any(shards) == (dist.get_rank() == 0), name
        assert same(live.gradient(), live.sum() / live.all_tokens), name


def check_a_deferred_step_is_divided_once_or_refused():
    for name, per_token in itertools.product(("optim", "optim_grads", "optim_grads_params"), BOTH):
        live = Live(name, per_token=per_token)
        aggregator = LossAggregator(live.chunk, Aggregation("token_mean"))
        live.chunk.zero_grad_buffer()
        with aggregator.deferred() as deferred:
            live.ours(aggregator, zeroed=False, part=slice(0, 2))
            live.ours(aggregator, zeroed=False, part=slice(2, 3))
            deferred.finish()
        assert same(live.gradient(), live.sum() / live.all_tokens), (name, per_token)
        live.ours(aggregator)
        assert same(live.gradient(), live.sum() / live.all_tokens), (name, per_token)
    live = Live("no_shard")
    aggregator = LossAggregator(live.chunk, "token_mean")
    with refused("a deferred step on Megatron-FSDP with no_shard"), aggregator.deferred():
        pytest.fail("it began")


def main():
    tiny_gpt.start(ep=2, dtype=torch.float32)
    run_checks(globals())


if __name__ == "__main__":
    main()
