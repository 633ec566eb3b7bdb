"""Trajectories of several sequences in verl's own engine: ``verl_sessions_worker.py REFERENCE``.

DP 2 x CP 2. The step comes from verl's own agent loop worker (``verl_agent_loop.py``); the engine
is that of ``verl_engine_worker.py``. Sequences of a trajectory are on both data-parallel ranks. A
sample is a trajectory; without the column ``session_id`` it is a sequence.
"""

import sys
from functools import partial

import verl_engine_worker as worker  # before verl: it has the stand-ins

worker.stand_ins.install(worker.stand_ins.AGENT_LOOP)

import framework_step  # noqa: E402
import tiny_gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import verl_agent_loop  # noqa: E402
from device_double import DeviceDouble  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from megatron_lossagg import Aggregation  # noqa: E402

TERMS = ("pg", "kl", "entropy")
CASES = {
    "lossagg_sample_mean": Aggregation("sample_mean"),
    "lossagg_sample_mean_no_count_empty": Aggregation("sample_mean", count_empty=False),
    "lossagg_constant": Aggregation("constant", divisor=framework_step.L),
    "lossagg_sample_sum": Aggregation("sample_sum"),
    "lossagg_token_mean": Aggregation("token_mean"),
    "lossagg_prompt_mean": Aggregation("prompt_mean"),
}
IN_BOTH = ("lossagg_token_mean", "lossagg_prompt_mean")
"""The modes that do not count samples."""


def batch_of(rows, num_microbatches, *, with_sessions=True):
    """Deal the rows to data-parallel ranks; returns this rank's batch."""
    from verl.utils import tensordict_utils as tu

    own = rows[
        parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()
    ]
    batch = verl_agent_loop.batch_of(own)
    assert {"uid", "session_id"} <= set(batch.keys())
    if not with_sessions:
        del batch["session_id"]
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(own) // num_microbatches,
        global_batch_size=len(rows),
        calculate_entropy=True,
    )
    return batch


def main(path):
    tiny_gpt.start(cp=2)
    saved = torch.load(path)
    import verl.workers.utils.losses as losses

    engine, chunk = worker.build(per_token=False)
    sent = [verl_agent_loop.rows_of(framework_step.samples(), multiple=8)]
    dist.broadcast_object_list(sent)  # one uid of the padding
    rows = sent[0]
    wanted = {
        (name, by): framework_step.expected(saved, dict.fromkeys(TERMS, aggregation), by=by)[1]
        for name, aggregation in CASES.items()
        for by in ("rollout", "number")
    }
    for name in CASES:
        config = worker.actor_config(name)
        for with_sessions in (True, False):
            batch = batch_of(rows, 2, with_sessions=with_sessions)
            chunk.zero_grad_buffer()
            with DeviceDouble():
                engine.forward_backward_batch(batch, partial(losses.ppo_loss, config=config))
            by = ("rollout", "number") if with_sessions else ("number", "rollout")
            worst = framework_step.worst_error(chunk, wanted[name, by[0]])
            other = framework_step.worst_error(chunk, wanted[name, by[1]])
            assert worst < 1e-12, (name, with_sessions, worst)
            assert (other < 1e-12) == (name in IN_BOTH), (name, other)
            if dist.get_rank() == 0:
                is_a = "trajectory" if with_sessions else "sequence"
                print(f"{name}, a sample is a {is_a}: the reference, {worst:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
