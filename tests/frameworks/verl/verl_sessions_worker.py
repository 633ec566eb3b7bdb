"""Trajectories of several sequences in verl's own engine.

``verl_sessions_worker.py REFERENCE PER_TOKEN``.

DP 2 x CP 2. The step comes from verl's own agent loop worker (``verl_agent_loop.py``); the engine
is that of ``verl_engine_worker.py``. Sequences of a trajectory are on both data-parallel ranks. A
sample is a trajectory; without the column ``session_id`` it is a sequence. Each is trained with the
column ``loss_weight`` too, as verl-project/verl#7580 writes it. All tokens of a rollout have
advantages of one sign.
"""

import sys
from functools import partial

import verl_engine_worker as worker  # before verl: it has the stand-ins

worker.stand_ins.install(worker.stand_ins.AGENT_LOOP)

import framework_step  # noqa: E402
import pytest  # noqa: E402
import tiny_gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import verl_agent_loop  # noqa: E402
from device_double import DeviceDouble  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from ranks import leave  # noqa: E402

from megatron_lossagg import Aggregation  # noqa: E402
from megatron_lossagg.errors import PlanError  # noqa: E402

TERMS = ("pg", "kl", "entropy")
CASES = {
    "lossagg_sample_mean": Aggregation("sample_mean"),
    "lossagg_sample_mean_no_count_empty": Aggregation("sample_mean", count_empty=False),
    "lossagg_constant": Aggregation("constant", divisor=framework_step.L),
    "lossagg_sample_sum": Aggregation("sample_sum"),
    "lossagg_token_mean": Aggregation("token_mean"),
    "lossagg_prompt_mean": Aggregation("prompt_mean"),
    "lossagg_row_mean": Aggregation("row_mean"),
    "lossagg_row_mean_no_count_empty": Aggregation("row_mean", count_empty=False),
    "lossagg_balanced": Aggregation("balanced"),
    "lossagg_balanced_no_count_empty": Aggregation("balanced", count_empty=False),
}
IN_BOTH = ("lossagg_token_mean", "lossagg_prompt_mean")
"""The modes that do not count samples."""


def batch_of(rows, num_microbatches, *, with_sessions=True, weighted=False):
    """Deal the rows to data-parallel ranks; returns this rank's batch."""
    from verl.utils import tensordict_utils as tu

    own = rows[
        parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()
    ]
    batch = verl_agent_loop.batch_of(own)
    assert {"uid", "session_id"} <= set(batch.keys())
    if not with_sessions:
        del batch["session_id"]
    if weighted:  # of padding 0
        batch["loss_weight"] = torch.tensor([one["loss_weight"] if one else 0.0 for _, one in own])
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(own) // num_microbatches,
        global_batch_size=len(rows),
        calculate_entropy=True,
    )
    return batch


def loss_of(name):
    """Return verl's loss function, which is not to weigh a sequence a second time."""
    import verl.workers.utils.losses as losses

    def ppo_loss(config, model_output, data, dp_group=None):
        assert "advantages" in data.keys()  # noqa: SIM118
        assert "loss_weight" not in data.keys()  # noqa: SIM118
        return losses.ppo_loss(config, model_output, data, dp_group)

    return partial(ppo_loss, config=worker.actor_config(name))


def worst_of(engine, chunk, name, batch, grads):
    """Train a batch; returns the largest error against each of some gradients."""
    chunk.zero_grad_buffer()
    with DeviceDouble():
        engine.forward_backward_batch(batch, loss_of(name))
    return [framework_step.worst_error(chunk, one) for one in grads]


def check_refusal(engine, rows):
    """See a sequence refused, by all ranks, that has advantages of two signs on one of them."""
    batch = batch_of(rows, 2)
    if parallel_state.get_data_parallel_rank() == 1:
        batch["advantages"].values()[::2] *= -1
    with pytest.raises(PlanError, match="expected one sign for all of a sequence's active tokens"):
        engine.forward_backward_batch(batch, loss_of("lossagg_balanced"))
    if dist.get_rank() == 0:
        print("a sequence with advantages of two signs is refused")


def main(path, per_token):
    tiny_gpt.start(cp=2)
    saved = torch.load(path)
    framework_step.SIGNS = framework_step.SIGNED
    engine, chunk = worker.build(per_token=per_token)
    sent = [verl_agent_loop.rows_of(framework_step.samples(), multiple=8)]
    dist.broadcast_object_list(sent)  # one uid of the padding
    rows = sent[0]
    for name, aggregation in CASES.items():
        by_id, weighted = (
            {
                by: framework_step.expected(
                    saved, dict.fromkeys(TERMS, aggregation), by=by, weighted=is_weighted
                )[1]
                for by in ("rollout", "number")
            }
            for is_weighted in (False, True)
        )
        for with_sessions in (True, False):
            by = ("rollout", "number") if with_sessions else ("number", "rollout")
            batch = batch_of(rows, 2, with_sessions=with_sessions)
            worst, other = worst_of(engine, chunk, name, batch, [by_id[one] for one in by])
            assert worst < 1e-12, (name, with_sessions, worst)
            assert (other < 1e-12) == (name in IN_BOTH), (name, other)
            if dist.get_rank() == 0:
                is_a = "trajectory" if with_sessions else "sequence"
                print(f"{name}, a sample is a {is_a}: the reference, {worst:.1e}", flush=True)
        batch = batch_of(rows, 2, weighted=True)
        grads = [weighted["rollout"], by_id["rollout"]]
        worst, other = worst_of(engine, chunk, name, batch, grads)
        assert worst < 1e-12 < other, (name, worst, other)
        if dist.get_rank() == 0:
            print(f"{name} times its loss_weight: the reference, {worst:.1e}", flush=True)
    check_refusal(engine, rows)
    leave()


if __name__ == "__main__":
    main(sys.argv[1], per_token=sys.argv[2] == "1")
