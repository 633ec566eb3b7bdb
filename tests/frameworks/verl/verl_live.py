"""verl's own part of a step on live Megatron-Core."""

import sys
import types
from types import SimpleNamespace

import framework_step
import live_step
import pytest
import torch
import torch.distributed as dist
from live_step import padded

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import PlanError


class Live(live_step.Live):
    """verl 1dda039b: ppo_loss's call of a registered policy loss, then * M, two outputs."""

    def __init__(self, steps, dp_size):
        core = types.ModuleType("verl.trainer.ppo.core_algos")
        core.POLICY_LOSS_REGISTRY = {"vanilla": self.vanilla}
        core.register_policy_loss = lambda name: (
            lambda loss: core.POLICY_LOSS_REGISTRY.setdefault(name, loss)
        )
        core.agg_loss = lambda *_, **__: torch.full((), torch.nan)
        self.core = core
        for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[core.__name__] = core
        from megatron_lossagg.integrations import verl

        assert "lossagg_constant" in verl.plugin
        super().__init__(steps, dp_size)
        self.verl = verl

    def vanilla(
        self, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **_
    ):
        sequence = {"old": old_log_prob, "advantage": advantages}
        losses = framework_step.policy_loss(log_prob, sequence)
        info = config.global_batch_info
        return self.core.agg_loss(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **info
        ), {}

    def prepare(self, case):
        """Plan the whole step here, whose ranks' sequences the engine would gather."""
        mode = self.verl.LossMode.named(f"lossagg_{framework_step.CASES[case].mode}")
        lengths = [sum(sequence["mask"]) for rank in self.steps for sequence in rank]
        plan = plan_step(mode.aggregation(framework_step.L), Sequences(active_tokens=lengths))
        places = {id(s): n for n, s in enumerate(s for rank in self.steps for s in rank)}
        self.planned = {**getattr(self, "planned", {}), case: (mode, plan, places)}
        return self.steps

    def loss(self, case, sequences, log_probs, num_microbatches):
        mode, plan, places = self.planned[case]
        positions = torch.tensor([places[id(sequence)] for sequence in sequences])

        def ppo_loss(data):
            return self.core.POLICY_LOSS_REGISTRY[mode.name](
                old_log_prob=padded([sequence["old"] for sequence in sequences]),
                log_prob=padded(log_probs),
                advantages=padded([sequence["advantage"] for sequence in sequences]),
                response_mask=padded([sequence["mask"] for sequence in sequences]).bool(),
                loss_agg_mode="token-mean",
                config=SimpleNamespace(global_batch_info={}),
            )

        data = {self.verl.SEQUENCE: positions}
        loss, _ = self.verl.with_plan(ppo_loss, plan, self.dp_size, data=data)
        return loss * num_microbatches

    def refuse(self):
        refuse_other_batches(self.verl)


def refuse_other_batches(verl):
    """See all ranks refuse a batch that one of them has otherwise; the same one passes."""
    for mask, uid, differs in (
        ([1, 0, 1], "b", False),
        ([1, 1, 0], "b", True),
        ([1, 0, 1], "c", True),
    ):
        is_other = dist.get_rank() == 2
        masks = [torch.tensor([1, 1]), torch.tensor(mask if is_other else [1, 0, 1])]
        data = {
            "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
            "uid": ["a", uid if is_other else "b"],
        }
        if not differs:
            verl.check_same_batch(Aggregation("token_mean"), data)
            continue
        with pytest.raises(PlanError, match=r"on rank 0 of the 4 .* different one on rank 2"):
            verl.check_same_batch(Aggregation("token_mean"), data)
        if dist.get_rank() == 0:
            print("refused together", flush=True)
