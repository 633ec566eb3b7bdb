"""Stock Megatron-Core on CPU: it trains alike at every layout, and not without the stand-ins.

That loss and gradient are those of one process is ``tests/megatron/test_gradients.py``.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from conftest import RELEASE, early, launched, new_folder
from ranks import rows_of

from megatron_lossagg.cpu.stand_ins import STAND_INS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)


@early
def reports() -> dict[int, dict[str, Any]]:
    folder = new_folder()
    printed = {n: launched("cpu/cpu_worker.py", folder, processes=n) for n in (1, 2)}
    return {n: rows_of(out)[0] for n, out in printed.items()}


@pytest.mark.parametrize("layout", ["dp2", "dp2 sharded", "cp2 sharded", "pp2"])
def test_megatron_optimizers_train_the_same_at_every_layout(
    reports: dict[int, dict[str, Any]], layout: str
) -> None:
    unsplit = reports[1]["train"]["one"]
    for (loss, norm), (expected_loss, expected_norm) in zip(
        reports[2]["train"][layout], unsplit, strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    losses = [loss for loss, _ in unsplit]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


def test_attention_is_causal_attention_of_each_packed_sequence(
    reports: dict[int, dict[str, Any]],
) -> None:
    errors = reports[1]["attention"]["errors"]
    assert errors["torch.float64"] < 1e-14
    assert errors["torch.float32"] < 2e-6
    assert errors["torch.bfloat16"] < 2e-2


def test_tokens_past_the_last_sequence_are_finite(reports: dict[int, dict[str, Any]]) -> None:
    assert reports[1]["attention"]["finite with a tail"]


def test_a_model_without_cp_runs_in_a_job_with_cp(reports: dict[int, dict[str, Any]]) -> None:
    assert reports[2]["attention"]["error without context parallelism"] < 1e-13
    assert reports[2]["attention"]["error of a microbatch of one rank"] < 1e-14


def test_what_is_not_computed_is_refused_by_name(
    reports: dict[int, dict[str, Any]],
) -> None:
    refusals = reports[1]["attention"]["refusals"]
    mask, cross, window, no_mask, bias, form, no_group, length, tied, shape = refusals
    assert "'padding'" in mask
    assert "'no_mask'" in no_mask
    assert "'cross'" in cross
    assert "window_size" in window
    assert "attention_bias" in bias
    assert "'sbhd'" in form
    assert "local_cp_size 2 and cp_group None" in no_group
    assert "this rank holds 20 tokens" in length
    assert "share_embeddings_and_output_weights=False" in tied
    assert "shape (3,)" in shape
    (unpadded,) = reports[2]["attention"]["refusals"]
    assert "multiple of 4" in unpadded


# What asks for CUDA, in a torch built without it, and in one that finds no driver.
NO_CUDA = r"(AssertionError|RuntimeError) in _lazy_init: .*(CUDA|NVIDIA)"
FSDP = "megatron.core.distributed.fsdp"
FAILS_WITHOUT = {
    "torch.cuda.current_device": NO_CUDA,
    "torch.tensor": NO_CUDA,
    "torch.zeros": NO_CUDA,
    "torch.ones": NO_CUDA,
    "torch.Tensor.cuda": NO_CUDA,
    # It asserts the type of gradients that it clips.
    "torch.Tensor.type": r"AssertionError in clip_grad_by_total_norm_fp32: ",
    # The checks' own assertion: forked random states are not those of the seed.
    "torch.cuda.manual_seed": r"AssertionError in fork_random_state: ",
    "torch.cuda.get_rng_state": NO_CUDA,
    "torch.cuda.random.get_rng_state": NO_CUDA,
    "torch.cuda.default_generators": r"TypeError in cb: tuple indices must be integers .*device",
    "torch.cuda._lazy_call": r"AssertionError in fork_random_state: ",
    "torch.cuda.synchronize": NO_CUDA,
    # AcceleratorError in a CUDA build without a driver
    "torch.cuda.Stream": r"(Runtime|Accelerator)Error in __new__: .*(CUDA|NVIDIA)",
    "torch.cuda.current_stream": NO_CUDA,
    "torch.cuda.stream": r"AttributeError in __enter__: '_CpuStream' object has no .*'device'",
    "torch.distributed.all_to_all_single": (
        r"TypeError in all_to_all_single: .*incompatible function arguments"
    ),
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": (
        r"NameError in forward: name 'te_general_gemm' is not defined"
    ),
    f"{FSDP}.mcore_fsdp_adapter.torch": r"RuntimeError in __init__: .*cuda:cpu",
    f"{FSDP}.mcore_fsdp_adapter.DeviceMesh": NO_CUDA,
    f"{FSDP}.mcore_fsdp_adapter.TELinear": r"TypeError in _fix_tensor_parallel_attributes: ",
    f"{FSDP}.src.megatron_fsdp.megatron_fsdp.torch": r"RuntimeError in __init__: .*cuda:cpu",
    f"{FSDP}.src.megatron_fsdp.param_and_grad_buffer.gradient_reduce_preprocessing": (
        r"RuntimeError in \w+: Cannot use ReduceOp.PREMUL_SUM with Gloo"
    ),
    # The check's own assertion.
    f"{FSDP}.src.megatron_fsdp.param_and_grad_buffer._coalescing_manager": (
        r"AssertionError in gather_one_at_a_time: "
    ),
}


def test_each_stand_in_has_a_failure_without_it() -> None:
    assert FAILS_WITHOUT.keys() == STAND_INS.keys()


@pytest.mark.parametrize("name", FAILS_WITHOUT)
def test_megatron_fails_without_any_one_stand_in(
    reports: dict[int, dict[str, Any]], name: str
) -> None:
    if name.startswith(FSDP) and (RELEASE < (0, 16) or importlib.util.find_spec("einops") is None):
        pytest.skip("Megatron-FSDP is refused before 0.16, or needs einops")
    failures = {**reports[1]["needed"], **reports[2]["needed"]}
    assert failures[name] is not None, f"{name} is not needed: Megatron-Core runs without it"
    assert re.match(FAILS_WITHOUT[name], failures[name]), failures[name]
