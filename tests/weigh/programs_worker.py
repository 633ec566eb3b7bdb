"""The table of programs whose true weights are known, on one process and on two."""

import os
import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
import toy
from engines import wrapped
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from program_table import main, rounding, row

from megatron_lossagg import Aggregation, Layout, LossAggregator, Options
from megatron_lossagg.contract.engine import unwrapped
from megatron_lossagg.integrations import weigh_rl, weigh_script
from megatron_lossagg.integrations._shared import replaced
from megatron_lossagg.reduction.layout import held
from megatron_lossagg.weigh.weighing import Weighing

WORLD = int(os.environ["WORLD_SIZE"])


# f: what follows the losses.


def drops(model, num_tokens=None, *more, **options):
    return finalize_model_grads(model, None, *more, **options)


def doubles(model, num_tokens=None, *more, **options):
    return finalize_model_grads(model, num_tokens * 2, *more, **options)


def scales(model, num_tokens=None, *more, **options):
    finalize_model_grads(model, num_tokens, *more, **options)
    for chunk in model:
        chunk.scale_gradients(0.3)


def divides_by_n(model, num_tokens=None, *more, **options):
    finalize_model_grads(model, num_tokens, *more, **options)
    for chunk in model:
        chunk.scale_gradients(1 / toy.total(toy.sequences()))


FINALIZE = {
    (True, "plain"): (finalize_model_grads, lambda n: 1 / n, "trains token_mean"),
    (True, "drops num_tokens"): (drops, lambda n: 1.0, "and did not divide"),
    (True, "passes 2 N"): (doubles, lambda n: 0.5 / n, "trains 0.5 times token_mean"),
    (True, "scales afterwards"): (scales, lambda n: 0.3 / n, "0.3 times what Megatron's"),
    (True, "divides once more"): (divides_by_n, lambda n: 1 / n**2, "= 1/num_tokens times what"),
    (False, "plain"): (finalize_model_grads, lambda n: None, "trains microbatch_token_mean"),
    (False, "scales afterwards"): (scales, lambda n: 0.3, "0.3 times what Megatron's"),
    (False, "divides by N itself"): (divides_by_n, lambda n: 1 / n, "times what Megatron's"),
}
DDP = {
    "": {},
    ", distributed optimizer": {"use_distributed_optimizer": True},
    ", overlap": {"overlap_grad_reduce": True},
    ", distributed optimizer, overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    ", average_in_collective": {"average_in_collective": True},
}


def finalized(*, per_token, finalize, f, ddp):
    found = toy.sequences()
    n, dp = toy.total(found), toy.world()
    chunk = toy.chunk_of(n, per_token=per_token, finalize=finalize, ddp=ddp)
    weighing, gradient = toy.weighed_step(chunk, found)
    times = 1.0 if f(n) is None else f(n)
    return (
        weighing,
        gradient,
        toy.by_hand(found, lambda s: times if per_token else times / (toy.M * dp * s.n_mb)),
    )


for (per_token, name), (function, f, says) in FINALIZE.items():
    for how, ddp in DDP.items():
        if per_token and "average" in how:
            continue  # which Megatron refuses
        scaling = "per-token" if per_token else "average"
        put = row(
            f"finalize, {scaling}, {name}{how}",
            trains={"plain": says.split()[-1], "drops num_tokens": "token_sum"}.get(name),
            says=says,
        )
        put(partial(finalized, per_token=per_token, finalize=function, f=f, ddp=ddp))


@row("the second of two schedule calls", says="was not zero before", is_known=False)
def second_call(ddp=None, has_weights=True):
    found = toy.sequences()
    chunk = toy.chunk_of(toy.total(found), ddp=ddp)
    toy.weighed_step(chunk, found)
    weighing, gradient = toy.weighed_step(chunk, found)
    first = toy.by_hand(found, lambda s: 1 / (toy.M * toy.world() * s.n_mb))
    return weighing, gradient, 2 * first if has_weights else None


@row("a finalize function that is put in for the last of three schedule calls", is_known=False,
     says="was set inside of the block")  # fmt: skip
def finalized_at_last():
    found, last_of = toy.sequences(), (None, None, finalize_model_grads)
    chunk = toy.chunk_of(toy.total(found))
    weighing = Weighing([chunk], num_microbatches=3 * toy.M)
    with weighing:
        for chunk.config.finalize_model_grads_func in last_of:
            toy.schedule(chunk, found, toy.stock, weighing)
    weights = toy.by_hand(found, lambda s: 3 / (toy.M * toy.world() * s.n_mb))
    return weighing, toy.gradient_of(chunk), weights


@row("zeroed inside of the block", trains="microbatch_token_mean")
def zeroed_inside(ddp=None):
    found = toy.sequences()
    chunk = toy.chunk_of(toy.total(found), ddp=ddp)
    toy.weighed_step(chunk, found)
    weighing = Weighing([chunk], num_microbatches=toy.M)
    with weighing:
        chunk.zero_grad_buffer()
        toy.schedule(chunk, found, toy.stock, weighing)
    return (
        weighing,
        toy.gradient_of(chunk),
        toy.by_hand(found, lambda s: 1 / (toy.M * toy.world() * s.n_mb)),
    )


@row("the optimizer's step and an overflow inside of the block", trains="token_mean")
def overflow_inside(asks_inside=False):
    found, scale = toy.sequences(), {"now": 1024.0}
    chunk = toy.chunk_of(
        toy.total(found), per_token=True, grad_scale_func=lambda loss: loss * scale["now"]
    )
    weighing = Weighing([chunk], num_microbatches=toy.M)
    with weighing:
        toy.schedule(chunk, found, toy.stock, weighing)
        gradient = toy.gradient_of(chunk) / scale["now"]
        steps = weighing.terms() if asks_inside else None
        scale["now"] /= 2
        chunk.module.weight.data.sub_(chunk.module.weight.main_grad)
        chunk.zero_grad_buffer()
    weights = toy.by_hand(found, lambda s: 1 / toy.total(found))
    return steps or weighing, gradient, weights


row("weighed inside of the block", trains="token_mean")(partial(overflow_inside, asks_inside=True))


@row("fp16's loss scale", trains="sample_mean")
def loss_scale():
    found = toy.sequences()
    chunk = toy.chunk_of(toy.total(found), grad_scale_func=lambda loss: loss * 2.0**16)
    b, dp = len(found), toy.world()

    def sample_mean(mine, losses):
        means = [part.mean() for part in losses.split(toy.lengths_of(mine))]
        return sum(means) * toy.M * dp / b, {}

    weighing, gradient = toy.weighed_step(chunk, found, sample_mean)
    return weighing, gradient / 2.0**16, toy.by_hand(found, lambda s: 1 / (b * s.n))


class Fused(torch.autograd.Function):
    """Adds the gradient by itself, as a kernel of --gradient-accumulation-fusion does."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.weight, ctx.tokens = weight, tokens
        return weight[tokens]

    @staticmethod
    def backward(ctx, gradient):
        weight = ctx.weight
        if hasattr(
            weight, "get_main_grad"
        ):  # Megatron-FSDP, for which it writes over what is there
            weight.main_grad = weight.get_main_grad()
            weight.main_grad.zero_()
        weight.main_grad.index_add_(0, ctx.tokens, gradient)
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight), None


@row("a kernel that adds the gradient", trains="token_mean", is_measured=False)
def fused(ddp=None):
    found = toy.sequences()
    chunk = toy.chunk_of(toy.total(found), per_token=True, ddp=ddp)
    (unit,) = (m for m in chunk.modules() if isinstance(m, toy.token_model.OneWeightPerToken))
    unit.forward = lambda tokens: Fused.apply(unit.weight, tokens)
    weighing, gradient = toy.weighed_step(chunk, found)
    return weighing, gradient, toy.by_hand(found, lambda s: 1 / toy.total(found))


# torch's DDP


def token_mean_of(found, times=1.0):
    """Return the loss of a microbatch of a right token mean, under a mean over ranks."""
    return lambda mine, losses: losses.sum() * times * toy.world() / toy.total(found)


def torch_row(name, *, f, **how):
    is_right = f == 1 or WORLD == 1
    says = "" if is_right else "1 after the losses, as measured, 2 times what"

    @row(f"torch's DDP, {name}", trains="token_mean" if is_right else None, says=says)
    def run():
        found = toy.sequences()
        made = toy.torch_step(found, token_mean_of(found), **how)
        times = toy.world() if f == "DP" else f
        return *made, toy.by_hand(found, lambda s: times / toy.total(found))


torch_row("no_sync in all but the last microbatch", f=1)
torch_row("reduced in each microbatch", f=1, syncs=lambda m: True)
torch_row("a static graph", f=1, wrap={"static_graph": True}, syncs=lambda m: True)
torch_row("unused parameters looked for", f=1, wrap={"find_unused_parameters": True})
torch_row("gradients as views of buckets", f=1, wrap={"gradient_as_bucket_view": True})


def unreduced(name, **how):
    @row(f"torch's DDP, {name}", on=2, says="nothing was reduced", is_known=False)
    def run():
        found = toy.sequences()
        weighing, gradient = toy.torch_step(found, token_mean_of(found), **how)
        rank = dist.get_rank()
        weights = toy.by_hand(
            found, lambda s: toy.world() / toy.total(found) if s.rank == rank else 0.0
        )
        return weighing, gradient, weights


unreduced("no_sync in every microbatch", syncs=lambda m: False)
unreduced("a forward pass by .module", forward=lambda ddp: ddp.module)


def sums(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def registers_a_sum(ddp):
    ddp.register_comm_hook(None, sums)


def clips_and_steps(model):
    optimizer = torch.optim.SGD(model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def has_gradients(ddp):
    ddp.module.weight.grad = torch.ones_like(ddp.module.weight)


torch_row("a comm hook that sums", f="DP", prepare=registers_a_sum)
torch_row("clipped, stepped and zeroed inside of the block", f=1, end=clips_and_steps)


@row("torch's DDP, gradients that were not zero", says="was not zero before", is_known=False)
def torch_not_zero():
    found = toy.sequences()
    made = toy.torch_step(found, token_mean_of(found), prepare=has_gradients)
    return *made, toy.by_hand(found, lambda s: 1 + 1 / toy.total(found))


# A GPT, whose norms and biases are measured.


def gpt(
    *,
    per_token=True,
    dtype=None,
    ddp=None,
    changed=lambda gpt: None,
    shapes=((2, 4), (1, 12)),
    repeats=False,
    mask=torch.ones_like,
    **config,
):
    """Train a token mean, or a mean of token means of microbatches.

    ``shapes``: of the microbatches. ``mask``: of losses. ``repeats``: zero gradients after a first
    try of them.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        made = tiny_gpt.config_of(per_token=per_token, **config)
        model = tiny_gpt.gpt(made, tiny_gpt.cpu.gpt_layer_spec(made))
    finally:
        torch.set_default_dtype(before)
    changed(model)
    chunk = wrapped(made, model, **(ddp or {}))
    if chunk.ddp_config.overlap_grad_reduce:  # as megatron.training does
        made.no_sync_func = chunk.no_sync
    chunk.zero_grad_buffer()
    weighing = Weighing([chunk], num_microbatches=len(shapes))

    def forward_step(iterator, model):
        tokens = next(iterator)
        positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
        made = model(tokens, positions, None, labels=tokens.roll(-1, 1))

        def loss_func(losses):  # on the last stage
            losses = weighing.losses(losses)
            kept = mask(losses.detach())
            return (losses * kept).sum(), kept.sum().int(), {}

        return made, loss_func

    random = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    batches = [torch.randint(2, 16, of, generator=random) for of in shapes]
    with weighing:
        if repeats:
            own, made.finalize_model_grads_func = made.finalize_model_grads_func, None
            toy.run_batches(chunk, forward_step, batches)
            made.finalize_model_grads_func = own
            chunk.zero_grad_buffer()
        toy.run_batches(chunk, forward_step, batches)
    return weighing, None, None


def gpt_row(name, *, on=None, trains="token_mean", sizes=None, is_measured=True, **how):
    expected = {"on": on, "trains": trains, "sizes": sizes or {}, "is_measured": is_measured}
    expected["is_zeroed"] = how.get("repeats", False)
    row(f"GPT, {name}", **expected)(partial(gpt, **how))


def every_second(losses):
    """Return a mask that has as many tokens on each rank, and other ones."""
    return ((torch.arange(losses.shape[1]) + dist.get_rank()) % 2).expand_as(losses)


MEANS = {"per_token": False, "trains": "microbatch_token_mean"}
gpt_row("per-token")
gpt_row("average", **MEANS)
gpt_row("TP 2", on=2, sizes={"tensor_model_parallel_size": 2})
row("GPT, TP 2, whose ranks drop other tokens", on=2, is_known=False,
    sizes={"tensor_model_parallel_size": 2}, says="ranks weigh the same tokens differently")(
    partial(gpt, mask=every_second)
)  # fmt: skip
gpt_row("PP 2", on=2, sizes={"pipeline_model_parallel_size": 2})
SP = {"sizes": {"tensor_model_parallel_size": 2}, "sequence_parallel": True}
gpt_row("TP 2, sequence parallel", on=2, **SP)
gpt_row("TP 2, sequence parallel, average", on=2, **SP, **MEANS)
BF16 = {"dtype": torch.bfloat16}
gpt_row("bf16, buffers in float32", **BF16, ddp={"grad_reduce_in_fp32": True})
gpt_row("bf16, buffers in bf16", **BF16, ddp={"grad_reduce_in_fp32": False})
gpt_row("bf16, sequence parallel", on=2, **SP, **BF16, ddp={"grad_reduce_in_fp32": False})
gpt_row("float32, average", dtype=torch.float32, **MEANS)
for name, ddp in DDP.items():
    if name:
        gpt_row(f"average{name}", ddp=ddp, **MEANS)
gpt_row("experts", num_moe_experts=2, moe_router_topk=2, add_bias_linear=False)
gpt_row(
    "experts over two ranks",
    on=2,
    sizes={"expert_model_parallel_size": 2},
    num_moe_experts=2,
    moe_router_topk=2,
    add_bias_linear=False,
)
gpt_row(
    "two instances of the distributed optimizer",
    on=2,
    sizes={"num_distributed_optimizer_instances": 2},
    ddp={"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
)


def only(*words):
    """Freeze every parameter but those whose name has one of the words."""

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in words))

    return freeze


def adds_adapters(model):
    """Train a LoRA only, whose A has no gradient in step 1, for B is 0."""
    model.requires_grad_(False)
    layer = model.decoder.layers[0].mlp.linear_fc1
    layer.a = torch.nn.Parameter(torch.randn(4, 16))
    layer.b = torch.nn.Parameter(torch.zeros(layer.weight.shape[0], 4))
    layer.register_forward_hook(
        lambda layer, given, out: (out[0] + given[0] @ layer.a.T @ layer.b.T, *out[1:])
    )


def ties(model):
    model.output_layer.weight = model.embedding.word_embeddings.weight


def compiles(model):
    model.decoder.compile(backend="aot_eager")


gpt_row("LoRA in step 1", changed=adds_adapters)
gpt_row("only a matrix is trained", changed=only("linear_fc1.weight"))
gpt_row("only query and key norms are trained", changed=only("q_layernorm"), qk_layernorm=True,
        is_measured=False)  # fmt: skip
gpt_row("tied embeddings", changed=ties)
gpt_row("compiled", changed=compiles)
gpt_row("query and key norms", qk_layernorm=True)
gpt_row("full recomputation", recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1)  # fmt: skip


# Which calls train, and of which microbatch they are.


def loop(listen, *, per_token=False, num_microbatches=toy.M, by=None, weigh=None, ddp=None, **how):
    """Weigh a loop by hand over this rank's microbatches; ``listen``: of a row, returns its loss.

    The loss of a microbatch is divided by M, as the schedule does.
    """
    found = toy.sequences(**how)
    chunk = toy.chunk_of(toy.total(found), per_token=per_token, ddp=ddp)
    weighing = weigh or Weighing([chunk], num_microbatches=num_microbatches)
    with weighing:
        for m in sorted({s.microbatch for s in toy.own(found)}):
            listen(weighing, chunk, toy.own(found, m), m, found)
        n = sum(s.n for s in toy.own(found))
        chunk.config.finalize_model_grads_func([chunk], torch.tensor(n) if per_token else None)
    return (
        weighing,
        toy.gradient_of(chunk),
        toy.by_hand(found, by or (lambda s: 1 / toy.total(found))),
    )


def scaled(loss, found):
    """Make a sum over all ranks and microbatches a mean over N, under a mean over ranks."""
    return loss * toy.world() / toy.total(found)


@row("a call for each sequence, numbered", trains="token_mean")
def call_per_sequence(**more):
    def listen(weighing, chunk, mine, m, found):
        for one in mine:
            losses = weighing.losses(chunk(toy.tokens_of([one])), microbatch=m)
            scaled(losses.sum(), found).backward()

    return loop(listen, **more)


row("a call for each sequence, numbered, M not passed", trains="token_mean")(
    partial(call_per_sequence, num_microbatches=None)
)


@row("pieces of equal shape, numbered", trains="token_mean")
def equal_pieces():
    def listen(weighing, chunk, mine, m, found):
        pieces = [weighing.losses(chunk(toy.tokens_of([s])), microbatch=m) for s in mine]
        scaled(torch.cat(pieces).sum(), found).backward()

    return loop(listen, lengths=(((4, 4), (4, 4)), ((4, 4), (4, 3))))


@row("pieces of equal shape, not numbered", is_refused=True, says="pass microbatch= to each call")
def unnumbered_pieces(**more):
    def listen(weighing, chunk, mine, m, found):
        pieces = [weighing.losses(chunk(toy.tokens_of([s]))) for s in mine]
        scaled(torch.cat(pieces).sum(), found).backward()

    return loop(listen, lengths=(((4, 4), (4, 4)), ((4, 4), (4, 3))), **more)


row(
    "pieces of one backward pass, M not passed", is_refused=True, says="'loss' in one backward pass"
)(partial(unnumbered_pieces, num_microbatches=None))


@row("the same tokens in a second term", trains="token_mean", term="policy")
def two_terms():
    def listen(weighing, chunk, mine, m, found):
        losses = chunk(toy.tokens_of(mine))
        lengths = toy.lengths_of(mine)
        policy = weighing.losses(losses, lengths=lengths, term="policy")
        kl = weighing.losses(losses.detach() * 2, lengths=lengths, term="kl")
        scaled(policy.sum() + kl.sum(), found).backward()

    return loop(listen)


@row("an evaluation before and after", trains="token_mean")
def evaluations(num_microbatches=toy.M, is_numbered=False):
    def listen(weighing, chunk, mine, m, found):
        def heard(number):
            of = {"microbatch": number} if is_numbered else {}
            return weighing.losses(chunk(toy.tokens_of(mine)), lengths=toy.lengths_of(mine), **of)

        with torch.no_grad():
            heard(m + 1)
        scaled(heard(m).sum(), found).backward()
        heard(m)  # a metric that keeps its graph

    return loop(listen, num_microbatches=num_microbatches)


row("an evaluation before and after, M not passed", trains="token_mean")(
    partial(evaluations, num_microbatches=None)
)
row("evaluations, numbered, M not passed", trains="token_mean", says="sequences, M 2")(
    partial(evaluations, num_microbatches=None, is_numbered=True)
)


@row("a step that was repeated after an error", trains="token_mean", is_zeroed=True)
def repeated(**more):
    def listen(weighing, chunk, mine, m, found):
        for _ in range(2 if m == 0 else 1):
            chunk.zero_grad_buffer() if m == 0 else None
            losses = weighing.losses(chunk(toy.tokens_of(mine)), lengths=toy.lengths_of(mine))
            scaled(losses.sum(), found).backward()

    return loop(listen, **more)


@row("a loss that does not follow from what is heard", is_known=False, says="does not follow")
def captured():
    def listen(weighing, chunk, mine, m, found):
        losses = chunk(toy.tokens_of(mine))
        weighing.losses(losses, lengths=toy.lengths_of(mine))
        scaled(losses.sum(), found).backward()

    return loop(listen)


@row("a rank that calls no losses", is_known=False, says="not follow from what was heard", on=2)
def silent_rank():
    def listen(weighing, chunk, mine, m, found):
        losses = chunk(toy.tokens_of(mine))
        if dist.get_rank() == 0:
            losses = weighing.losses(losses, lengths=toy.lengths_of(mine))
        scaled(losses.sum(), found).backward()

    return loop(listen)


@row(
    "a loss that is divided by 0", is_known=False, is_measured=False, says="weights of 2 sequences"
)
def divided_by_zero():
    def listen(weighing, chunk, mine, m, found):
        losses = weighing.losses(chunk(toy.tokens_of(mine)), lengths=toy.lengths_of(mine))
        if m == 0 and dist.get_rank() == 0:
            losses = losses / 0
        scaled(losses.sum(), found).backward()

    return *loop(listen)[:2], None


@row("torch.autograd.grad of parameters besides", trains="token_mean")
def asks_gradients(create_graph=False, adds_zeros=False, **more):
    """``adds_zeros``: what is heard is added to the losses, and is 0."""

    def listen(weighing, chunk, mine, m, found):
        losses, lengths = chunk(toy.tokens_of(mine)), toy.lengths_of(mine)
        heard = losses.new_zeros(len(losses), requires_grad=True) if adds_zeros else losses
        heard = weighing.losses(heard, lengths=lengths)
        losses = losses + heard if adds_zeros else heard
        of = {"inputs": [*chunk.parameters()], "create_graph": create_graph}
        (asked,) = torch.autograd.grad((losses**2).sum(), **of, retain_graph=True)
        (scaled(losses.sum(), found) + 0 * asked.sum()).backward()

    return loop(listen, **more)


row("torch.autograd.grad of parameters, of losses that frameworks gather", trains="token_mean")(
    partial(asks_gradients, adds_zeros=True)
)
row("a gradient penalty besides", trains="token_mean")(partial(asks_gradients, create_graph=True))


@row("backward(inputs=)", trains="token_mean")
def backward_of_inputs():
    def listen(weighing, chunk, mine, m, found):
        losses = weighing.losses(chunk(toy.tokens_of(mine)), lengths=toy.lengths_of(mine))
        unused = torch.zeros(1, requires_grad=True)
        scaled(losses.sum() + unused.sum(), found).backward(inputs=[*chunk.parameters()])

    return loop(listen)


@row("losses that were heard before", is_refused=True, says="got losses that losses() returned")
def heard_before():
    def listen(weighing, chunk, mine, m, found):
        losses = weighing.losses(chunk(toy.tokens_of(mine)), microbatch=m)
        scaled(weighing.losses(losses, microbatch=m).sum(), found).backward()

    return loop(listen)


@row("a step for each microbatch", says="left out: calls of losses, 1 on a rank", on=1,
     trains="token_mean", is_zeroed=True)  # fmt: skip
def steps_of_microbatches():
    found = toy.sequences()
    model = toy.token_model.OneWeightPerToken(toy.total(found))
    optimizer = torch.optim.SGD(model.parameters())
    weighing = Weighing(model)
    with weighing:
        for m in range(toy.M):
            mine = toy.own(found, m)
            optimizer.zero_grad(set_to_none=m == 0)
            weighing.losses(
                model(toy.tokens_of(mine)), lengths=toy.lengths_of(mine)
            ).mean().backward()
            optimizer.step()
    last = toy.own(found, toy.M - 1)
    weights = toy.by_hand(found, lambda s: (s in last) / toy.total(last))
    return weighing, model.weight.grad.numpy(), weights


@row("a loss scale of 0", is_refused=True, says="got loss_scale=0, expected a number above 0")
def no_loss_scale():
    Weighing([toy.chunk_of(3)], loss_scale=0)


@row("a mask that is a list", trains="token_mean")
def listed_mask():
    def listen(weighing, chunk, mine, m, found):
        losses, lengths = chunk(toy.tokens_of(mine)), toy.lengths_of(mine)
        losses = weighing.losses(losses, [1] * len(losses), lengths=lengths)
        scaled(losses.sum(), found).backward()

    return loop(listen)


@row("ids of fewer sequences", is_refused=True, says="got prompt of 1 sequences, expected 2")
def fewer_ids():
    def listen(weighing, chunk, mine, m, found):
        lengths = toy.lengths_of(mine)
        losses = weighing.losses(chunk(toy.tokens_of(mine)), lengths=lengths, prompt=["one"])
        scaled(losses.sum(), found).backward()

    return loop(listen)


@row("offsets and lengths", is_refused=True, says="got cu_seqlens= and lengths=, expected one")
def offsets_and_lengths():
    def listen(weighing, chunk, mine, m, found):
        lengths = toy.lengths_of(mine)
        offsets = np.cumsum([0, *lengths])
        losses = chunk(toy.tokens_of(mine))
        losses = weighing.losses(losses, lengths=lengths, cu_seqlens=offsets)
        scaled(losses.sum(), found).backward()

    return loop(listen)


@row("losses of no dimension", is_refused=True, says="losses of no dimension")
def no_dimension():
    def listen(weighing, chunk, mine, m, found):
        scaled(weighing.losses(chunk(toy.tokens_of(mine)).sum()), found).backward()

    return loop(listen)


@row("a mask [s, b] for losses [b, s]", is_refused=True, says="expected the same shape")
def transposed_mask():
    def listen(weighing, chunk, mine, m, found):
        losses = chunk(toy.tokens_of(mine))[None]
        weighing.losses(losses, torch.ones(losses.T.shape)).sum().backward()

    return loop(listen)


UNEQUAL = (((3, 5), (4,), (2,)), ((6, 1),))


@row("unequal numbers of microbatches", trains="microbatch_token_mean", on=2)
def unequal_m():
    found = toy.sequences(UNEQUAL)
    m = len(UNEQUAL[parallel_state.get_data_parallel_rank()])
    chunk = toy.chunk_of(toy.total(found))
    weighing = Weighing([chunk], num_microbatches=m)
    with weighing:
        toy.schedule(chunk, found, toy.stock, weighing)
    weights = toy.by_hand(found, lambda s: 1 / (len(UNEQUAL[s.rank]) * 2 * s.n_mb))
    return weighing, toy.gradient_of(chunk), weights


def own_m(name, weight, says):
    """A row of ranks with 3 microbatches and 1."""

    @row(f"unequal numbers of microbatches, {name}", says=says, on=2)
    def run():
        found = toy.sequences(UNEQUAL)
        m = len(UNEQUAL[parallel_state.get_data_parallel_rank()])

        def by(s):
            return weight(s, len(UNEQUAL[s.rank]), found)

        def loss_func(mine, losses):
            return (
                losses * torch.tensor([by(s) for s in mine for _ in s.tokens])
            ).sum() * m * 2, {}

        chunk = toy.chunk_of(toy.total(found))
        weighing = Weighing([chunk], num_microbatches=m)
        with weighing:
            toy.schedule(chunk, found, loss_func, weighing)
        return weighing, toy.gradient_of(chunk), toy.by_hand(found, by)


own_m("a sum of their means", lambda s, m, found: 1 / (2 * s.n_mb),
      "a mean of one token mean per microbatch, times its rank's M")  # fmt: skip
own_m("a token mean over them", lambda s, m, found: 1 / (m * toy.total(found)),
      "token_mean, over its rank's M")  # fmt: skip
own_m("a sample mean times them", lambda s, m, found: m / (len(found) * s.n),
      "sample_mean, times its rank's M")  # fmt: skip


@row("sequence parallelism under torch's DDP", trains="sample_mean", on=2)
def ulysses():
    """Both ranks hold a part of each of two sequences."""
    parts = ((3, 2), (1, 2)) if dist.get_rank() == 0 else ((2, 2), (4, 2))
    n = (5, 4, 5, 4)
    model = toy.token_model.OneWeightPerToken(18)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    weighing, first = Weighing(ddp, num_microbatches=2), 0 if dist.get_rank() == 0 else 8
    weights, loss = np.zeros(18), 0.0
    with weighing:
        for m, lengths in enumerate(parts):
            tokens = torch.arange(first, first + sum(lengths))
            first += sum(lengths)
            heard = weighing.losses(ddp(tokens), lengths=lengths, cp_group=dist.group.WORLD)
            for s, part in enumerate(heard.split(list(lengths))):
                loss = loss + part.sum() * 2 / (4 * n[2 * m + s])
        loss.backward()
    at = 0
    for lengths in (((3, 2), (1, 2)), ((2, 2), (4, 2))):
        for m, of in enumerate(lengths):
            for s, k in enumerate(of):
                weights[at : at + k] = 1 / (4 * n[2 * m + s])
                at += k
    step = weighing.weighed()
    assert [one.tokens for one in step.sequences] == [*n]
    assert (step.sizes["DP"], step.sizes["CP"]) == (1, 2)
    np.testing.assert_allclose(model.weight.grad, weights)
    return weighing, None, None


# Steps of this package, weighed from outside and from inside.


def aggregated(
    *,
    per_token,
    inside=True,
    mode="sample_mean",
    deferred=False,
    ids=None,
    numbers=None,
    value=None,
    rejects=None,
    lengths=toy.LENGTHS,
    weight=None,
    ddp=None,
    passed=lambda mine: {},
    **options,
):
    """Weigh a step of this package; ``passed``: to the weighing, of a microbatch's sequences.

    ``ids``, ``numbers``: columns of a step, of a sequence. ``value``: of a token, by its position
    in the sequence. ``rejects``: which positions the mask lacks after they were counted.
    """
    found = toy.sequences(lengths)
    chunk = toy.chunk_of(toy.total(found), per_token=per_token, ddp=ddp)
    count = {} if value is None else {"count": "weights"}
    aggregator = LossAggregator(
        [chunk],
        Aggregation(mode, **count, **options),
        options=Options(rejects_tokens=rejects is not None),
    )
    chunk.zero_grad_buffer()
    weighing = Weighing([chunk])

    def values(s):
        return [value(t) for t in range(s.n)]

    def train(mine):
        columns = {name: [int(of(s)) for s in mine] for name, of in (ids or {}).items()}
        columns |= {name: [of(s) for s in mine] for name, of in (numbers or {}).items()}
        if value is not None:
            columns["token_weight_sums"] = [sum(values(s)) for s in mine]
        step = aggregator.step(
            active_tokens=[s.n for s in mine],
            num_microbatches=len({s.microbatch for s in mine}),
            **columns,
        )
        first, microbatches = {}, iter(sorted({s.microbatch for s in mine}))
        for at, s in enumerate(mine):
            first.setdefault(s.microbatch, at)

        def loss_func(of_microbatch, losses):
            at = first[next(microbatches)]
            lengths = toy.lengths_of(of_microbatch)
            keeps = [rejects is None or not rejects(t) for s in of_microbatch for t in range(s.n)]
            more = {}
            if value is not None:
                every = [one for s in of_microbatch for one in values(s)]
                more = {"token_weights": torch.tensor(every)}
            mb = made.microbatch(
                range(at, at + len(lengths)), torch.tensor(keeps).int(), lengths=lengths, **more
            )
            loss = mb.reduce(losses)
            return mb.outputs(loss, report={"loss": loss})

        with step as made, weighing if inside else nullcontext():
            toy.schedule(chunk, mine, loss_func, weighing, passed)

    with nullcontext() if inside else weighing:
        if deferred:
            with aggregator.deferred() as held:
                for m in range(toy.M):
                    train(toy.own(found, m))
                held.finish()
        else:
            train(toy.own(found))
    n = toy.total(found)
    weight_of = {
        "token_mean": lambda s: 1 / n,
        "sample_mean": lambda s: 1 / (len(found) * s.n),
        "prompt_mean": lambda s: by_prompt(s, found),
        "constant": lambda s: 1 / (len(found) * 40),
        "balanced": lambda s: by_group(s, found),
        "row_mean": lambda s: 1 / (number_of(sample, found) * s.b_mb * s.n),
        "length_power": lambda s: s.n**-0.5 / sum(o.n**0.5 for o in found),
        "token_sum": lambda s: 1 / 7,
    }
    by_hand = toy.by_hand(found, weight_of[mode] if weight is None else partial(weight, found))
    for s in found:
        for t, place in enumerate(s.tokens):
            by_hand[place] *= 1 if value is None else value(t)
            by_hand[place] *= rejects is None or not rejects(t)
    return weighing, toy.gradient_of(chunk), by_hand


def by_prompt(s, found):
    return 1 / (number_of(prompt, found) * tokens_like(prompt)(s, found))


def by_group(s, found):
    alike = sum(group(o) == group(s) for o in found)
    return alike / (len(found) * tokens_like(group)(s, found))


def tokens_like(key):
    return lambda s, found: sum(one.n for one in found if key(one) == key(s))


def number_of(key, found):
    return len({key(one) for one in found})


def prompt(s):
    return s.number


def group(s):
    return s.n > 3


def sample(s):
    return (s.rank, s.microbatch)


def sample_id(s):
    return 10 * s.rank + s.microbatch


for per_token in (False, True):
    scaling = "per-token" if per_token else "average"
    for mode, options in {
        "prompt_mean": {"ids": {"prompt": prompt}},
        "constant": {"divisor": 40},
        "balanced": {"ids": {"group": group}},
        "length_power": {"exponent": 0.5},
        "row_mean": {"ids": {"sample": sample_id}},
        "token_sum": {"divisor": 7},
    }.items():
        row(f"our {mode}, {scaling}", trains=mode)(
            partial(aggregated, per_token=per_token, mode=mode, **options)
        )
for per_token in (False, True):
    scaling = "per-token" if per_token else "average"
    for mode in ("token_mean", "sample_mean"):
        for inside in (False, True):
            where = "inside" if inside else "outside"
            row(f"our {mode}, {scaling}, weighed from {where}", trains=mode)(
                partial(aggregated, per_token=per_token, inside=inside, mode=mode)
            )
        row(f"our deferred {mode}, {scaling}, weighed as a whole", trains=mode)(
            partial(aggregated, per_token=per_token, inside=False, mode=mode, deferred=True)
        )


# What the run itself weighs its tokens and sequences by


def value(t):
    return (1.0, 0.5, 2.0, 0.0)[t % 4]


def sum_of(s):
    return sum(value(t) for t in range(s.n))


def of_number(s):
    return (0.25, 0.0, 2.0)[s.number + s.rank]


def second(s):
    return s.number == 1


def kept(found):
    return [s for s in found if not second(s)]


def prompts(mine):
    return {"prompt": [prompt(s) for s in mine]}


def as_one(mine):
    return {"lengths": [toy.total(mine)]}


LONGER = (((7, 5), (6,)), ((5,), (8, 9)))
"""Of which every sequence keeps a token."""
OWN_WEIGHTS = {
    "token_mean of token weights": {
        "mode": "token_mean",
        "value": value,
        "weight": lambda found, s: 1 / sum(map(sum_of, found)),
    },
    "token_mean of token weights, whose prompts are passed": {
        "mode": "token_mean",
        "value": value,
        "weight": lambda found, s: 1 / sum(map(sum_of, found)),
        "passed": prompts,
    },
    "token_mean, whose losses are one sequence to the weighing": {
        "mode": "token_mean",
        "passed": as_one,
    },
    "sample_mean of token weights": {
        "mode": "sample_mean",
        "value": value,
        "weight": lambda found, s: 1 / (len(found) * sum_of(s)),
    },
    "token_mean, sequences with weights of their own, one of them 0": {
        "mode": "token_mean",
        "numbers": {"sequence_weight": of_number},
        "weight": lambda found, s: of_number(s) / toy.total(found),
    },
    "sample_mean, sequences with weights of their own, one of them 0": {
        "mode": "sample_mean",
        "numbers": {"sequence_weight": of_number},
        "weight": lambda found, s: of_number(s) / (len(found) * s.n),
    },
    "sample_mean without those that are left out": {
        "mode": "sample_mean",
        "numbers": {"left_out": second},
        "weight": lambda found, s: 0 if second(s) else 1 / (len(kept(found)) * s.n),
    },
    "token_mean without those that are left out": {
        "mode": "token_mean",
        "numbers": {"left_out": second},
        "weight": lambda found, s: 0 if second(s) else 1 / toy.total(kept(found)),
    },
    "sample_mean whose tokens are rejected after they were counted": {
        "mode": "sample_mean",
        "rejects": lambda t: t % 3 == 1,
        "lengths": LONGER,
    },
    "token_mean whose tokens are rejected after they were counted": {
        "mode": "token_mean",
        "rejects": lambda t: t % 3 == 1,
        "lengths": LONGER,
    },
}
for name, how in OWN_WEIGHTS.items():
    for per_token in (False, True):
        scaling = "per-token" if per_token else "average"
        row(f"our {name}, {scaling}", trains=how["mode"])(
            partial(aggregated, per_token=per_token, **how)
        )
EQUAL = (((4, 4), (4, 4)), ((4, 4), (4, 4)))
for mode, how in {
    "sample_mean": {},
    "prompt_mean": {"ids": {"prompt": prompt}},
    "length_power": {"exponent": 0.5},
}.items():
    row(
        f"our {mode} of equal lengths is named first",
        trains=mode,
        says=f"trains {mode}, and so token_mean",
    )(partial(aggregated, per_token=True, mode=mode, lengths=EQUAL, **how))


def with_values(name, weight, *, of_token=value, given="token_weights", **expected):
    """A loop of one's own that says what its tokens weigh; ``given``: as what."""

    @row(f"a loop with token weights, {name}", **expected)
    def run():
        found = toy.sequences(LONGER)
        chunk = toy.chunk_of(toy.total(found))
        weighing, weights = Weighing([chunk], num_microbatches=toy.M), []
        with weighing:
            for m in range(toy.M):
                mine = toy.own(found, m)
                values = torch.tensor([of_token(t) for s in mine for t in range(s.n)])
                passed = {"mask": torch.ones(len(values)), given: values}
                output, lengths = chunk(toy.tokens_of(mine)), toy.lengths_of(mine)
                losses = weighing.losses(output, **passed, lengths=lengths)
                w = [weight(s, found, t) for s in mine for t in range(s.n)]
                ((losses * torch.tensor(w)).sum() * toy.world()).backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        weights = [weight(s, found, t) for s in found for t in range(s.n)]
        return weighing, toy.gradient_of(chunk), np.array(weights)


with_values(
    "a right token_mean",
    lambda s, found, t: value(t) / sum(map(sum_of, found)),
    trains="token_mean",
)
with_values(
    "a right sample_mean",
    lambda s, found, t: value(t) / (len(found) * sum_of(s)),
    trains="sample_mean",
)
with_values(
    "which are not in it",
    lambda s, found, t: 1 / toy.total(found),
    says="without its weights of tokens and sequences it is token_mean",
)
with_values(
    "which are not in its denominator",
    lambda s, found, t: value(t) / toy.total(found),
    says="a constant factor on token_mean",
)
with_values(
    "of its mask",
    lambda s, found, t: value(t) / sum(map(sum_of, found)),
    given="mask",
    says="weights of tokens (token_weights, if the mask's values are weights)",
)
with_values(
    "that are signed, such as advantages",
    lambda s, found, t: value(t) * (-1) ** t / toy.total(found),
    of_token=lambda t: value(t) * (-1) ** t,
    is_refused=True,
    says="got token_weights of -0.5, expected finite numbers from 0 on",
)

# The mask


def masked(name, *, mask, weighs, says, trains=None, shown="", loss=None):
    """``mask``: of positions of a sequence; ``weighs``: which of them have a weight.

    ``loss``: of a token, by its parameter and the mask, all of which are summed.
    """

    @row(f"mask: {name}", trains=trains, says=says)
    def run():
        found = toy.sequences((((6, 6), (8,)), ((7,), (6, 9))))
        chunk = toy.chunk_of(toy.total(found))
        weighing = Weighing([chunk], num_microbatches=toy.M)
        total = sum(weighs(s.n).sum() for s in found)
        weights = np.zeros(toy.total(found))
        for s in found:
            weights[list(s.tokens)] = weighs(s.n) / total
        with weighing:
            for m in range(toy.M):
                mine = toy.own(found, m)
                given = torch.from_numpy(np.concatenate([mask(s.n) for s in mine])).int()
                has = torch.from_numpy(np.concatenate([weighs(s.n) for s in mine]))
                losses = chunk(toy.tokens_of(mine))
                losses = losses if loss is None else loss(losses, given)
                losses = weighing.losses(losses, given, lengths=toy.lengths_of(mine))
                losses = losses * has if loss is None else losses
                (losses.sum() * toy.world() / float(total)).backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        np.testing.assert_allclose(toy.gradient_of(chunk), weights)
        report = str(weighing.weighed())
        assert shown in report
        assert "cause:" not in report
        return weighing, None, None


def last(number):
    return lambda n: np.arange(n) >= n - number


masked("as it is", mask=last(4), weighs=last(4), says="trains token_mean", trains="token_mean")
masked("ignored", mask=last(2), weighs=last(99), says="are outside of the mask", shown="!!!!##")
masked("of losses that are 0 outside of it, and summed with the others", mask=last(4),
       weighs=last(4), loss=torch.mul, says="trains token_mean", trains="token_mean")  # fmt: skip
masked("ignored by a KL, which is 0 in the first step", mask=last(2), weighs=last(99),
       loss=lambda x, given: x - x.detach(), says="are outside of the mask")  # fmt: skip
masked("off by one", mask=last(3), weighs=lambda n: last(4)(n) & ~last(1)(n),
       says="tokens of the mask have no weight", shown="..!##0")  # fmt: skip
masked("in part", mask=last(4), weighs=last(3), says="tokens of the mask have no weight")
masked("without one sequence", mask=last(4), weighs=lambda n: last(4 * (n != 8))(n),
       says="4 tokens of the mask have no weight", shown="....0000")  # fmt: skip


@row("a mask, offsets and token weights whose buffers are filled again", trains="sample_mean")
def filled_again():
    mask, offsets, values = torch.zeros(15), torch.zeros(3, dtype=torch.int32), torch.zeros(15)

    def v(s, t):
        return float((t + s.microbatch) % 3)

    def by(s, found):
        return 1 / (len(found) * sum(v(s, t) for t in range(s.n)))

    found = toy.sequences((((6, 6), (8, 4)), ((7, 5), (6, 9))))
    chunk = toy.chunk_of(toy.total(found))
    weighing = Weighing([chunk], num_microbatches=toy.M)

    def loss_func(mine, losses):
        n = len(losses)
        values[:n] = torch.tensor([v(s, t) for s in mine for t in range(s.n)])
        mask[:n] = (values[:n] > 0).float()
        offsets[1:] = torch.tensor(toy.lengths_of(mine)).cumsum(0)
        of = {"cu_seqlens": offsets, "token_weights": values[:n]}
        w = torch.tensor([by(s, found) * v(s, t) for s in mine for t in range(s.n)])
        return (weighing.losses(losses, mask[:n], **of) * w).sum() * toy.M * toy.world(), {}

    with weighing:
        toy.schedule(chunk, found, loss_func)
    weights = [by(s, found) * v(s, t) for s in found for t in range(s.n)]
    return weighing, toy.gradient_of(chunk), np.array(weights)


# Modes and causes


def weighed_as(name, weight, *, given=None, ids=None, lengths=toy.LENGTHS, on=None, **expected):
    """A row whose tokens weigh what a function of a sequence and all of them says."""

    @row(name, on=on, **expected)
    def run():
        found = toy.sequences(lengths)
        chunk = toy.chunk_of(toy.total(found))
        weighing = Weighing([chunk], num_microbatches=len(lengths[0]), **(given or {}))
        with weighing:
            for m in range(len(lengths[0])):
                mine = toy.own(found, m)
                passed = {key: [of(s) for s in mine] for key, of in (ids or {}).items()}
                losses = weighing.losses(
                    chunk(toy.tokens_of(mine)), lengths=toy.lengths_of(mine), **passed
                )
                w = torch.tensor([weight(s, found) for s in mine for _ in s.tokens])
                ((losses * w).sum() * toy.world()).backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        return weighing, toy.gradient_of(chunk), toy.by_hand(found, lambda s: weight(s, found))


def unheard(name, weight, *, ids=True, hears=lambda rank: True, lengths=toy.LENGTHS, **expected):
    """A row of which a microbatch is not heard on each rank; ``hears``: or all of a rank's."""

    @row(f"a microbatch that nothing is heard of, {name}", **expected)
    def run():
        found = toy.sequences(lengths)
        chunk = toy.chunk_of(toy.total(found))
        weighing = Weighing([chunk], num_microbatches=toy.M + 1)
        with weighing:
            for m in range(toy.M if hears(dist.get_rank()) else 0):
                mine = toy.own(found, m)
                more = {"sample": [sample(s) for s in mine]} if ids else {}
                losses = chunk(toy.tokens_of(mine))
                losses = weighing.losses(losses, lengths=toy.lengths_of(mine), microbatch=m, **more)
                w = torch.tensor([weight(s, found) for s in mine for _ in s.tokens])
                ((losses * w).sum() * toy.world()).backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        return weighing, toy.gradient_of(chunk), toy.by_hand(found, lambda s: weight(s, found))


def counts_two_more(s, found):
    return 1 / ((len(found) + 2) * s.n)


MISSING = f"{WORLD} of {3 * WORLD} microbatches, of which nothing was heard"
unheard("ids do not say B", counts_two_more, says="row_mean (sample)")
unheard("a right sample_mean", counts_two_more,
        says=f"times sample_mean, if B counts no sample of {MISSING}")  # fmt: skip
unheard("a right sample_mean is a hint", counts_two_more, ids=False,
        says=f"or sample_mean, if B counts 2 samples of {MISSING}")  # fmt: skip
unheard("a rank hears none of its own", counts_two_more, lengths=(*toy.LENGTHS[:1], ((), ())),
        hears=lambda rank: rank == 0, on=2,
        says="if B counts no sample of 4 of 6 microbatches, of which")  # fmt: skip
unheard("token_mean", lambda s, found: 1 / toy.total(found), trains="token_mean")
unheard("stock", lambda s, found: 1 / ((toy.M + 1) * toy.world() * s.n_mb),
        trains="microbatch_token_mean")  # fmt: skip
unheard("a sum", lambda s, found: 1 / (len(found) + 1),
        says=f"or sample_sum, if B counts 1 samples of {MISSING}")  # fmt: skip


weighed_as(
    "prompt_mean",
    by_prompt,
    ids={"prompt": prompt},
    trains="prompt_mean",
)
weighed_as(
    "prompt_mean, whose ids are tensors",
    by_prompt,
    ids={"prompt": lambda s: torch.tensor(prompt(s))},
    trains="prompt_mean",
)
weighed_as(
    "constant",
    lambda s, found: 1 / (len(found) * 40),
    given={"divisor": 40.0},
    trains="constant",
)
weighed_as(
    "balanced",
    lambda s, found: (
        sum(group(o) == group(s) for o in found) / (len(found) * tokens_like(group)(s, found))
    ),
    ids={"group": group},
    trains="balanced",
)
weighed_as(
    "row_mean",
    lambda s, found: 1 / (number_of(sample, found) * s.b_mb * s.n),
    ids={"sample": sample},
    trains="row_mean",
)
weighed_as(
    "length_power",
    lambda s, found: s.n**-0.5 / sum(o.n**0.5 for o in found),
    given={"exponent": 0.5},
    trains="length_power",
)
weighed_as(
    "sample_mean of samples of several sequences",
    lambda s, found: 1 / (number_of(sample, found) * tokens_like(sample)(s, found)),
    ids={"sample": sample},
    trains="sample_mean",
    on=2,
)
weighed_as(
    "prompt_mean without ids",
    by_prompt,
    says="not compared: prompt_mean (prompt)",
)
weighed_as("a sum that nobody divided", lambda s, found: 1 / (toy.M * toy.world()),
           says="times token_mean")  # fmt: skip
weighed_as(
    "M times a mean of sample means",
    lambda s, found: toy.M / (len(found) * s.n),
    says="cause: a constant factor on sample_mean: 2 = M",
)
weighed_as(
    "token means of microbatches, weighted by samples",
    lambda s, found: s.b_mb / len(found) / s.n_mb,
    says="token means of each microbatch, weighted by its samples",
    on=2,
)
weighed_as(
    "twice a mean of sample means of microbatches",
    lambda s, found: toy.M / (toy.M * toy.world() * s.b_mb * s.n),
    says="a mean of one sample mean per microbatch, times 2 = M",
)


weighed_as(
    "a token mean per microbatch that the schedule divides by its tokens again",
    lambda s, found: 1 / (toy.M * toy.world() * s.n_mb**2),
    says="a mean of one token mean, divided by its tokens again, per microbatch",
)


weighed_as(
    "sample means of microbatches, weighted by their tokens",
    lambda s, found: s.n_mb / toy.total(found) / (s.b_mb * s.n),
    says="sample means of each microbatch, weighted by its tokens",
    on=2,
)


LARGER = (((3, 5), (4,), (2, 2, 1)), ((2,), (6, 1), (5,)))
weighed_as(
    "token means of microbatches, weighted by samples of their rank",
    lambda s, found: s.b_mb / (toy.world() * len(toy.own(found, rank=s.rank)) * s.n_mb),
    lengths=LARGER,
    says="weighted by its samples among its rank's",
    on=2,
)
weighed_as(
    "means of samples' sums per microbatch",
    lambda s, found: 1 / (3 * toy.world() * s.b_mb),
    lengths=LARGER,
    says="a mean of one mean of samples' sums per microbatch",
)
weighed_as(
    "means of samples' sums per microbatch, over a constant",
    lambda s, found: 1 / (3 * toy.world() * s.b_mb * 37),
    lengths=LARGER,
    says="a mean of one mean of samples' sums per microbatch, times 0.027027",
)
weighed_as(
    "a coefficient that a quotient equals",
    lambda s, found: 0.6 / toy.total(found),
    lengths=LARGER,
    says="= M DP/B, or a number of the script's own: weigh a second step",
    on=2,
)


weighed_as(
    "a coefficient that a quotient of sizes equals",
    lambda s, found: 0.75 / toy.total(found),
    lengths=LARGER,
    says="= M/DP^2, or a number of the script's own: weigh a second step",
    on=2,
)


def with_empty(name, weight, *, known, **expected):
    """A row with one empty sample of rank 0."""

    @row(f"an empty sample, {name}", **expected)
    def run():
        found = toy.sequences()
        chunk = toy.chunk_of(toy.total(found))
        weighing = Weighing([chunk], num_microbatches=toy.M)
        with weighing:
            for m in range(toy.M):
                mine = toy.own(found, m)
                more = [0] * (m == 0 and dist.get_rank() == 0)
                ids = [*mine, *more] if known else None
                losses = weighing.losses(
                    chunk(toy.tokens_of(mine)),
                    lengths=[*toy.lengths_of(mine), *more],
                    sample=ids and [str(one) for one in ids],
                )
                w = torch.tensor([weight(s, found) for s in mine for _ in s.tokens])
                ((losses * w).sum() * toy.world()).backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        return weighing, toy.gradient_of(chunk), toy.by_hand(found, lambda s: weight(s, found))


def counts_it(s, found, times=1.0):
    return times / ((len(found) + 1) * s.n)


with_empty("known", counts_it, known=True, trains="sample_mean")
with_empty("known, times 0.1", partial(counts_it, times=0.1), known=True, factor=0.1,
           says="trains 0.1 times sample_mean")  # fmt: skip
with_empty("unknown", counts_it, known=False, says="or sample_mean, if B counts 1 of 1 empty")
with_empty("unknown, times 0.1", partial(counts_it, times=0.1), known=False,
           says="or another factor, if B counts some of 1 empty sequences")  # fmt: skip


# Masked tokens, which a mean divides by, or not


def trained(t):
    return t % 3 != 0


def kept_of(found):
    """How many tokens of some sequences are trained."""
    return sum(trained(t) for s in found for t in range(s.n))


def padded_as(name, weight, **expected):
    """A row whose losses are masked in part; ``weight``: of a sequence, its microbatch, and all."""

    @row(f"masked tokens, {name}", **expected)
    def run():
        found = toy.sequences((((7, 5), (8,)), ((5,), (8, 9))))
        chunk = toy.chunk_of(toy.total(found))
        weighing = Weighing([chunk], num_microbatches=toy.M)

        def weights_of(sequences):
            return [
                trained(t) * weight(s, toy.own(found, s.microbatch, s.rank), found)
                for s in sequences
                for t in range(s.n)
            ]

        def loss_func(mine, losses):
            return (losses * torch.tensor(weights_of(mine))).sum() * toy.M * toy.world(), {}

        with weighing:
            toy.schedule(chunk, found, loss_func, weighing)
        return weighing, toy.gradient_of(chunk), np.array(weights_of(found))


def means(found):
    return toy.M * toy.world()


padded_as(
    "a mean over all tokens of each microbatch, masked or not",
    lambda s, mb, found: 1 / (means(found) * toy.total(mb)),
    says="a mean of one mean over padded tokens per microbatch",
)
padded_as(
    "a division by all tokens of the step",
    lambda s, mb, found: 1 / toy.total(found),
    says="= N/(padded tokens)",
)
padded_as(
    "token means of microbatches, weighted by padded tokens",
    lambda s, mb, found: toy.total(mb) / toy.total(found) / kept_of(mb),
    says="token means of each microbatch, weighted by its padded tokens",
)
padded_as(
    "token means of microbatches, weighted by padded tokens, M times",
    lambda s, mb, found: toy.M * toy.total(mb) / toy.total(found) / kept_of(mb),
    says="weighted by its padded tokens, times 2 = M",
)
padded_as(
    "a mean of samples' sums over their padded lengths",
    lambda s, mb, found: 1 / (len(found) * s.n),
    says="sample_mean of padded lengths",
)
padded_as(
    "stock",
    lambda s, mb, found: 1 / (means(found) * kept_of(mb)),
    trains="microbatch_token_mean",
)
padded_as("a right token_mean", lambda s, mb, found: 1 / kept_of(found), trains="token_mean")


def forgotten(name, weight, says):
    """A row whose numerator has all tokens, and whose mask has some of them."""

    @row(f"a mask that the numerator forgot, {name}", says=says)
    def run():
        found = toy.sequences((((7, 5), (8,)), ((5,), (8, 9))))
        chunk = toy.chunk_of(toy.total(found))
        weighing = Weighing([chunk], num_microbatches=toy.M)

        def by(s):
            return weight(s, toy.own(found, s.microbatch, s.rank), found)

        with weighing:
            for m in range(toy.M):
                mine = toy.own(found, m)
                mask = torch.tensor([trained(t) for s in mine for t in range(s.n)])
                losses = weighing.losses(
                    chunk(toy.tokens_of(mine)), mask, lengths=toy.lengths_of(mine)
                )
                w = torch.tensor([by(s) for s in mine for _ in s.tokens])
                ((losses * w).sum() * toy.world()).backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        return weighing, toy.gradient_of(chunk), toy.by_hand(found, by)


forgotten("token_mean", lambda s, mb, found: 1 / kept_of(found), "N/(tokens of the mask)")
forgotten("sample_mean", lambda s, mb, found: 1 / (len(found) * kept_of([s])),
          "cause: sample_mean of the mask's counts weight of")  # fmt: skip
forgotten("stock", lambda s, mb, found: 1 / (means(found) * kept_of(mb)),
          "a mean of one mean over the mask's tokens per microbatch")  # fmt: skip


# Two steps, which decide between causes


TALLER = (((3, 5), (4,), (2, 2)), ((2,), (6, 1), (5,)))
"""Of three microbatches."""


def two_steps(name, weight, *, then=TALLER, **expected):
    """``weight``: of a token of a sequence, of all sequences and M, in two steps of other sizes."""

    @row(f"two steps, {name}", **expected)
    def run():
        before = None
        for lengths in (toy.LENGTHS, then):
            found, m = toy.sequences(lengths), len(lengths[0])
            chunk = toy.chunk_of(toy.total(found))
            weighing = Weighing([chunk], num_microbatches=m)

            def loss_func(mine, losses, found=found, m=m):
                w = torch.tensor([weight(s, found, m) for s in mine for _ in s.tokens])
                return (losses * w).sum() * m * toy.world(), {}

            with weighing:
                toy.schedule(chunk, found, loss_func, weighing)
            step = weighing.weighed().after(before)
            before = step
        weights = toy.by_hand(found, lambda s: weight(s, found, m))
        return {"loss": step}, toy.gradient_of(chunk), weights


two_steps(
    "M times a token mean",
    lambda s, found, m: m / toy.total(found),
    says="a constant factor on token_mean: 3 = M, in 2 steps",
)
two_steps(
    "DP times a token mean, which M was in the first",
    lambda s, found, m: toy.world() / toy.total(found),
    on=2,
    says="a constant factor on token_mean: 2 = DP, in 2 steps",
)
two_steps(
    "a number of its own, which 1/M was in the first",
    lambda s, found, m: 1 / 2 / toy.total(found),
    says="a constant factor on token_mean: 0.5, in 2 steps",
    on=1,
)
two_steps(
    "1/B of a token mean",
    lambda s, found, m: 1 / len(found) / toy.total(found),
    says="= 1/B, in 2 steps",
)
two_steps(
    "a number of its own, which 1/B was in the first",
    lambda s, found, m: 1 / (3 * WORLD) / toy.total(found),
    then=(((3, 5, 2), (4,)), ((2,), (6, 1, 3))),
    says=f"a constant factor on token_mean: {1 / (3 * WORLD):.6g}, in 2 steps",
)
two_steps(
    "constant, whose L is the same in both",
    lambda s, found, m: 1 / (len(found) * 40),
    says="or constant, if L is 40",
)
two_steps(
    "a sum over samples whose factor is of no constant",
    lambda s, found, m: m / len(found),
    says="a constant factor on sample_sum: 3 = M, in 2 steps",
)
two_steps(
    "a mean of sample means per microbatch, M times",
    lambda s, found, m: 1 / (toy.world() * s.b_mb * s.n),
    says="a mean of one sample mean per microbatch, times 3 = M, in 2 steps",
)
two_steps(
    "another factor in each",
    lambda s, found, m: (1.3 if m == 2 else 1.7) / toy.total(found),
    says="no cause explains the step before it too",
)
two_steps("a right token_mean", lambda s, found, m: 1 / toy.total(found), trains="token_mean")


# Scripts of Megatron-LM, and the terms of a framework.


SCRIPTED = (((6,), (4,)), ((2,), (7,)))
"""Tokens of the sequences of scripts."""


def script(name, step, *, weight=lambda s, n: 1 / n, m=toy.M, divisor=None, **expected):
    """``step``: from the model and the sequences of a microbatch to output and loss_func."""

    @row(f"script: {name}", **expected)
    def run():
        found = toy.sequences(SCRIPTED)
        chunk, reports = toy.chunk_of(toy.total(found), per_token=True), []
        listening = weigh_script.ScriptWeighing(
            1, 1, stop=False, report=lambda *report: reports.append(report), divisor=divisor
        )

        def forward_step(iterator, model):
            return step(model, toy.own(found, next(iterator)))

        toy.run_batches(chunk, forward_step, range(m), wrap=listening.wrap)
        (weighed,) = listening.weighed
        assert bool(reports) == (dist.get_rank() == 0)
        weights = toy.by_hand(found, lambda s: weight(s, toy.total(found)))
        return {"loss": weighed}, toy.gradient_of(chunk), weights


def num(losses):
    return torch.tensor(len(losses), dtype=torch.int)


def summed(loss_mask, output):
    """As Megatron-LM's loss_func, whose mask is bound."""
    return output.sum(), num(output), {}


def captured_output(model, mine):
    losses = model(toy.tokens_of(mine))
    return losses.detach() * 0, lambda output: (losses.sum(), num(losses), {})


def model_twice(model, mine):
    tokens = toy.tokens_of(mine)
    both = [model(part) for part in (tokens[:1], tokens[1:])]
    return torch.cat(both), partial(summed, None)


def with_a_reference(model, mine):
    with torch.no_grad():
        model(toy.tokens_of(mine))
    return model(toy.tokens_of(mine)), partial(summed, None)


def ignores_its_mask(model, mine):
    losses = model(toy.tokens_of(mine))
    return losses, partial(summed, (torch.arange(len(losses)) > 0).float())


def masks(model, mine):
    losses = model(toy.tokens_of(mine))
    ones = torch.ones(len(losses))
    return losses, partial(lambda loss_mask, x: ((x * loss_mask).sum(), num(x), {}), ones)


def over_a_constant(model, mine):
    found = toy.sequences(SCRIPTED)
    scale = toy.total(found) / (len(found) * 40)  # finalize divides by the total
    return model(toy.tokens_of(mine)), lambda output: (output.sum() * scale, num(output), {})


script("masked by loss_mask", masks, trains="token_mean")
script(
    "over a constant that is passed",
    over_a_constant,
    weight=lambda s, n: 1 / (len(toy.sequences(SCRIPTED)) * 40),
    divisor=40.0,
    trains="constant",
)
script("the loss is of what forward_step captured", captured_output, trains="token_mean")
script("the model is called twice", model_twice, trains="token_mean")
script("a reference pass without gradients", with_a_reference, trains="token_mean")
script("loss_mask is ignored", ignores_its_mask, says="are outside of the mask")


def returns(name, output_of, loss_of, **expected):
    """A script whose forward_step returns what is made of the toy's losses."""

    def step(model, mine):
        losses = model(toy.tokens_of(mine))[:, 0, 0]
        return output_of(losses), lambda output: (loss_of(output), num(losses), {})

    def of_two_heads(model, mine):
        weight = model.module.weight
        with replaced(unwrapped(model), forward=lambda t: weight[t, None, None].expand(-1, 2, 1)):
            return step(model, mine)

    script(f"forward_step returns {name}", of_two_heads, **expected)


returns("losses, and the model those of two heads", lambda x: x, torch.sum, trains="token_mean")
returns("a loss", torch.sum, lambda loss: loss, is_refused=True, says="losses of no dimension")
returns("a tuple", lambda x: (x, x), lambda both: both[0].sum(), is_refused=True,
        says="got tuple, expected the losses of tokens")  # fmt: skip
returns("a dict", lambda x: {"x": x}, lambda of: of["x"].sum(), is_refused=True,
        says="got dict, expected the losses of tokens")  # fmt: skip


def terms(name, reduce, **expected):
    """``reduce``: from a function that hears losses, and the losses of a microbatch, to a loss."""

    @row(f"terms: {name}", **expected)
    def run():
        found = toy.sequences()
        chunk = toy.chunk_of(toy.total(found))
        listening, reports = weigh_rl.TermsWeighing(1, report=lambda *report: None), []

        def forward_step(iterator, model):
            mine = toy.own(found, next(iterator))

            def heard(losses):
                return listening.hear(
                    losses, None, lengths=toy.lengths_of(mine), frame=sys._getframe(1)
                )

            times = toy.M * toy.world() / toy.total(found)
            return model(toy.tokens_of(mine)), lambda x: (times * reduce(heard, x), {})

        weigh = listening._trained
        listening._trained = lambda found: reports.append(found) or weigh(found)
        toy.run_batches(chunk, forward_step, range(toy.M), wrap=listening.wrap)
        return reports[0], None, None


def policy_twice(heard, x):
    pg_loss = heard(x).sum()
    kl_loss = 0.5 * heard(2 * x.detach()).sum()
    total = pg_loss + kl_loss
    pg_loss = heard(x).sum()
    return total + 2 * pg_loss


def dropped(heard, x):
    pg_loss = heard(x).sum()
    dropped_loss = heard(x).sum()
    del dropped_loss
    return pg_loss


NAMES = {"names": ["pg_loss", "pg_loss 2"]}
terms("one name on two lines", policy_twice, term="pg_loss 2", factor=2.0, **NAMES)
terms("one name on two lines, the first", policy_twice, term="pg_loss", trains="token_mean")
terms(
    "computed and dropped",
    dropped,
    term="dropped_loss",
    says="trains nothing",
    names=["pg_loss", "dropped_loss"],
)


def framework(name, forward_step_of, *, how, scale="", trains="token_mean", **expected):
    """A framework of its own, whose variables are read by their names.

    ``forward_step_of``: from its module and all sequences.
    """

    @row(f"framework: {name}", trains=trains, **expected)
    def run():
        found, module = toy.sequences((((6,), (4,)), ((2,), (7,)))), ModuleType("toy_framework")
        sys.modules[module.__name__] = module
        module.get_forward_backward_func = get_forward_backward_func
        module.agg_loss = lambda loss_mat, loss_mask: (loss_mat * loss_mask).sum()
        module.policy_loss = policy_loss
        function = {"given": "agg_loss", "inside": "policy_loss"}[how]
        weigh_rl.FRAMEWORKS["toy"] = module.__name__
        module.HEARD = weigh_rl.Where(
            module.__name__,
            [
                weigh_rl.Reduction(
                    *(module.__name__, function, "loss_mat", "loss_mask", how), scale=scale
                )
            ],
            sums_gradients=False,
            names=lambda batch: batch.get("names"),
        )
        reports, chunk = [], toy.chunk_of(toy.total(found))
        listening = weigh_rl.install("toy", report=lambda *report: None)
        ending = listening._trained
        listening._trained = lambda terms: reports.append(ending(terms)) or reports[0]
        numbers = range(toy.M)
        schedule = module.get_forward_backward_func()
        toy.run_batches(chunk, forward_step_of(module, found), numbers, wrap=lambda _: schedule)
        return (
            reports[0],
            toy.gradient_of(chunk),
            toy.by_hand(found, lambda s: 1 / toy.total(found)),
        )


def policy_loss(losses, mask):
    """Another release, in which a variable has another name."""
    per_token_loss, loss_mask = losses * 1, mask
    return (per_token_loss * loss_mask).sum()


def by_agg_loss(module, found):
    def loss_func(data, losses):
        x = losses.view(1, -1)
        return module.agg_loss(x, torch.ones_like(x)) * toy.M * toy.world() / toy.total(found), {}

    def forward_step(iterator, model):
        mine = toy.own(found, next(iterator))
        return model(toy.tokens_of(mine)), partial(loss_func, {"names": ["one"]})

    return forward_step


def by_agg_loss_of_a_batch(module, found):
    def loss_func(batch, losses):
        x = losses.view(1, -1)
        return module.agg_loss(x, torch.ones_like(x)) * toy.M * toy.world() / toy.total(found), {}

    def forward_step(iterator, model):
        mine = toy.own(found, next(iterator))
        return model(toy.tokens_of(mine)), partial(loss_func, {"names": ["one"]})

    return forward_step


def by_policy_loss(module, found):
    def loss_func(losses):
        x = losses.view(1, -1)
        loss = module.policy_loss(x, torch.ones_like(x))
        return loss * toy.M * toy.world() / toy.total(found), {}

    def forward_step(iterator, model):
        return model(toy.tokens_of(toy.own(found, next(iterator)))), loss_func

    return forward_step


framework("its microbatch is found by its name", by_agg_loss, how="given")
framework(
    "its microbatch has another name",
    by_agg_loss_of_a_batch,
    how="given",
    says="no caller of loss_func has a microbatch in a variable data",
)
framework(
    "its microbatch, which has what losses were multiplied by, has another name",
    by_agg_loss_of_a_batch,
    how="given",
    scale="scale",
    trains=None,
    is_known=False,
    says="not known, for what losses were multiplied by was not found",
)
framework(
    "its losses have another name",
    by_policy_loss,
    how="inside",
    is_refused=True,
    says="policy_loss: no operation there took its variables loss_mat and loss_mask",
)


# Loss functions that people run, at CP 2.


def split(found, rank=None):
    """Return the sequences with what a context-parallel rank has of them: 1 of 3 tokens, or 2."""
    rank = parallel_state.get_context_parallel_rank() if rank is None else rank
    held = []
    for s in found:
        cut = -(-s.n // 3)
        tokens = s.tokens[:cut] if rank == 0 else s.tokens[cut:]
        held.append(toy.Sequence(**{**vars(s), "tokens": tokens, "n": len(tokens)}))
    return held


def at_cp_2(name, loss_func, weight, *, per_token=False, ddp=None, on=2, **expected):
    """``loss_func``: of losses, all sequences, and the losses of each; ``weight``: of a sequence,
    its part, all, and all parts there.
    """

    @row(f"at CP 2, {name}", on=on, sizes={"context_parallel_size": 2}, **expected)
    def run():
        found = toy.sequences((((6, 9), (12,)), ((3,), (5, 8))))
        chunk = toy.chunk_of(toy.total(found), per_token=per_token, ddp=ddp)
        weighing, here = Weighing([chunk], num_microbatches=toy.M), split(found)

        def forward_step(iterator, model):
            mine = toy.own(here, next(iterator))
            losses = weighing.losses(model(toy.tokens_of(mine)), lengths=toy.lengths_of(mine))
            return losses, lambda x: loss_func(x, found, x.split(toy.lengths_of(mine)))

        with weighing:
            toy.run_batches(chunk, forward_step, [0, 1])
        weights = np.zeros(toy.total(found))
        for rank in range(2):
            parts = split(found, rank)
            for s, part in zip(found, parts, strict=True):
                there = toy.own(parts, s.microbatch, s.rank)
                weights[list(part.tokens)] = weight(s, part, found, toy.total(there))
        step = weighing.weighed()
        by_sequence = [weights[list(s.tokens)].sum() for s in found]
        found_sums = [one.weight_sum for one in step.sequences]
        rtol = rounding()
        np.testing.assert_allclose(toy.gradient_of(chunk), weights, rtol=rtol)
        np.testing.assert_allclose(found_sums, by_sequence, rtol=rtol)
        return weighing, None, None


at_cp_2(
    "a local mean with two outputs",
    lambda x, found, parts: (x.mean(), {}),
    lambda s, part, found, n: 1 / (toy.M * n),
    says="a mean of one token mean per microbatch and context-parallel rank, times 2 = M = CP",
)
at_cp_2(
    "a local mean with two outputs, times CP",
    lambda x, found, parts: (x.mean() * 2, {}),
    lambda s, part, found, n: 2 / (toy.M * n),
    says="per microbatch and context-parallel rank, times 4 = M CP = ",
)
at_cp_2(
    "a sum of means of samples' parts",
    lambda x, found, parts: (sum(part.mean() for part in parts), torch.tensor(1), {}),
    lambda s, part, found, n: 1 / (toy.M * 2 * part.n),
    says="a mean of one sample mean per data- and context-parallel rank, times 1.5 = B/M = B/CP",
)
at_cp_2(
    "a token mean of each rank",
    lambda x, found, parts: (toy.M * x.sum() / toy.total(split(found)), torch.tensor(1), {}),
    lambda s, part, found, n: 1 / (2 * toy.total(split(found, int(part.tokens[0] > s.tokens[0])))),
    says="cause: a mean of one token mean per data- and context-parallel rank",
)
at_cp_2(
    "stock",
    lambda x, found, parts: (x.sum(), num(x), {}),
    lambda s, part, found, n: 1 / (toy.M * 2 * n),
    says="cause: a mean of one token mean per microbatch and context-parallel rank weight of",
)
at_cp_2(
    "CP squared",
    lambda x, found, parts: (x.sum() / toy.total(found) * toy.M * 4, {}),
    lambda s, part, found, n: 4 / toy.total(found),
    says="a constant factor on token_mean: 4 = M CP = ",
)
at_cp_2(
    "a sum that nobody divided",
    lambda x, found, parts: (x.sum(), torch.tensor(1), {}),
    lambda s, part, found, n: 1 / 4,
    says="a constant factor on token_mean: 6.75 = N/(M CP)",
)
at_cp_2(
    "a right token mean",
    lambda x, found, parts: (x.sum(), num(x), {}),
    lambda s, part, found, n: 1 / toy.total(found),
    per_token=True,
    trains="token_mean",
)


def ordered(name, order, ids, **expected):
    """A right sample mean of three sequences, of which each rank holds half of the tokens."""

    @row(f"at CP 2, {name}", on=2, sizes={"context_parallel_size": 2}, **expected)
    def run():
        rank, n = dist.get_rank(), (8, 4, 6)
        chunk = toy.chunk_of(18)
        weighing = Weighing([chunk])
        halves = [torch.arange(18).split(n)[s].chunk(2)[rank] for s in order(rank)]
        lengths = [*map(len, halves)]
        with weighing:
            losses = chunk(torch.cat(halves))
            losses = weighing.losses(losses, lengths=lengths, sample=ids(rank))
            sum(part.mean() * 2 / (2 * 3) for part in losses.split(lengths)).backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        weights = np.repeat([1 / (3 * one) for one in n], n)
        np.testing.assert_allclose(toy.gradient_of(chunk), weights)
        return weighing, None, None


ordered("sequences in another order on each rank", lambda rank: ([0, 1, 2], [1, 0, 2])[rank],
        lambda rank: ("abc", "bac")[rank], is_known=False, says="different ids")  # fmt: skip
ordered("ids of each rank", lambda rank: range(3), lambda rank: ("abc", "def")[rank],
        trains="sample_mean")  # fmt: skip


def gathered(name, of_losses, **expected):
    """Our step of gathered losses with token weights; ``of_losses``: what is heard, of them."""

    @row(f"at CP 2, gathered losses with token weights, {name}", on=2,
         sizes={"context_parallel_size": 2}, **expected)  # fmt: skip
    def run():
        found = toy.sequences((((8, 4), (12,)),))
        chunk = toy.chunk_of(toy.total(found))
        aggregator = LossAggregator([chunk], Aggregation("sample_mean", count="weights"))
        weighing, chunk_values = Weighing([chunk]), [value(t) for s in found for t in range(s.n)]
        step = aggregator.step(
            active_tokens=[sum(value(t) > 0 for t in range(s.n)) for s in found],
            token_weight_sums=[sum_of(s) for s in found],
            num_microbatches=toy.M,
        )

        def forward_step(iterator, model):
            mine = toy.own(found, next(iterator))
            offsets = np.cumsum([0, *toy.lengths_of(mine)])
            layout = Layout.thd_zigzag(
                offsets, cp_size=2, cp_rank=parallel_state.get_context_parallel_rank()
            )
            tokens = toy.tokens_of(mine)
            here = held(torch.arange(len(tokens)), layout)
            values = torch.tensor(chunk_values)[tokens]
            heard, losses = of_losses(weighing, model(tokens[here]), here, toy.lengths_of(mine))
            del heard

            def loss_func(losses):
                numbers = [found.index(s) for s in mine]
                mb = made.microbatch(
                    numbers, (values > 0).int(), layout=layout.gathered(), token_weights=values
                )
                loss = mb.reduce(losses)
                return mb.outputs(loss, report={"loss": loss})

            return losses, loss_func

        with step as made, weighing:
            toy.run_batches(chunk, forward_step, range(toy.M))
        weights = toy.by_hand(found, lambda s: 1 / (len(found) * sum_of(s))) * chunk_values
        np.testing.assert_allclose(toy.gradient_of(chunk), weights)
        return weighing, None, None


def whole_of(own, here, lengths):
    return torch.zeros(sum(lengths), dtype=own.dtype).index_put((here,), own)


def heard_gathered(weighing, own, here, lengths):
    heard = weighing.losses(whole_of(own, here, lengths), lengths=lengths)
    return heard, heard


def heard_before_it(weighing, own, here, lengths):
    counts = torch.bincount(torch.repeat_interleave(torch.tensor(lengths))[here]).tolist()
    heard = weighing.losses(own, lengths=counts)
    return heard, whole_of(heard, here, lengths)


gathered("heard when they are", heard_gathered, trains="sample_mean")
gathered("heard before", heard_before_it, trains="sample_mean")


if __name__ == "__main__":
    tiny_gpt.start()
    main()
