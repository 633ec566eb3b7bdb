"""The weights of SkyRL's SFT, without SkyRL; its own trainer is in ``test_skyrl.py``."""

from types import SimpleNamespace

import pytest
import torch
from skyrl_written import SFTTrainer, sft_collator

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations import skyrl

SFT_CONFIG = SimpleNamespace(strategy="fsdp")
EXAMPLES = [{"loss_mask": mask} for mask in ([1, 1, 0], [1], [0, 0], [1, 1, 1])]


def made_sft(mode="sample_mean", cfg=SFT_CONFIG, **options):
    return skyrl.aggregated_sft(SFTTrainer, Aggregation(mode, **options))(cfg)


@pytest.mark.parametrize(
    ("mode", "options", "weights"),
    [
        ("token_mean", {}, [1 / 6, 1 / 6, 0, 1 / 6]),
        ("sample_mean", {}, [1 / 8, 1 / 4, 0, 1 / 12]),
        ("sample_mean", {"count_empty": False}, [1 / 6, 1 / 3, 0, 1 / 9]),
        ("constant", {"divisor": 5}, [1 / 20, 1 / 20, 0, 1 / 20]),
    ],
)
def test_a_training_batch_of_sft_has_the_weights_and_an_evaluations_has_not(mode, options, weights):
    trainer = made_sft(mode, **options)
    (batch,) = trainer.build_train_dataloader(EXAMPLES)
    got = trainer.train_step(batch, 0)["loss_mask"]
    mask = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]])
    assert torch.allclose(got, mask * torch.tensor(weights, dtype=got.dtype)[:, None], rtol=1e-12)
    assert trainer.collator is sft_collator


def test_a_training_batch_of_sft_without_the_weights_is_an_error():
    trainer = made_sft()
    with pytest.raises(ContractError, match="got a training batch without the weights"):
        trainer.train_step(sft_collator(EXAMPLES, 4), 0)
    with pytest.raises(PlanError, match=r"values other than 0 and 1.*SkyRL passes no token"):
        trainer.build_train_dataloader([{"loss_mask": [1, 0.5]}])
    assert trainer.collator is sft_collator


@pytest.mark.parametrize("mode", ["prompt_mean", "balanced", "microbatch_token_mean"])
def test_a_mode_that_sft_has_no_counts_for_is_refused(mode):
    with pytest.raises(AggregationError, match="knows neither prompts nor microbatches"):
        made_sft(mode)


@pytest.mark.parametrize(("layers", "is_warned"), [(None, True), (1, True), (0, False)])
def test_mtp_heads_that_stay_skyrls_in_sft_are_warned_of(layers, is_warned, recwarn):
    megatron = SimpleNamespace(mtp_num_layers=layers)
    made_sft(cfg=SimpleNamespace(strategy="megatron", megatron_config=megatron))
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == is_warned
    assert all("the loss of MTP heads, if the model has any, stays" in one for one in messages)
