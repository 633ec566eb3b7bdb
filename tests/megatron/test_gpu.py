"""CUDA masks and losses: as on the CPU, without a host sync, faults raised when the step finishes.

``make gpu`` runs these on one GPU: NCCL with one rank, and a Linear in Megatron-Core's
DistributedDataParallel, so that the aggregator is a live one.
"""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg import Aggregation, Layout, LossAggregator, Sequences, plan_step
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.aggregation import Options

CUDA = torch.cuda.is_available()  # now: another test of this process may put stand-ins in place
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs CUDA")]

LENGTHS = (48, 16, 80, 32)
MODES = (
    Aggregation("token_mean"),
    Aggregation("sample_mean"),
    Aggregation("prompt_mean"),
    Aggregation("constant", divisor=100),
)


@pytest.fixture(scope="module")
def aggregator():
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer import TransformerConfig

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        finalize_model_grads_func=finalize_model_grads,
    )
    linear = torch.nn.Linear(4, 4).cuda()
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), linear)
    aggregator = LossAggregator(chunk, MODES[0], options=Options(probe=False))
    for mode in MODES[1:]:
        aggregator.agree_on(mode)
    yield aggregator
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def data():
    """Make a packed microbatch: a 0/1 mask with holes, losses with inf and NaN where it is 0."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(sum(LENGTHS), generator=generator) < 0.7
    mask[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = False  # a sequence without active tokens
    x = torch.randn(len(mask), generator=generator)
    masked = (~mask).nonzero().flatten()
    x[masked[::2]], x[masked[1::2]] = math.inf, math.nan
    return mask, x


def a_plan(mask, aggregation=MODES[1]):
    active = [int(part.sum()) for part in mask.split(LENGTHS)]
    return plan_step(aggregation, Sequences(active_tokens=active, prompt=[0, 0, 1, 1]))


def a_layout(cp_size=1, cp_rank=0):
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    return Layout.thd_zigzag(offsets, cp_size=cp_size, cp_rank=cp_rank)


def partial_loss_and_gradient(plan, mask, x, layout, *, device):
    x = x[layout.positions].to(device).requires_grad_()
    partial_loss = plan.reducer(range(len(LENGTHS)), mask.to(device), layout)(x)
    partial_loss.backward()
    assert partial_loss.device.type == x.grad.device.type == device
    return partial_loss.detach().cpu(), x.grad.cpu()


@contextlib.contextmanager
def no_sync():
    """Raise where the block waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_the_sync_debug_mode_catches_a_read():
    value = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError), no_sync():
        value.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask_type", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("cp_size", [1, 4])
@pytest.mark.parametrize("aggregation", MODES, ids=str)
def test_what_is_trained_is_that_of_the_cpu(data, aggregation, cp_size, mask_type, dtype):
    mask, x = data
    plan = a_plan(mask, aggregation)
    for cp_rank in range(cp_size):
        layout = a_layout(cp_size, cp_rank)
        inputs = (plan, mask.to(mask_type), x.to(dtype), layout)
        on_cpu = partial_loss_and_gradient(*inputs, device="cpu")
        on_gpu = partial_loss_and_gradient(*inputs, device="cuda")
        torch.testing.assert_close(on_gpu[0], on_cpu[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(on_gpu[1], on_cpu[1], rtol=0, atol=0)
    plan.check()


def test_a_mask_on_the_cpu_works_with_losses_on_a_device(data):
    mask, x = data
    plan, layout = a_plan(mask), a_layout()
    partial_loss = plan.reducer(range(len(LENGTHS)), mask, layout)(x.cuda())
    expected, _ = partial_loss_and_gradient(plan, mask, x, layout, device="cpu")
    torch.testing.assert_close(partial_loss.cpu(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mask_type", [torch.bool, torch.int32, torch.float32])
def test_building_calling_and_returning_make_no_host_sync(aggregator, data, mask_type):
    mask, x = data
    plan, layout = a_plan(mask), a_layout()
    mask, x = mask.to(mask_type).cuda(), x.cuda().requires_grad_()
    with aggregator.begin(plan, num_microbatches=1) as step:
        with no_sync():
            mb = step.microbatch(range(len(LENGTHS)), mask, layout=layout)
            policy, kl = mb.reduce(x), mb.reduce(x.detach(), "token_mean")
            loss, num_tokens, report = mb.outputs(policy, report={"kl": kl})
            loss.backward()
        assert loss.isfinite()
        assert num_tokens.device == loss.device
        assert float(report["lossagg/weight_sum"][0]) == pytest.approx(
            float(report["lossagg/weight_expected"][0]), rel=1e-6
        )


def a_step_with(aggregator, plan, mask, x):
    """Make a step of one microbatch; nothing is read, so nothing is raised, before it finishes."""
    mask, x = mask.cuda(), x.cuda().requires_grad_()
    with aggregator.begin(plan, num_microbatches=1) as step, no_sync():
        mb = step.microbatch(range(len(LENGTHS)), mask, layout=a_layout())
        loss, _, _ = mb.outputs(mb.reduce(x))
        loss.backward()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_raised_when_the_step_finishes(aggregator, data, bad):
    mask, x = data
    x[mask.nonzero()[7]] = bad
    with pytest.raises(ReducerError, match=r"sequences? 0"):
        a_step_with(aggregator, a_plan(mask), mask, x)


@pytest.mark.parametrize("wrong", [0.5, 2.0, math.nan])
def test_a_mask_of_other_values_is_raised_when_the_step_finishes(aggregator, data, wrong):
    mask, x = data
    plan, mask = a_plan(mask), mask.float()
    mask[3] = wrong
    with pytest.raises(ReducerError, match="mask"):
        a_step_with(aggregator, plan, mask, x.nan_to_num(0, 0, 0))


def test_more_trained_than_counted_is_raised_when_the_step_finishes(aggregator, data):
    mask, x = data
    plan, more = a_plan(mask), mask.clone()
    more[: LENGTHS[0]] = True
    with pytest.raises(ReducerError, match="count"):
        a_step_with(aggregator, plan, more, x.nan_to_num(0, 0, 0))


def test_a_fault_belongs_to_the_plan_of_its_step_and_is_raised_once(data):
    mask, x = data
    x[mask.nonzero()[0]] = math.nan
    faulty, sound = a_plan(mask), a_plan(mask)
    faulty.reducer(range(len(LENGTHS)), mask.cuda(), a_layout())(x.cuda())
    sound.check()
    a_plan(mask)
    with pytest.raises(ReducerError, match=r"finite|nan"):
        faulty.check()
    faulty.check()
