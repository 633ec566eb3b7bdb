"""verl's own MegatronEngine with dynamic context parallelism on CPU, on four ranks.

``verl_dynamic_worker.py FILE CP PP``. Real beside what ``verl_engine_worker.py`` runs: verl's
scheduler, and what collects its outputs, Megatron-Core's scheduler under it, and its groups of
ranks. Those are of Megatron-LM's development branch, no release has them.
"""

import sys
from functools import partial

import verl_engine_worker as worker

worker.tiny_gpt.torch.cuda.is_current_stream_capturing = lambda: False

import framework_step  # noqa: E402
import pytest  # noqa: E402
import tiny_gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from device_double import DeviceDouble  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from ranks import leave  # noqa: E402

from megatron_lossagg.errors import PlanError  # noqa: E402

LONGEST = {1: (8, 16), 2: (10,)}
"""Tokens of a microbatch on each rank, by which the scheduler chooses the groups and M, by PP."""


def start(cp, pp):
    """Make Megatron's groups; the barrier over each names a CUDA device, which gloo refuses."""
    barrier = dist.barrier
    dist.barrier = lambda group=None, device_ids=None: barrier(group)
    tiny_gpt.start(cp=cp, pp=pp, dynamic_context_parallel=True)
    dist.barrier = barrier


def build(longest):
    """Return the engine, in the loss scaling that verl sets with dynamic context parallelism."""
    engine, chunk = worker.build(per_token=True)
    vars(engine.engine_config).update(
        dynamic_context_parallel=True,
        max_seqlen_per_dp_cp_rank=longest,
        virtual_pipeline_model_parallel_size=None,
    )
    engine.model_config.model_type = "language_model"
    return engine, chunk


def schedule_by(change):
    """Let a function see, and replace, the microbatches that verl's scheduler gives this rank."""
    from verl.utils.dynamic_cp_scheduler import DynamicCPScheduler
    from verl.workers.engine.megatron import transformer_impl

    class Changed(DynamicCPScheduler):
        def schedule(self, *args, **kwargs):
            return change(super().schedule(*args, **kwargs))

    transformer_impl.DynamicCPScheduler = Changed


def sizes_of(microbatches):
    """Return how many ranks the groups of each microbatch have, over all ranks."""
    own = torch.tensor([microbatch["local_cp_size"] for microbatch in microbatches])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sizes = [torch.zeros_like(own) for _ in range(group.size())]
    dist.all_gather(sizes, own, group=group)
    return [sorted(set(of_one)) for of_one in torch.stack(sizes).T.tolist()]


def batch():
    """Return the whole step with its padding sequences: the trainer sends one to every rank."""
    made, _ = worker.batch_of(framework_step.samples(), num_microbatches=1, with_uid=True, odd=0)
    sent = [made]
    dist.broadcast_object_list(sent)
    return sent[0]


def loss_of(name):
    import verl.workers.utils.losses as losses

    return partial(losses.ppo_loss, config=worker.actor_config(name))


def compare(engine, chunk, saved):
    """Train the step in every case; returns the sizes of its groups."""
    scheduled = []

    def note(microbatches):
        scheduled[:] = microbatches
        return microbatches

    schedule_by(note)
    names = {"vanilla": "token_mean"}  # a mode of verl's own, which is untouched
    for case, aggregation in framework_step.CASES.items():
        if case != "length_power":  # verl has no name for its exponent
            end = "" if aggregation.count_empty else "_no_count_empty"
            names[f"lossagg_{aggregation.mode}{end}"] = case
    for name, case in names.items():
        chunk.zero_grad_buffer()
        with DeviceDouble():
            output = engine.forward_backward_batch(batch(), loss_of(name))
        worst = framework_step.worst_error(chunk, saved[case, "pg kl entropy"][1])
        assert worst < 1e-12, (case, worst)
        sizes = sizes_of(scheduled)
        if parallel_state.is_pipeline_last_stage():
            reported = sum(map(float, output["metrics"]["actor/pg_loss"].values))
            wanted = saved[case, "pg"][0]
            assert abs(reported - wanted) < 1e-9 * abs(wanted), (reported, wanted)
        if dist.get_rank() == 0:
            print(f"{name}, groups of {sizes} ranks: the reference, {worst:.1e}", flush=True)
    return sizes


def check_refusals(engine):
    """See a batch refused that one rank has otherwise, and sequences that are trained twice."""
    other = batch()
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 1:
        mask = other["loss_mask"].values()
        mask.copy_(mask.flip(0))
    with pytest.raises(PlanError, match="-parallel ranks and a different one on rank 1, expected"):
        engine.forward_backward_batch(other, loss_of("lossagg_sample_mean"))
    schedule_by(lambda microbatches: [microbatches[0], *microbatches])
    with DeviceDouble():
        if not parallel_state.is_pipeline_last_stage():
            engine.forward_backward_batch(batch(), loss_of("lossagg_sample_mean"))
        else:  # by verl, which collects outputs there
            with pytest.raises(RuntimeError, match="must contain each sample once"):
                engine.forward_backward_batch(batch(), loss_of("lossagg_sample_mean"))


def main(path, cp, pp):
    start(cp, pp)
    saved = framework_step.expected_cases(path)
    for longest in LONGEST[pp]:
        engine, chunk = build(longest)
        sizes = compare(engine, chunk, saved)
        assert {1, 2} <= {size for of_one in sizes for size in of_one}
    check_refusals(engine)
    if dist.get_rank() == 0:
        print("other batches and repeated sequences are refused")
    leave()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
