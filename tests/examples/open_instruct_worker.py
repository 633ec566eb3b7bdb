"""examples/open_instruct.py next to open-instruct's own code; a launched worker.

``open_instruct_worker.py CHECKOUT CHECK ...``. Functions are cut out of the checkout's files, whose
modules import Ray, vLLM and DeepSpeed. DDP stands for DeepSpeed, which averages over ranks as DDP
does; ``grpo_fast.py`` sets DeepSpeed's own accumulation to 1, so microbatches add up.
"""

import __future__

import ast
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ranks import run_worker
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import open_instruct as example

CHECKOUT = Path(sys.argv[1], "open_instruct")
M = 3


def cut_out(file, wanted, **names):
    """Run one piece of a file of the checkout; returns a function that runs it among names."""
    (node,) = (node for node in ast.walk(ast.parse((CHECKOUT / file).read_text())) if wanted(node))
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module([node], []), file, "exec", flags=flags, dont_inherit=True)

    def run(**more):
        namespace = {"torch": torch, "dist": dist, **names, **more}
        exec(code, namespace)
        return namespace

    return run


def function(file, name, **names):
    return cut_out(file, lambda node: getattr(node, "name", "") == name, **names)()[name]


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def grpo_fast(loss_denominator):
    """Return the gradient of grpo_fast.py's step, by its own functions."""
    count = function("grpo_utils.py", "calculate_token_counts")
    masked_mean = function("rl_utils.py", "masked_mean")
    compute_grpo_loss = function(
        "grpo_utils.py", "compute_grpo_loss", GRPOLossType=SimpleNamespace(dapo="dapo")
    )
    config = SimpleNamespace(loss_fn="dapo", clip_lower=example.CLIP, clip_higher=example.CLIP)
    batches = example.of_this_rank(M)
    data = SimpleNamespace(response_masks=[pad(batch.mask, (1, 0)) for batch in batches])
    denominators = count(M, data, torch.device("cpu"))
    model = DistributedDataParallel(example.Model())
    for number, batch in enumerate(batches):
        with nullcontext() if number == M - 1 else model.no_sync():
            logprobs = model(batch.token, batch.label)
            per_token, _, _ = compute_grpo_loss(
                new_logprobs=logprobs,
                ratio=(logprobs - batch.old_logprob).exp(),
                advantages=batch.advantage,
                ref_logprobs=None,
                config=config,
                rho_weights=torch.ones_like(logprobs),
            )
            denominator = denominators[0] if loss_denominator == "token" else loss_denominator
            loss = masked_mean(per_token, batch.mask, None, denominator)
            loss *= dist.get_world_size()
            loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def check_loss_denominator_token_is_the_token_mean():
    name = 'GRPO, loss_denominator "token"'
    same(grpo_fast("token"), example.gradients_of(name, M))


def check_a_loss_denominator_that_is_a_number_is_the_token_sum():
    name = f"GRPO, loss_denominator {example.NUMBER}"
    same(grpo_fast(float(example.NUMBER)), example.gradients_of(name, M))


def finetune(loss_of=None):
    """Return the gradient of finetune.py's own microbatch loop, under Accelerate.

    ``loss_of``: what the model's loss is instead; None: the mean over labels, as Transformers.
    """
    from accelerate import Accelerator

    def wanted(node):
        return isinstance(node, ast.With) and "accelerator.accumulate" in ast.unparse(node.items[0])

    class Finetuned(example.Model):
        def forward(self, number, batch, use_cache):
            logprobs = super().forward(batch.token, batch.label)
            mean = -(logprobs * batch.mask).sum() / batch.mask.sum()
            return SimpleNamespace(loss=mean if loss_of is None else loss_of(number, -logprobs))

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=M)
    model = DistributedDataParallel(Finetuned())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    names = {
        "accelerator": accelerator,
        "args": SimpleNamespace(
            load_balancing_loss=False, sequence_parallel_size=1, clip_grad_norm=-1
        ),
        "model": model,
        "optimizer": accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0)),
        "lr_scheduler": SimpleNamespace(step=lambda: None),
        "total_loss": 0,
    }
    run = cut_out("finetune.py", wanted, **names)
    for number, batch in enumerate(example.of_this_rank(M)):
        run(batch={"number": number, "batch": batch})
    after = [parameter.detach() for parameter in model.parameters()]
    return [one - other for one, other in zip(before, after, strict=True)]


def close(found, wanted):
    """Gradients that went through a weight: a difference of numbers near 1."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def check_finetune_averages_microbatches():
    found = finetune()
    close(found, example.gradients_of("SFT, as finetune.py averages", M))
    token_mean = example.gradients_of("SFT, the token mean", M)
    assert not torch.allclose(found[-1], token_mean[-1], rtol=0.05)


def check_the_factor_makes_finetunes_own_loop_train_the_token_mean():
    batches, aggregation = example.of_this_rank(M), example.Aggregation("token_mean")
    active = [int(of) for batch in batches for of in batch.mask.sum(-1)]
    plan = example.plan_step(
        aggregation, example.Sequences(active_tokens=active), group=dist.group.WORLD
    )

    def loss_of(number, losses):
        rows = range(number * len(losses), (number + 1) * len(losses))
        layout = example.Layout.bshd_zigzag(*losses.shape, cp_size=1, cp_rank=0)
        reducer = plan.reducer(rows, batches[number].mask, layout)
        return dist.get_world_size() * M * reducer(losses)

    close(finetune(loss_of), example.gradients_of("SFT, the token mean", M))


if __name__ == "__main__":
    run_worker({name: globals()[name] for name in sys.argv[2:]})
