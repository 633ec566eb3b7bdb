"""SkyRL's own part of a step on live Megatron-Core."""

import framework_step
import live_step
import torch
from live_step import padded
from skyrl_written import RayPPOTrainer, SkyRLBatch, skyrl_config

from megatron_lossagg.integrations import skyrl


class Live(live_step.Live):
    """SkyRL a9564572: advantages scaled over the mini-batch, losses summed, * M DP, two outputs."""

    cases = tuple(framework_step.CASES)

    def __init__(self, steps, dp_size):
        super().__init__(steps, dp_size)
        # The trainer has the whole mini-batch, a prompt's sequences together; padding sequences
        # follow.
        self.step = sorted(
            (sequence for rank in steps for sequence in rank), key=lambda sequence: sequence["uid"]
        )

    def prepare(self, case):
        tensors = {
            "advantages": padded([*(one["advantage"] for one in self.step), torch.zeros(1)]),
            "loss_mask": padded([*(one["mask"] for one in self.step), [0]]).double(),
        }
        uids = [sequence["uid"] for sequence in self.step]
        starts = [n for n, uid in enumerate(uids) if n == 0 or uid != uids[n - 1]]
        prompts = list(zip(starts, [*starts[1:], len(uids)], strict=True))
        trainer = skyrl.aggregated(RayPPOTrainer, framework_step.CASES[case])
        made = trainer(skyrl_config(policy_loss_type="dual_clip"))
        batch = SkyRLBatch(tensors, uids=["p"])
        scaled = made._normalize_advantages(batch, [(0, len(uids))], prompts)["advantages"]
        of_sequence = {one["number"]: scaled[n] for n, one in enumerate(self.step)}
        return [
            [{**one, "advantage": of_sequence[one["number"]][: one["response"]]} for one in rank]
            for rank in self.steps
        ]

    def loss(self, case, sequences, log_probs, num_microbatches):
        total = sum(
            (framework_step.policy_loss(log_prob, sequence) * torch.tensor(sequence["mask"])).sum()
            for log_prob, sequence in zip(log_probs, sequences, strict=True)
        )
        return total * num_microbatches * self.dp_size
