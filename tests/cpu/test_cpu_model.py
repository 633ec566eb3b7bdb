"""Stock Megatron-Core on CPU: one loss, one gradient and one training run at every layout."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import early, launched, new_folder

from megatron_lossagg.cpu import STAND_INS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)

SCENARIOS = "gradients,train,attention,needed"
# Megatron's vocabulary-parallel cross entropy computes in float32.
FLOAT32, FLOAT64 = 1e-6, 1e-13


def run_worker(scenarios: str, processes: int, directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(
        launched("cpu/cpu_worker.py", scenarios, directory, processes=processes)
    )
    return report


@early
def reports() -> dict[int, dict[str, Any]]:
    directory = new_folder()
    return {
        1: run_worker(SCENARIOS, 1, directory),
        2: run_worker(SCENARIOS, 2, directory),
        4: run_worker("gradients", 4, directory),
    }


@pytest.mark.parametrize(
    ("processes", "layout", "bound"),
    [
        (2, "dp2", FLOAT64),
        (2, "cp2", FLOAT64),
        (2, "pp2", FLOAT64),
        (2, "pp2 vpp2", FLOAT64),
        (2, "tp2", FLOAT32),
        (2, "tp2 sp", FLOAT32),
        (2, "moe ep2", FLOAT64),
        (2, "moe ep2 cp2", FLOAT64),
        (2, "mtp pp2", FLOAT32),
        (4, "cp2 pp2", FLOAT64),
        (4, "mtp cp2 tp2 sp", FLOAT32),
        (4, "cp2 tp2 sp", FLOAT32),
        (4, "moe tp2 sp ep2 cp2", FLOAT32),
    ],
)
@pytest.mark.parametrize("form", ["thd", "sbhd"])
def test_loss_and_gradients_do_not_depend_on_the_layout(
    reports: dict[int, dict[str, Any]], processes: int, layout: str, bound: float, form: str
) -> None:
    errors = reports[processes]["gradients"]
    if layout.startswith("mtp") and f"{layout} {form}" not in errors:
        pytest.skip("Megatron-Core before 0.16 packs no sequences under multi-token prediction")
    assert errors[f"{layout} {form}"] < bound


@pytest.mark.parametrize("layout", ["dp2", "dp2 sharded", "cp2 sharded", "pp2"])
def test_megatron_optimizers_train_the_same_at_every_layout(
    reports: dict[int, dict[str, Any]], layout: str
) -> None:
    alone = reports[1]["train"]["one"]
    for (loss, norm), (expected_loss, expected_norm) in zip(
        reports[2]["train"][layout], alone, strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    losses = [loss for loss, _ in alone]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


def test_attention_is_causal_attention_of_each_packed_sequence(
    reports: dict[int, dict[str, Any]],
) -> None:
    errors = reports[1]["attention"]["errors against loops"]
    assert errors["torch.float64"] < 1e-14
    assert errors["torch.float32"] < 2e-6
    assert errors["torch.bfloat16"] < 2e-2


def test_attention_on_two_ranks_is_the_attention_of_the_whole(
    reports: dict[int, dict[str, Any]],
) -> None:
    errors = reports[2]["attention"]["errors against the whole"]
    assert errors["torch.float64"] < 1e-14
    assert errors["torch.float32"] < 2e-6
    assert errors["torch.bfloat16"] < 2e-2


def test_attention_equals_megatrons_own_on_unpacked_sequences(
    reports: dict[int, dict[str, Any]],
) -> None:
    assert reports[1]["attention"]["error against Megatron's attention"] < 1e-13


def test_tokens_past_the_last_sequence_are_finite(reports: dict[int, dict[str, Any]]) -> None:
    assert reports[1]["attention"]["finite with a tail"]


def test_a_model_without_cp_runs_in_a_job_with_cp(reports: dict[int, dict[str, Any]]) -> None:
    assert reports[2]["attention"]["error without context parallelism"] < 1e-13


def test_what_is_not_computed_is_refused_by_name(
    reports: dict[int, dict[str, Any]],
) -> None:
    refusals = reports[1]["attention"]["refusals"]
    mask, cross, window, no_mask, bias, form, length, tied, shape = refusals
    assert "'padding'" in mask
    assert "'no_mask'" in no_mask
    assert "'cross'" in cross
    assert "window_size" in window
    assert "attention_bias" in bias
    assert "'sbhd'" in form
    assert "this rank holds 20 tokens" in length
    assert "share_embeddings_and_output_weights=False" in tied
    assert "shape (3,)" in shape
    (unpadded,) = reports[2]["attention"]["refusals"]
    assert "multiple of 4" in unpadded


# What asks for CUDA, in a torch built without it, and in one that finds no driver.
NO_CUDA = r"(AssertionError|RuntimeError) in _lazy_init: .*(CUDA|NVIDIA)"
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
    "torch.cuda.Stream": r"RuntimeError in __new__: .*(CUDA|NVIDIA)",
    "torch.cuda.current_stream": NO_CUDA,
    "torch.cuda.stream": r"AttributeError in __enter__: '_CpuStream' object has no .*'device'",
    "torch.distributed.all_to_all_single": (
        r"TypeError in all_to_all_single: .*incompatible function arguments"
    ),
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": (
        r"NameError in forward: name 'te_general_gemm' is not defined"
    ),
}


def test_each_stand_in_has_a_failure_without_it() -> None:
    assert list(FAILS_WITHOUT) == [stand_in.name for stand_in in STAND_INS]


@pytest.mark.parametrize("name", FAILS_WITHOUT)
def test_megatron_fails_without_any_one_stand_in(
    reports: dict[int, dict[str, Any]], name: str
) -> None:
    failures = {**reports[1]["needed"], **reports[2]["needed"]}
    assert failures[name] is not None, f"{name} is not needed: Megatron-Core runs without it"
    assert re.match(FAILS_WITHOUT[name], failures[name]), failures[name]
