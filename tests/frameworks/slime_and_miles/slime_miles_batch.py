"""The drawn step as a rollout batch of slime or miles, for their hooks without the frameworks."""

import types
from argparse import Namespace
from dataclasses import dataclass

import pytest
import torch

from megatron_lossagg import Aggregation
from megatron_lossagg.integrations import miles, slime
from megatron_lossagg.integrations._rollouts import REDUCER
from megatron_lossagg.verify.drivers.driver import aggregations, draw
from megatron_lossagg.verify.drivers.slime_and_miles import args_with_weights

MODULES = {"slime": slime, "miles": miles}
CASES = aggregations()
SAMPLES = [Namespace(group_index=one.prompt) for one in draw()]
"""What the hook of miles reads of its samples."""


@dataclass
class Carrying:
    """A framework's rollout batch of the drawn step, in two steps of four rollouts."""

    module: types.ModuleType
    data: dict

    @property
    def prefix(self):
        return f"{self.module.HOOKS.module}."

    def arguments(self, aggregation="token_mean", **given):
        """Return arguments that carry an aggregation's weights, as far as the hooks read them."""
        if isinstance(aggregation, str):
            aggregation = CASES.get(aggregation) or Aggregation(aggregation)
        return Namespace(**{**STOCK, **args_with_weights(self.module.HOOKS, aggregation), **given})

    def carry(self, args, samples=SAMPLES):
        """Carry the weights; returns the denominators of the sequences."""
        if self.module is miles:
            assert miles.with_weights(args, samples, self.data) is self.data
            return self.data["rollout_mask_sums"]
        slime.carry_weights(args, 0, self.data)
        return self.data["rollout_mask_sums"].tolist()


NO_MODE = {"loss_aggregation": None, "loss_aggregation_count_empty": None}
STOCK = {
    "calculate_per_token_loss": False,
    "custom_megatron_init_path": None,
    "custom_reward_post_process_path": None,
    REDUCER: None,
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "global_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "use_dynamic_batch_size": True,
}


def make_data(name):
    """Return the drawn step as a framework has it when its hook is called."""
    drawn, lists = draw(), {}
    active = [0] * 8
    for one in drawn:
        active[one.sample] += sum(one.mask)
    lists["loss_masks"] = [list(one.mask) for one in drawn]
    lists["rollout_ids"] = [one.sample for one in drawn]
    lists["rollout_mask_sums"] = [float(active[one.sample]) for one in drawn]
    if name == "miles":
        return lists
    return {
        "loss_masks": [torch.tensor(mask, dtype=torch.int32) for mask in lists["loss_masks"]],
        "rollout_ids": lists["rollout_ids"],
        "rollout_mask_sums": torch.tensor(lists["rollout_mask_sums"]),
        "micro_batch_indices": [[0, 1, 3], [2], [4, 5], [6, 7, 8, 9], [10, 11]],
        "num_microbatches": [3, 2],
        "global_batch_sizes": [4, 4],
    }


def batch_of(name, monkeypatch):
    """Return a framework's rollout batch; this process is its data-parallel group."""
    monkeypatch.setattr(slime, "_data_parallel_group", lambda: None)
    monkeypatch.setattr(miles, "_DIVIDING", ())  # its modules, which are not here
    return Carrying(MODULES[name], make_data(name))


of_slime = pytest.mark.parametrize("framework", ["slime"], indirect=True)
of_miles = pytest.mark.parametrize("framework", ["miles"], indirect=True)
