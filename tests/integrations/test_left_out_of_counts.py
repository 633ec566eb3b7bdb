"""Groups without a signal in slime, miles, SkyRL and NeMo-RL: what takes them out of the counts.

None has a column for ``Sequences(left_out=...)``. Each masks such samples, and a setting takes what
is masked out of the counts. Here that setting trains the loss that leaves them out; and the first
step that counts an empty sample names it.
"""

import pytest
import torch
from rollout_batch import batch_of
from written_frameworks import NLLLossFn, RayPPOTrainer, SkyRLBatch, skyrl_config

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.integrations import miles, nemo_rl, skyrl
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options
from megatron_lossagg.verify.drivers.driver import draw

COUNTS_EMPTY = ["sample_mean", "constant", "sample_sum", "prompt_mean", "row_mean"]
NAMED = {
    "prompt_mean": "prompts without an active token, ",
    **dict.fromkeys(["sample_mean", "constant"], "samples without an active token, "),
}


def of_mode(mode, **more):
    return Aggregation(mode, divisor=7 if mode == "constant" else None, **more)


@pytest.fixture(autouse=True)
def nothing_is_said_yet(monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())


@pytest.fixture(params=["slime", "miles"])
def framework(request, monkeypatch):
    return batch_of(request.param, monkeypatch)


def mask_as_removed(framework, removed):
    """Mask the samples of some prompts as ``Sample.remove_sample`` does, and no other token."""
    for mask, one in zip(framework.data["loss_masks"], draw(), strict=True):
        of_lists = [int(one.prompt not in removed)] * len(mask)
        mask[:] = of_lists if framework.module is miles else torch.tensor(of_lists).to(mask)


@pytest.mark.parametrize("mode", ["token_mean", *COUNTS_EMPTY])
def test_a_prompt_of_removed_samples_is_left_out_if_empty_samples_do_not_count(framework, mode):
    drawn = draw()
    removed = {drawn[0].prompt, drawn[-1].prompt}  # one prompt of each step
    mask_as_removed(framework, removed)
    denominators = framework.carry(framework.arguments(of_mode(mode, count_empty=False)))
    for step in (range(6), range(6, 12)):
        sequences = [
            {
                "x": list(drawn[n].advantages.unbind()),
                "counted": [1] * len(drawn[n].mask),
                "trained": [1] * len(drawn[n].mask),
                "sample": drawn[n].sample,
                "prompt": drawn[n].prompt,
                "left_out": drawn[n].prompt in removed,
            }
            for n in step
        ]
        want = reference_loss.step_loss(mode, sequences, **reference_options(of_mode(mode), []))
        kept = [n for n in step if drawn[n].prompt not in removed]
        got = sum(drawn[n].advantages.sum().item() / denominators[n] / 4 for n in kept)
        assert got == pytest.approx(want.item(), rel=1e-6)  # slime's are float32


def assert_said(printed, mode, leave_out):
    """The setting is named once if the mode counts empty samples or prompts, else never."""
    says = f"counts {NAMED[mode]}" if mode in NAMED else "without an active token"
    assert printed.count(says) == (mode in NAMED)
    assert printed.count(f" here; {leave_out} takes them out\n") == (mode in NAMED)


@pytest.mark.parametrize("mode", ["token_mean", *NAMED])
def test_slime_and_miles_name_the_setting_once(framework, mode, capsys):
    mask_as_removed(framework, {draw()[0].prompt})
    for _ in range(2):
        framework.carry(framework.arguments(of_mode(mode)))
    assert_said(capsys.readouterr().err, mode, "loss_aggregation_count_empty: false")
    framework.carry(framework.arguments(of_mode(mode, count_empty=False)))
    assert "without an active token" not in capsys.readouterr().err


MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
PROMPTS = [(0, 2), (2, 3), (3, 4)]
"""SkyRL's zero-variance filter has masked the second."""


def advantages_of_skyrl(mode, **more):
    trainer = skyrl.aggregated(RayPPOTrainer, of_mode(mode, **more))(skyrl_config())
    batch = SkyRLBatch({"advantages": torch.ones(4, 3), "loss_mask": torch.tensor(MASK)})
    return trainer._normalize_advantages(batch, [(0, 4)], PROMPTS)["advantages"]


@pytest.mark.parametrize("mode", ["token_mean", *COUNTS_EMPTY])
def test_a_group_that_skyrls_filter_masks_is_left_out_if_empty_samples_do_not_count(mode):
    sequences = [
        {
            "x": list(torch.arange(3.0) + number),
            "counted": [1, 1, 1] if number == 2 else mask,  # masked afterwards
            "trained": [1, 1, 1] if number == 2 else mask,
            "sample": number,
            "prompt": [0, 0, 1, 2][number],
            "left_out": number == 2,
        }
        for number, mask in enumerate(MASK)
    ]
    want = reference_loss.step_loss(mode, sequences, **reference_options(of_mode(mode), []))
    losses = torch.stack([torch.stack(one["x"]) for one in sequences])
    got = (advantages_of_skyrl(mode, count_empty=False) * losses * torch.tensor(MASK)).sum()
    assert got.item() == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("mode", ["token_mean", *NAMED])
def test_skyrl_names_the_setting_once(mode, capsys):
    for _ in range(2):
        advantages_of_skyrl(mode)
    leave_out = "loss_aggregation_count_empty=false (count_empty=False)"
    assert_said(capsys.readouterr().err, mode, leave_out)
    advantages_of_skyrl(mode, count_empty=False)
    assert "without an active token" not in capsys.readouterr().err


def loss_of_nemo_rl(mode, log_probs, sample_mask, token_mask):
    names = ("advantages", "prev_logprobs", "reference_policy_logprobs")
    fields = {name: torch.ones(8, 4, dtype=torch.float64) for name in names}
    n_b = token_mask[:, 1:].sum(-1) * sample_mask
    loss, _ = nemo_rl.aggregated(NLLLossFn(), of_mode(mode))(
        log_probs,
        data={**fields, "sample_mask": sample_mask, "token_mask": token_mask},
        global_valid_seqs=sample_mask.sum(),
        global_valid_toks=n_b.sum(),
    )
    return loss


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant", "sample_sum"])
def test_a_sample_of_nemo_rls_loss_multiplier_0_is_left_out(mode):
    is_left_out = torch.arange(8) % 3 == 0
    log_probs = torch.linspace(-2, -1, 24, dtype=torch.float64).view(8, 3).requires_grad_()
    whole = torch.ones(8, 4, dtype=torch.float64)
    loss = loss_of_nemo_rl(mode, log_probs, (~is_left_out).to(torch.float64), whole)
    sequences = Sequences(active_tokens=[3] * 8, left_out=is_left_out.tolist())
    weights = plan_step(of_mode(mode), sequences).weights
    wanted = torch.zeros((), dtype=torch.float64)
    for sequence in range(8):
        for token in range(3):
            wanted = wanted - weights[sequence] * log_probs[sequence, token]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-7)
    (got,), (want,) = (torch.autograd.grad(one, log_probs) for one in (loss, wanted))
    assert torch.allclose(got, want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant"])
def test_nemo_rl_names_the_setting_once(mode, capsys):
    log_probs = torch.ones(8, 3, dtype=torch.float64, requires_grad=True)
    token_mask = torch.ones(8, 4, dtype=torch.float64)
    token_mask[5] = 0
    for _ in range(2):
        loss_of_nemo_rl(mode, log_probs, torch.ones(8, dtype=torch.float64), token_mask)
    assert_said(capsys.readouterr().err, mode, "their loss_multiplier 0")
