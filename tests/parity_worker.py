"""Stock Megatron's own loss beside this package, DP 2 x CP 2; run under torch.distributed.run."""

import gradient_worker
import tiny_gpt
import torch
import torch.distributed as dist
from step_data import deal, make_rows

import megatron_lossagg.cpu as cpu
from megatron_lossagg import MegatronContract


def stock_step(chunk, m):
    """A step with Megatron-LM's loss_func: masked sum, token count, report."""
    from megatron.core import parallel_state

    rank, dp = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    cp_rank = parallel_state.get_context_parallel_rank()
    # Stock counts the training mask; the plan counts the counting mask: take them equal.
    rows = [{**row, "counted": row["trained"]} for row in make_rows()]
    keys = deal(rows, dp, [m] * dp)
    batches = [
        tiny_gpt.microbatch(
            rows, [i for i, key in enumerate(keys) if key == (rank, number)], 2, cp_rank
        )
        for number in range(m)
    ]

    def forward_step(iterator, model):
        batch = next(iterator)
        logits = model(batch["tokens"], batch["positions"], None, packed_seq_params=batch["packed"])

        def loss_func(logits):
            picked = batch["labels"].reshape(-1, 1)
            nll = -torch.log_softmax(logits[0], dim=-1).gather(1, picked).squeeze(1)
            keep = ~batch["masked_here"]
            keep[-2:] = False  # the filler: stock has no row to say it by but the mask
            x = nll * batch["coefficient"]
            total = torch.where(keep, x, 0).sum()
            report = {"loss": torch.stack([total.detach().clone(), keep.sum()])}
            return total, keep.sum().to(torch.int), report

        return logits, loss_func

    forward_data = tiny_gpt.run_schedule(forward_step, chunk, batches)
    return tiny_gpt.reported(forward_data, "loss"), chunk.buffers[0].grad_data.clone()


def main():
    tiny_gpt.start(cp=2)
    gradient_worker.make_rows = lambda: [{**row, "counted": row["trained"]} for row in make_rows()]
    for per_token in (False, True):
        config = tiny_gpt.config_of(per_token=per_token)
        chunk = tiny_gpt.wrapped(config)
        before_config = dict(vars(config))
        loss, before = stock_step(chunk, 3)
        contract = MegatronContract.read([chunk])
        assert dict(vars(config)) == before_config
        again, after = stock_step(chunk, 3)
        assert torch.equal(before, after)
        assert loss == again
        if per_token:
            ours = gradient_worker.train_step("token_mean", chunk, contract, [3, 3])
            assert abs(ours["loss"] - loss) < 1e-12 * abs(loss)
            error = (chunk.buffers[0].grad_data - before).norm() / before.norm()
            assert error < 1e-12, error
            assert len(list(cpu.named_shards([chunk]))) > 10
            if dist.get_rank() in (0, 3):
                print("PARITY bit for bit, token_mean within 1e-12", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
