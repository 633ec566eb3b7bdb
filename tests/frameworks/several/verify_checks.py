"""``lossagg verify --framework`` on checkouts of frameworks of which no release is installed.

The others are verified in their own checks.
"""

import pytest
from frameworks import checkout_of, needs
from verified import assert_functions_pass, assert_trains_every_mode, path_with


@pytest.mark.parametrize(
    ("framework", "checkouts", "cp"),
    [
        pytest.param(name, folders, cp, marks=[needs(folder) for folder in folders], id=name)
        for name, folders, cp in [
            ("nemo-rl", ["NeMo-RL"], 1),
            ("areal", ["AReaL"], 1),
            ("megatron-lm", ["Megatron-LM"], 2),
            ("megatron-rl", ["Megatron-LM"], 1),
            ("bridge", ["Megatron-Bridge/src", "Megatron-Bridge/3rdparty/Megatron-LM"], 2),
            ("llama-factory", ["LLaMA-Factory/src", "ROLL/mcore_adapter/src"], 2),
        ]
    ],
)
def test_the_step_of_a_checkout_trains_every_mode(monkeypatch, framework, checkouts, cp):
    """As users run it: nothing of the tests stands in for what is not installed."""
    monkeypatch.setenv("PYTHONPATH", path_with(*map(checkout_of, checkouts)))
    assert_trains_every_mode(framework, cp=cp)


@pytest.mark.parametrize(
    ("framework", "checkout", "stand_ins", "number"),
    [
        pytest.param("nemo_rl", "NeMo-RL", "nemo_rl_first", 39, marks=needs("NeMo-RL")),
        pytest.param("areal", "AReaL", "areal_stand_ins_first", 23, marks=needs("AReaL")),
    ],
)
def test_every_function_of_a_checkout_is_the_references(
    tmp_path, framework, checkout, stand_ins, number
):
    assert_functions_pass(tmp_path, framework, checkout, stand_ins, number)
