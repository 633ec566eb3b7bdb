"""examples/one_file.py is the package without its checks: weights, slices, sums, K."""

import re
import sys

import pytest
import torch
from conftest import TESTS, each_check

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.modes import CUSTOM, MODES, OWN_WEIGHTS

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies
EXAMPLES = TESTS.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import one_file  # noqa: E402  of examples/

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of drawn ids and divisors
NUMBERS = {"constant": {"divisor": 6.0}, "token_sum": {"divisor": 3.0}}
NUMBERS["length_power"] = {"exponent": 0.75}
NAMES = [name for name in MODES if name not in (CUSTOM, OWN_WEIGHTS)]


@st.composite
def drawn_steps(draw):
    """Draw a mode, the masks of sequences and their ids; a sample has one prompt and group."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=9))
    sample = [draw(st.integers(0, 4)) for _ in masks]
    ids = {
        "sample": sample,
        "prompt": [f"p{one // 2}" for one in sample],
        "group": [one % 3 for one in sample],
        "microbatch": [draw(st.integers(0, 2)) for _ in masks],
        "num_microbatches": 3,
    }
    mode, count_empty = draw(st.sampled_from(NAMES)), draw(st.booleans())
    return masks, ids, mode, {"count_empty": count_empty, **NUMBERS.get(mode, {})}


@given(step=drawn_steps(), cp_size=st.sampled_from([1, 2, 4]))
@settings(max_examples=200, deadline=None)
def test_weights_partial_losses_and_gradients_are_the_packages(step, cp_size):
    masks, ids, mode, numbers = step
    n = [sum(mask) for mask in masks]
    theirs = plan_step(Aggregation(mode, **numbers), Sequences(active_tokens=n, **ids))
    own = one_file.plan(mode, n, **ids, **numbers)
    torch.testing.assert_close(own.weight_S[:-1], theirs.weights, rtol=1e-14, atol=0)
    if not any(n):
        return
    for m in range(3):
        here = [s for s, of in enumerate(ids["microbatch"]) if of == m]
        sequences = [*here, -1]
        padded = [max(-(-len(masks[s]) // (2 * cp_size)), 1) * 2 * cp_size for s in here]
        offsets = torch.tensor([0, *padded, 2 * cp_size]).cumsum(0)
        mask = torch.zeros(int(offsets[-1]))
        for s, begin in zip(here, offsets.tolist(), strict=False):
            mask[begin : begin + len(masks[s])] = torch.tensor(masks[s])
        for rank in range(cp_size):
            layout = Layout.thd_zigzag(offsets, cp_size=cp_size, cp_rank=rank)
            assert torch.equal(one_file.zigzag(offsets, cp_size, rank), layout.positions)
            x = torch.randn(layout.num_local_tokens, dtype=torch.float64)
            x[mask[layout.positions] == 0] = torch.nan
            x.requires_grad_()
            losses = [
                one_file.partial_loss(own, x, sequences, mask, offsets, cp_size, rank),
                theirs.reducer(sequences, mask, layout)(x),
            ]
            torch.testing.assert_close(*losses, rtol=1e-14, atol=1e-18)
            of_x = [torch.autograd.grad(loss, x)[0] for loss in losses]
            torch.testing.assert_close(*of_x, rtol=1e-14, atol=0)


output_of_one_file_worker_4, test_a_real_step_is_the_packages = each_check(
    "examples/one_file_worker.py", processes=4
)


@pytest.mark.parametrize("mode", NAMES)
def test_it_refuses_a_mode_without_its_ids_if_the_package_does(mode):
    n, numbers = [1, 2, 3], NUMBERS.get(mode, {})
    try:
        plan_step(Aggregation(mode, **numbers), Sequences(active_tokens=n))
    except PlanError as error:
        (name,) = re.findall(r"needs Sequences\((\w+)=", str(error))
        with pytest.raises(ValueError, match=f"^got {mode} without {name}=, expected one per"):
            one_file.plan(mode, n, **numbers)
        numbers = {**numbers, name: [0, 1, 1]}
    assert one_file.plan(mode, n, **numbers).num_tokens == 6


def test_it_has_every_mode_and_imports_nothing_of_the_package():
    text = (EXAMPLES / "one_file.py").read_text()
    assert "import megatron" not in text
    assert "from megatron" not in text
    row = one_file.Row(3, 0, 0, 0, 0)
    assert all(len(one_file.weights(name, [row])) == 1 for name in NAMES)
