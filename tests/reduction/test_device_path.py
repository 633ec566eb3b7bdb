"""On a device no value is read before the step ends, and no tensor is anywhere else.

``meta`` tensors stand for the device: reading a value of one raises, and so does an operation
on one and on a tensor of the CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from custom_reducer import custom
from device_double import on
from steps import MASK, a_chunk, a_plan, a_step, thd
from test_mask_checks import MASK_DTYPES

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.guards.replicas import Replicas
from megatron_lossagg.record.step_record import read_record
from megatron_lossagg.record.writer import RecordFile, StepRecorder
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.exchange import Exchange

META = torch.device("meta")
SAMPLE_MEAN = Aggregation("sample_mean")
LOSS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = {
    "thd": lambda cp: thd(8, 0, 12, cp_size=cp, cp_rank=cp - 1),
    "bshd": lambda cp: Layout.bshd_zigzag(3, 8, cp_size=cp, cp_rank=cp - 1),
    "response": lambda cp: Layout.response_zigzag(
        [12, 5, 9], [8, 2, 0], cp_size=cp, cp_rank=cp - 1
    ),
    "local": lambda cp: Layout.local([8, 0, 12], cp_size=cp, cp_rank=cp - 1),
    "no segments": lambda cp: thd(cp_size=cp, cp_rank=cp - 1),
}


def reduced(layout, mask_dtype, loss_dtype, aggregation=SAMPLE_MEAN):
    """Build, call, go backward and sum the weights on the device."""
    options = Options(rejects_tokens=True)
    plan = plan_step(aggregation, Sequences(active_tokens=[8, 2, 5]), options=options)
    mask = torch.ones(layout.num_tokens, dtype=mask_dtype, device=META)
    x = torch.ones(layout.num_local_tokens, dtype=loss_dtype, device=META, requires_grad=True)
    sequences = [0, 1, -1][: layout.num_segments]
    made = plan.reducer(sequences, mask, layout)
    partial_loss = made(x)
    partial_loss.backward()
    made.under("token_mean")(x)
    return made, partial_loss, x.grad


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_nothing_is_read_for_any_layout_and_mask(name, cp, dtype):
    made, partial_loss, gradient = reduced(LAYOUTS[name](cp), dtype, torch.float32)
    for tensor in (made.keep, made.weight_sum(), partial_loss, gradient):
        assert tensor.device == META


@pytest.mark.parametrize("dtype", LOSS_DTYPES)
def test_nothing_is_read_for_any_loss(dtype):
    _, partial_loss, gradient = reduced(LAYOUTS["thd"](2), torch.int32, dtype)
    assert partial_loss.dtype == torch.promote_types(dtype, torch.float32)
    assert (gradient.dtype, gradient.device) == (dtype, META)


@pytest.mark.parametrize("dtype", LOSS_DTYPES)
def test_nothing_is_read_for_a_shadow_and_for_what_a_record_sums(dtype):
    made, _, _ = reduced(LAYOUTS["thd"](2), torch.int32, dtype)
    x = torch.ones(made.layout.num_local_tokens, dtype=dtype, device=META, requires_grad=True)
    shadow = made.shadow_of(x, Aggregation("sample_sum"))
    assert (shadow.device, shadow.requires_grad) == (META, False)
    assert shadow.dtype == torch.promote_types(dtype, torch.float32)
    summed = made.weight_sum(torch.float64)
    assert (summed.device, summed.dtype) == (META, torch.float64)


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_read_for_a_custom_reducer(name):
    def factory(context):
        assert context.mask.device == META
        return lambda x: 2 * x.sum()

    _, partial_loss, _ = reduced(LAYOUTS[name](2), torch.bool, torch.bfloat16, custom(factory))
    assert (partial_loss.device, partial_loss.dtype) == (META, torch.float32)


def test_a_mask_of_the_cpu_follows_the_losses_to_their_device():
    with on("device") as to:
        made = a_plan((4, 1), mode="sample_mean").reducer(
            [0, 1], torch.tensor([1] * 5 + [0]), thd(4, 2)
        )
        x = to(torch.arange(6.0)).requires_grad_()
        for _ in range(2):
            partial_loss = made(x)
        partial_loss.backward()
        assert not to.syncs
        assert partial_loss.item() == pytest.approx((0 + 1 + 2 + 3) / 4 / 2 + 4 / 2)
        assert x.grad.tolist() == [1 / 8] * 4 + [1 / 2, 0]


def test_a_read_on_the_device_raises():
    plan = a_plan()
    plan.reducer([0, 1], torch.tensor(MASK).to(META), thd(4, 2))
    with pytest.raises((RuntimeError, NotImplementedError)):
        plan.check()


def a_step_of_two_microbatches(to, losses, loss_scaling, **options):
    """Run a step's loss_func and backward passes; return the step, not finished, and outputs."""
    plan = a_plan((4, 1), mode="sample_mean")
    gradients = SimpleNamespace(grad_data=to(torch.zeros(8)), params=[])
    chunk = a_chunk(gradients)
    step = a_step(plan, 2, loss_scaling=loss_scaling, chunks=[chunk], **options)
    returned = []
    for sequence, (mask, length) in enumerate((([1, 1, 1, 1], 4), ([1, 0], 2))):
        mb = step.microbatch([sequence], to(torch.tensor(mask)), layout=thd(length))
        x = to(losses[:length]).requires_grad_()
        loss, metric = mb.reduce(x), mb.reduce(x.detach(), "token_mean")
        out = mb.outputs(
            loss, report={"metric": metric}, means={"clipped": (x.detach().sum(), length)}
        )
        (out[0] * step.scaling.schedule_factor).backward()
        gradients.grad_data += 1  # as a parameter's hook does
        returned.append(out)
    chunk.config.finalize_model_grads_func([chunk], returned[0][1] + returned[1][1])
    return step, returned


@pytest.mark.parametrize("loss_scaling", ["average", "per_token"])
def test_outputs_read_no_value_and_the_end_of_the_step_reads_once(loss_scaling):
    with on("device") as to:
        step, returned = a_step_of_two_microbatches(to, torch.arange(4.0), loss_scaling)
        for loss, num_tokens, report in returned:
            assert {loss.device, num_tokens.device, *(r.device for r in report.values())} == {META}
        assert not to.syncs
        step.finish()
        assert to.syncs.total() == 1
        on_device = [
            (loss.item(), num_tokens.item(), {name: r.tolist() for name, r in report.items()})
            for loss, num_tokens, report in returned
        ]
    _, returned = a_step_of_two_microbatches(torch.as_tensor, torch.arange(4.0), loss_scaling)
    assert on_device == [
        (loss.item(), num_tokens.item(), {name: r.tolist() for name, r in report.items()})
        for loss, num_tokens, report in returned
    ]


def test_a_shadow_waits_for_no_device_and_a_record_once_when_the_step_ends(tmp_path):
    file = RecordFile(str(tmp_path / "a.jsonl"))
    options = {
        "shadows": {"token_sum": Aggregation("token_sum")},
        "recorder": StepRecorder(Exchange(None), file, 5),
    }
    with on("device") as to:
        step, returned = a_step_of_two_microbatches(to, torch.arange(4.0), "average", **options)
        assert not to.syncs
        step.finish()
        assert to.syncs.total() == 2
        shadows = [report["lossagg/shadow/token_sum"].tolist() for *_, report in returned]
    assert shadows == [[0 + 1 + 2 + 3, 1 / 2], [0, 1 / 2]]  # M DP CP = 2
    (recorded,) = read_record(tmp_path / "a.jsonl").values()
    assert (recorded.step, recorded.weight_sum, recorded.active_tokens) == (5, 1.0, 5)


def test_what_the_outputs_of_a_step_left_on_the_device_is_raised_by_its_one_read():
    losses = torch.tensor([0.0, 1.0, torch.nan, 3.0])
    with on("device") as to:
        step, _ = a_step_of_two_microbatches(to, losses, "average")
        assert not to.syncs
        with pytest.raises(ReducerError, match=r"loss of sequence 0 .* is nan at its token 2"):
            step.finish()
        assert to.syncs.total() == 1


def test_outputs_of_tensors_without_values_read_nothing():
    losses = torch.arange(4.0, device=META)
    _, returned = a_step_of_two_microbatches(lambda values: values.to(META), losses, "average")
    for loss, num_tokens, report in returned:
        assert {loss.device, num_tokens.device, *(r.device for r in report.values())} == {META}


@pytest.mark.parametrize("is_custom", [False, True])
def test_what_tensor_parallel_ranks_compare_is_read_when_the_step_ends(monkeypatch, is_custom):
    monkeypatch.setattr(Replicas, "of", lambda step: Replicas())
    aggregation = custom(lambda context: torch.sum) if is_custom else SAMPLE_MEAN
    with on("device") as to:
        plan = plan_step(aggregation, Sequences(active_tokens=[3, 2]))
        step = a_step(plan, 1)
        x = to(torch.ones(8)).requires_grad_()
        mask = to(torch.tensor([1, 1, 1, 0, 1, 1, 0, 0]))
        mb = step.microbatch([0, 1], mask, cu_seqlens=[0, 4, 8])
        mb.outputs(mb.reduce(x))[0].backward()
        step._guards.together(has_failed=False)
        assert not to.syncs
