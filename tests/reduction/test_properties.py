"""Invariants of plan and partial losses on random steps, against the reference."""

import numpy as np
import pytest
import torch
from steps import AGGREGATIONS, ANY_LAYOUT, sequences_of
from test_partial_losses import check_partial_losses

from megatron_lossagg import plan_step
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.table import StepTotals
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies
pytestmark = pytest.mark.filterwarnings("ignore:the plan counts no active token")


@st.composite
def steps(draw):
    """Draw sequences with random masks, samples and prompts; a sample has one prompt."""
    prompt_of_sample = draw(st.lists(st.sampled_from([-3, -2, 0, 1, 2]), min_size=1, max_size=5))
    sequences = []
    for _ in range(draw(st.integers(0, 9))):
        sample = draw(st.integers(0, len(prompt_of_sample) - 1))
        mask = draw(st.lists(st.integers(0, 1), max_size=6))
        prompt = prompt_of_sample[sample]
        ids = {"sample": sample, "prompt": prompt, "group": 2 * prompt + sample % 2}
        sequences.append({"counted": mask, "trained": mask, **ids})
    return sequences


def expected_weights(mode, sequences):
    """Differentiate the loss, linear in x: a sequence's weight is the derivative at an active
    token.
    """
    x = [torch.zeros(len(r["counted"]), dtype=torch.float64, requires_grad=True) for r in sequences]
    live = [{**sequence, "x": list(v)} for sequence, v in zip(sequences, x, strict=True)]
    loss = reference_loss.step_loss(mode.mode, live, **reference_options(mode, []))
    grads = torch.autograd.grad(loss, x, allow_unused=True) if loss.requires_grad else [None] * 99
    return [
        0.0 if g is None or not g.numel() else g.max().item()
        for g, _ in zip(grads, sequences, strict=False)
    ]


@given(sequences=steps(), mode=st.sampled_from([*ANY_LAYOUT.values()]))
@settings(max_examples=200, deadline=None)
def test_a_weight_is_the_derivative_of_the_configured_loss(sequences, mode):
    plan = plan_step(mode, sequences_of(sequences))
    np.testing.assert_allclose(
        plan.weights, expected_weights(mode, sequences), rtol=1e-12, atol=1e-300
    )
    total = sum(
        w * sum(r["counted"]) for w, r in zip(plan.weights.tolist(), sequences, strict=True)
    )
    assert plan.expected_weight == pytest.approx(total, rel=1e-12)


@given(sequences=steps(), mode=st.sampled_from([*ANY_LAYOUT.values()]), order=st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_of_sequences_does_not_matter(sequences, mode, order):
    weights = plan_step(mode, sequences_of(sequences)).weights
    places = list(range(len(sequences)))
    order.shuffle(places)
    shuffled = plan_step(mode, sequences_of([sequences[i] for i in places])).weights
    assert shuffled.tolist() == weights[places].tolist()


@given(sequences=steps(), mode=st.sampled_from([*ANY_LAYOUT.values()]), data=st.data())
@settings(max_examples=100, deadline=None)
def test_microbatches_do_not_matter_where_the_mode_ignores_them(sequences, mode, data):
    m = data.draw(st.integers(1, 4))
    microbatch = [data.draw(st.integers(0, m - 1)) for _ in sequences]
    weights = plan_step(mode, sequences_of(sequences)).weights
    split = plan_step(mode, sequences_of(sequences, microbatch=microbatch, num_microbatches=m))
    assert split.weights.tolist() == weights.tolist()


@given(
    sequences=steps(),
    mode=st.sampled_from(
        [
            aggregation
            for aggregation in ANY_LAYOUT.values()
            if not aggregation.needs and not MODES[aggregation.mode].needs_all
        ]
    ),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_known_totals_give_each_rank_the_weights_that_counting_gives(sequences, mode, data):
    whole = plan_step(mode, sequences_of(sequences, sample=None, prompt=None, group=None))
    own_sequences = [i for i in range(len(sequences)) if data.draw(st.booleans())]
    part = sequences_of([sequences[i] for i in own_sequences], sample=None, prompt=None, group=None)
    totals = StepTotals(**{name: getattr(whole.totals, name) for name in TOTALS})
    assert plan_step(mode, part, totals=totals).weights.tolist() == (
        whole.weights[own_sequences].tolist()
    )


TOTALS = ("active_tokens", "samples", "prompts", "active_samples", "active_prompts")


@given(
    sequences=steps(),
    mode=st.sampled_from([*AGGREGATIONS.values()]),
    m=st.integers(1, 3),
    cp=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_partial_losses_over_microbatches_and_ranks_add_up_to_the_references_loss(
    sequences, mode, m, cp, seed
):
    random = torch.Generator().manual_seed(seed)
    keys = [(0, int(torch.randint(m, (), generator=random))) for _ in sequences]
    for sequence in sequences:  # the training mask may select fewer tokens than the counting one
        kept = torch.rand(len(sequence["counted"]), generator=random) < 0.8
        sequence["trained"] = [n * int(k) for n, k in zip(sequence["counted"], kept, strict=True)]
    check_partial_losses(mode, sequences, keys, m, cp, random)
