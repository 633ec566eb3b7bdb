"""Record what slime's own code makes of the rollouts of ``megatron_framework.py``: numbers only.

``FRAMEWORKS_DIR=... python tests/integrations/record_slime.py`` from the root of the checkout, with
``tests`` on the path; writes ``tests/integrations/recorded/slime.json``.
"""

import megatron_framework
import recording
import slime_worker
import tiny_gpt
import torch

COMMIT = "624b824a898ab0ec1fcb4d373004c7f3852bf515"


def main():
    with recording.one_process() as monkey:
        slime_worker.load()
        tiny_gpt.start(dtype=torch.float32)
        megatron_framework.object_store_in_process(monkey)
        from megatron.core import mpu
        from slime.backends.megatron_utils import cp_utils
        from slime.backends.megatron_utils.loss import loss_function

        args = slime_worker.arguments(max_tokens_per_gpu=1)
        data = slime_worker.rollout_data(args)

        def at(size, rank):
            monkey.setattr(mpu, "get_context_parallel_world_size", lambda: size)
            monkey.setattr(mpu, "get_context_parallel_rank", lambda: rank)

        def held(x, total, n):
            return cp_utils.slice_log_prob_with_cp(x, total, n)

        def reducer(total, n, mask, denominator):
            return cp_utils.get_sum_of_sample_mean(total, n, mask, denominator)

        recorded = recording.of_sequences(data, at, held, reducer)
        at(1, 0)
        args.loss_type, args.custom_loss_function_path = "custom_loss", "recording.loss_of_one"
        batch = {key: data[key][:1] for key in ("total_lengths", "response_lengths", "loss_masks")}
        batch["rollout_mask_sums"] = data["rollout_mask_sums"][:1]
        loss, num_tokens, _ = loss_function(args, batch, 6, 4, torch.zeros(1, 1, 4))
        recorded |= {"factor": {"M": 6, "G": 4, "DP CP": 1, "loss": loss.item()}}
        recorded["num_tokens"] = int(num_tokens)
        keys = ("micro_batch_indices", "num_microbatches", "global_batch_sizes")
        recorded |= {key: data[key] for key in keys}
        recorded["dtype of rollout_mask_sums"] = str(data["rollout_mask_sums"].dtype)
        recording.save("slime", COMMIT, recorded)


if __name__ == "__main__":
    main()
