"""What SkyRL does around our integration, written from its source, for tests without it."""

from types import SimpleNamespace

import torch


class RayPPOTrainer:
    """SkyRL a9564572: the trainer reduces the advantages of each mini-batch, in its own module."""

    num_calls_left = 99

    def __init__(self, cfg):
        self.cfg = cfg

    def compute_advantages_and_returns(self, data):
        return data

    def _normalize_advantages(self, data, boundaries, prompts=None):
        for start, end in boundaries[: self.num_calls_left]:
            own = [(a - start, b - start) for a, b in prompts or () if start <= a < end]
            data["advantages"][start:end] = apply_loss_reduction_to_advantages_minibatch(
                advantages=data["advantages"][start:end],
                loss_mask=data["loss_mask"][start:end],
                loss_reduction="token_mean",
                micro_batch_size=1,
                max_seq_len=None,
                prompt_boundaries=own or None,
            )
        return data


def apply_loss_reduction_to_advantages_minibatch(**_):
    """Stand for SkyRL's own reduction, which the integration replaces."""
    raise AssertionError


def skyrl_config(*, step_wise=False, mtp=False, critic=None, strategy="megatron", **algorithm):
    """Return what the integration reads of SkyRL's configuration."""
    given = {
        "policy_loss_type": "regular",
        "use_kl_loss": False,
        "use_entropy_loss": False,
        **algorithm,
    }
    return SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=step_wise),
        trainer=SimpleNamespace(
            algorithm=SimpleNamespace(**given),
            strategy=strategy,
            mtp=SimpleNamespace(enabled=mtp),
            critic=SimpleNamespace(model=SimpleNamespace(path=critic)),
        ),
    )


class SFTTrainer:
    """SkyRL a9564572: collates a step's examples, and trains what the loader gives."""

    def __init__(self, cfg):
        self.collator = sft_collator

    def build_train_dataloader(self, tokenized):
        collator = self.collator
        return [collator(tokenized, batch_size=len(tokenized))]

    def train_step(self, batch, step):
        return {"loss_mask": batch["loss_mask"]}


def sft_collator(examples, batch_size):
    """Right-align the loss masks, and divide them by the batch's tokens."""
    width = max(len(one["loss_mask"]) for one in examples)
    rows = [[0] * (width - len(one["loss_mask"])) + one["loss_mask"] for one in examples]
    mask = torch.tensor(rows, dtype=torch.float64)
    return SkyRLBatch({"loss_mask": mask / mask.sum()})


class SkyRLBatch(dict):
    """SkyRL's training batch: tensors by name, and metadata."""

    def __init__(self, tensors, **metadata):
        super().__init__(tensors)
        self.metadata = metadata
