"""Stock Megatron's own loss and loss scale and this package's, DP 2 x CP 2; a launched worker."""

import megatron_lossagg.cpu as cpu

cpu.install()

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron_lossagg import Aggregation  # noqa: E402
from megatron_lossagg.verify import model as megatron  # noqa: E402
from megatron_lossagg.verify.cases import Case  # noqa: E402
from megatron_lossagg.verify.parallelism import Parallelism  # noqa: E402
from megatron_lossagg.verify.reference_gradient import Reference  # noqa: E402
from megatron_lossagg.verify.run import Run  # noqa: E402
from megatron_lossagg.verify.sequences import make_sequences  # noqa: E402

LAYOUT = Parallelism(dp=2, cp=2, microbatches=3)


def stock_step(run):
    """Run a step with Megatron-LM's loss_func: masked sum, token count, report."""

    def forward_step(iterator, chunk):
        batch = next(iterator)
        output = megatron.forward(chunk, batch, LAYOUT)

        def loss_func(output):
            nll = megatron.token_losses(output, batch, LAYOUT)
            keep = batch.mask_here == 1
            keep[-2:] = False  # the padding sequence: stock recognizes it by its mask alone
            x = nll * batch.coefficient
            total = torch.where(keep, x, 0).sum()
            report = {"loss": torch.stack([total.detach().clone(), keep.sum()])}
            return total, keep.sum().to(torch.int), report

        return output, loss_func

    data = megatron.run_schedule(forward_step, run.chunks, run.batches)
    return megatron.reported(data, "loss"), run.chunks[0].buffers[0].grad_data.clone()


def reported(measured):
    """Return the loss of a step, which every rank must report alike."""
    (loss,) = {values["loss"] for values in measured.values}
    return loss


def check_a_loss_scale(run):
    """Megatron's grad_scale_func runs on top of what mb.outputs returns."""
    case = Case(aggregation=Aggregation("prompt_mean"))
    buffer = run.chunks[0].buffers[0].grad_data
    plain = reported(run.train(case))
    unscaled = buffer.clone()
    run.chunks[0].config.grad_scale_func = lambda loss: loss * 1024
    assert reported(run.train(case)) == plain
    assert unscaled.norm() > 0
    assert torch.equal(buffer, unscaled * 1024)
    run.chunks[0].config.grad_scale_func = None
    if dist.get_rank() == 0:
        print(f"SCALED by 1024 exactly, {run.aggregator.loss_scaling}", flush=True)


def main():
    dist.init_process_group("gloo")
    # Stock counts the training mask; the plan counts the counting mask: take them equal.
    sequences = [replace(sequence, counted=sequence.trained) for sequence in make_sequences()]
    nothing = Reference(
        padded=4,
        losses_Y=torch.zeros(0),
        gradients_YP=torch.zeros(0, 0),
        parameters={},
        sequences=sequences,
    )
    with megatron.split_world(LAYOUT):
        for per_token in (False, True):
            run = Run(LAYOUT, nothing, per_token=per_token)
            config = run.chunks[0].config
            before_config = dict(vars(config))
            loss, before = stock_step(run)
            again, after = stock_step(run)
            assert torch.equal(before, after)
            assert loss == again
            assert dict(vars(config)) == before_config
            if per_token:
                ours = reported(run.train(Case(aggregation=Aggregation("token_mean"))))
                assert abs(ours - loss) < 1e-12 * abs(loss)
                error = (run.chunks[0].buffers[0].grad_data - before).norm() / before.norm()
                assert error < 1e-12, error
                assert len(list(cpu.named_shards(run.chunks))) > 10
                if dist.get_rank() in (0, 3):
                    print("PARITY bit for bit, token_mean within 1e-12", flush=True)
            assert "(DP 2, CP 2)" in run.aggregator.describe()
            check_a_loss_scale(run)
        del run
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
