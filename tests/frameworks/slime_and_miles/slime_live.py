"""slime's own part of a step on live Megatron-Core."""

from types import SimpleNamespace

import framework_step
import live_step
import pytest
import torch
from live_step import CP, DP
from megatron.core import parallel_state

from megatron_lossagg.errors import PlanError
from megatron_lossagg.integrations import slime
from megatron_lossagg.verify.step_data import zigzag


class Live(live_step.Live):
    """slime 624b824a: sum of masked sums / max(d_s, 1), * M / G * DP CP, three outputs."""

    cases = (
        *("reducer", "token_mean", "sample_mean", "prompt_mean", "constant", "length_power"),
        "microbatch_token_mean",
    )

    def begin(self, case, sequences, m):
        """Carry the weights to the sequences as slime does, in a rollout batch of one step."""
        self.num_rollouts = len({one["rollout"] for rank in self.steps for one in rank})
        if case == "reducer":  # each sequence a rollout
            self.num_rollouts = sum(map(len, self.steps))
            return
        data = {
            "loss_masks": [torch.tensor(one["mask"], dtype=torch.int32) for one in sequences],
            "rollout_ids": [one["rollout"] for one in sequences],
            "prompt": [one["uid"] for one in sequences],
            "rollout_mask_sums": torch.ones(len(sequences)),  # of the default dtype, float64
            "micro_batch_indices": [list(range(len(sequences)))[first::m] for first in range(m)],
            "num_microbatches": [m],
            "global_batch_sizes": [self.num_rollouts],
        }
        aggregation = framework_step.CASES.get(case) or live_step.OTHERS[case]
        args = SimpleNamespace(
            loss_aggregation=case,
            loss_aggregation_divisor=aggregation.divisor,
            loss_aggregation_exponent=aggregation.exponent,
        )
        slime.carry_weights(args, 0, data)
        numbers = [one["number"] for one in sequences]
        self.d_s = dict(zip(numbers, data["rollout_mask_sums"].clamp(min=1), strict=True))

    def loss(self, case, sequences, log_probs, num_microbatches):
        x, weighted = [], []
        for one, log_prob in zip(sequences, log_probs, strict=True):
            total, n = len(one["tokens"]), one["response"]
            padded = total + -total % (2 * CP)
            held = zigzag([0, padded], CP, parallel_state.get_context_parallel_rank())
            own = [place - (total - n - 1) for place in held if total - n - 1 <= place < total - 1]
            x.append(framework_step.policy_loss(log_prob, one)[own])
            if case != "reducer":
                mask = torch.tensor(one["mask"])[own]
                weighted.append((x[-1] * mask).sum() / self.d_s[one["number"]])
        if case == "reducer":
            reducer = slime.constant_40(
                [len(one["tokens"]) for one in sequences],
                [one["response"] for one in sequences],
                [torch.tensor(one["mask"], dtype=torch.int32) for one in sequences],
                False,
            )
            loss = reducer(torch.cat(x))
        else:
            loss = torch.stack(weighted).sum()
        return loss * num_microbatches / self.num_rollouts * DP * CP

    def returned(self, loss):
        loss, report = super().returned(loss)
        return loss, torch.tensor(1, dtype=torch.int), report

    def sample_of(self, case):
        return "number" if case == "reducer" else "rollout"

    def refuse(self):
        """Every rank refuses a mask that one rank has, in the first or last step."""
        rank = parallel_state.get_data_parallel_rank()
        for wrong in (0, 1):
            masks = torch.ones(4, 3, dtype=torch.int32)  # two steps of two sequences
            if rank == 1:
                masks[2 * wrong] = 2
            data = {
                "loss_masks": list(masks),
                "rollout_ids": [10 * rank + sequence for sequence in range(4)],
                "rollout_mask_sums": torch.ones(4),
                "micro_batch_indices": [[0, 1], [2, 3]],
                "num_microbatches": [1, 1],
                "global_batch_sizes": [4, 4],
            }
            args = SimpleNamespace(
                loss_aggregation="sample_mean", loss_aggregation_count_empty=False
            )
            with pytest.raises(PlanError, match=r"rank 1 of .*loss_masks"):
                slime.carry_weights(args, 0, data)
            print(f"step {wrong}: refused together", flush=True)
