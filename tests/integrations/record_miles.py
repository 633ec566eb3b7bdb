"""Record what miles' own code makes of the rollouts of ``megatron_framework.py``: numbers only.

``FRAMEWORKS_DIR=... python tests/integrations/record_miles.py`` from the root of the checkout, with
``tests`` on the path; writes ``tests/integrations/recorded/miles.json``.
"""

import dataclasses

import megatron_framework
import miles_worker
import recording
import torch

COMMIT = "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"


def main():
    with recording.one_process() as monkey:
        miles_worker.load()
        miles_worker.start(1, torch.float32)
        megatron_framework.object_store_in_process(monkey)
        from miles.backends.training_utils import cp_utils
        from miles.backends.training_utils.loss import loss_function
        from miles.backends.training_utils.parallel import get_parallel_state
        from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
        from miles.utils.dp_schedule import build_dp_schedule

        args = miles_worker.arguments(max_tokens_per_gpu=1)
        samples = list(miles_worker.samples())
        data = convert_samples_to_train_data(args, samples, {}, None, None)
        data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
        masks = data["loss_masks"]
        data["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in masks]
        data["partition"] = list(range(len(masks)))
        state = get_parallel_state()

        def at(size, rank):
            state.cp = dataclasses.replace(state.cp, size=size, rank=rank, group=None)

        def held(x, total, n):
            return cp_utils.slice_log_prob_with_cp(x, total, n)

        def reducer(total, n, mask, denominator):
            return cp_utils.get_sum_of_sample_mean(total, n, mask, denominators=denominator)

        recorded = recording.of_sequences(data, at, held, reducer)
        at(1, 0)
        args.loss_type, args.custom_loss_function_path = "custom_loss", "recording.loss_of_one"
        batch = {key: data[key][:1] for key in ("total_lengths", "response_lengths", "loss_masks")}
        batch["rollout_mask_sums"] = torch.ones(1)
        given = {"apply_megatron_loss_scaling": True, "num_rollouts": 4}
        loss, num_tokens, _ = loss_function(args, batch, 6, torch.zeros(1, 1, 4), **given)
        recorded |= {"factor": {"M": 6, "G": 4, "DP CP": 1, "loss": loss.item()}}
        recorded["num_tokens"] = int(num_tokens)
        config = {"dp_size": 1, "cp_size": 1, "vpp_size": 1}
        config["microbatch_group_size_per_vp_stage"] = None
        (sequences,), (microbatches,), num_microbatches, rollouts = build_dp_schedule(
            args,
            config,
            data["total_lengths"],
            global_batch_size=args.global_batch_size,
            rollout_indices=data["rollout_ids"],
        )
        own = iter(microbatches)
        steps = [
            [sequences[sequence] for _ in range(m) for sequence in next(own)]
            for m in num_microbatches
        ]
        recorded |= {"steps": steps, "num_rollouts": rollouts}
        recording.save("miles", COMMIT, recorded)


if __name__ == "__main__":
    main()
