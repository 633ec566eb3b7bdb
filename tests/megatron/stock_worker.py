"""What this package and stock Megatron-Core do, side by side, at each layout of a job.

``stock_worker.py WHAT JOB``, JOB of ``job_of``. ``side``: MoE and MTP losses under stock's
loss_func and under this package's, on two models. ``follow``: side losses that follow the mode,
next to stock's; W is computed by loops over sequences. ``slices``: an unpacked batch as
Megatron-Core and as ``Layout`` slice it. ``parity``: stock's own loss before and after this
package trains, and a loss scale. ``notes``: the norm of each side loss without the main one.
"""

import inspect
import sys
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from ranks import each_layout, of_ranks, print_row
from stock_step import gradients, run_of, run_schedule, stock_model, stock_step, wrapped_chunks

from megatron_lossagg import Aggregation, Layout, LossAggregator, Options
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.job import LOSS_SCALINGS
from megatron_lossagg.verify.small_gpt import config_of, pack, reported
from megatron_lossagg.verify.step_data import VOCABULARY, make_sequences, zigzag

MODES = ("token_mean", "sample_mean")


def stock_gradients(chunks, run, *, main):
    """Run a step of stock whose loss is multiplied by ``main``.

    Stock has one mask. Where the training mask selects fewer tokens, it counts the counting mask.
    """
    sequences = [replace(sequence, trained=sequence.counted) for sequence in run.sequences]
    counting = [pack(sequences, batch.sequences[:-1], run.parallelism) for batch in run.batches]

    def returns(loss, num_tokens):
        return loss * main, num_tokens

    return stock_step(chunks, run.batches, run.parallelism, returns, counting=counting)[1]


def our_step(run, mode, *, main):
    """Run a step whose loss is the partial loss times ``main``."""
    run._step(Case(aggregation=Aggregation(mode)), poison=False, main=main)
    return gradients(run.chunks)


def the_same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def distance(left, right):
    """Return the largest relative difference over buffers."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(left, right, strict=True))


def side(layout):
    """Compare the gradients of side losses, and of whole steps where stock has the mode."""
    for loss_scaling in LOSS_SCALINGS:
        for rejected in (False, True):
            yield (loss_scaling, rejected), of_side_losses(layout, loss_scaling, rejected)


def of_side_losses(layout, loss_scaling, rejected):
    per_token = loss_scaling == "per_token"
    sequences = make_sequences()
    if not rejected:
        sequences = [replace(sequence, counted=sequence.trained) for sequence in sequences]
    stock = stock_model(layout, per_token=per_token)
    run = run_of(layout, per_token=per_token, sequences=sequences)
    side = stock_gradients(stock, run, main=0)
    found = {
        "there": all(bool(g.isfinite().all() and g.any()) for g in side),
        **{mode: the_same(our_step(run, mode, main=0), side) for mode in MODES},
    }
    if rejected:
        return found
    found["stock_twice"] = the_same(stock_gradients(stock, run, main=0), side)
    same_loss = "token_mean" if per_token else "microbatch_token_mean"
    if per_token or layout.cp == 1:  # stock's average is also over CP ranks
        whole = stock_gradients(stock, run, main=1)
        found["main"] = distance(whole, side)
        found["whole"] = distance(our_step(run, same_loss, main=1), whole)
    return found


DIVISOR = 5.0
FOLLOWERS = {
    "constant": Aggregation("constant", divisor=DIVISOR),
    "sample_mean": Aggregation("sample_mean"),
    "token_mean": Aggregation("token_mean"),
}
SCALE = 8.0
"""A loss scale as for fp16: the optimizer divides by it."""


def weight_sums(sequences):
    """Sum the weights of all tokens, as the modes' papers write them."""
    samples = {}
    for sequence in sequences:
        samples.setdefault(sequence.sample, []).extend(sequence.counted)
    active = [sum(mask) for mask in samples.values()]
    return {
        "constant": sum(active) / (len(active) * DIVISOR),
        "sample_mean": sum(1 for n in active if n) / len(active),
        "token_mean": 1.0,
    }


def scaled(found, factor):
    return [gradient * factor for gradient in found]


def follow(layout):
    for loss_scaling in LOSS_SCALINGS:
        yield [loss_scaling], of_followers(layout, per_token=loss_scaling == "per_token")


def of_followers(layout, *, per_token):
    stock = stock_model(layout, per_token=per_token)
    run = run_of(layout, per_token=per_token)
    side = stock_gradients(stock, run, main=0)
    wanted = weight_sums(run.reference.sequences)
    config = run.chunks[0].config
    found = {"there": all(bool(g.any()) for g in side), "wanted": wanted}
    for name, aggregation in FOLLOWERS.items():
        options = Options(side_losses="follow", probe=False, rejects_tokens=True)
        run._aggregators[aggregation] = LossAggregator(run.chunks, aggregation, options=options)
        case = Case(aggregation=aggregation)
        run._step(case, poison=False, main=0.0)
        found[name] = distance(gradients(run.chunks), scaled(side, wanted[name]))
        config.grad_scale_func = lambda loss: SCALE * loss
        run._step(case, poison=False, main=0.0)
        found[f"{name}, loss scale"] = distance(
            gradients(run.chunks), scaled(side, SCALE * wanted[name])
        )
        config.grad_scale_func = None
        config.moe_grad_scale_func = config.mtp_grad_scale_func = lambda: 3.0
        run._step(case, poison=False, main=0.0)
        found[f"{name}, own scale"] = distance(
            gradients(run.chunks), scaled(side, 3 * wanted[name])
        )
        config.moe_grad_scale_func = config.mtp_grad_scale_func = None
    # constant is token_mean times W: with side losses that follow, so is the whole gradient.
    run._step(Case(aggregation=FOLLOWERS["token_mean"]), poison=False)
    token_mean = gradients(run.chunks)
    found["main"] = distance(token_mean, side)
    run._step(Case(aggregation=FOLLOWERS["constant"]), poison=False)
    found["whole"] = distance(gradients(run.chunks), scaled(token_mean, wanted["constant"]))
    found["left"] = config.moe_grad_scale_func is None and config.mtp_grad_scale_func is None
    return found


def slices(layout):
    """Slice a batch for this rank as Megatron-Core and as the layout does."""
    place = {"cp_size": layout.cp, "cp_rank": parallel_state.get_context_parallel_rank()}
    live = parallel_state.get_context_parallel_group()
    # Later releases ask for `is_hybrid_cp` too, and take no group for the whole world.
    parameters = inspect.signature(get_batch_on_this_cp_rank).parameters
    calls = (
        [{"cp_group": live, "is_hybrid_cp": False}]
        if "is_hybrid_cp" in parameters
        else [{"cp_group": None}, {"cp_group": live}]
    )
    for sequences, length in ((1, 2 * layout.cp), (3, 8 * layout.cp), (2, 10 * layout.cp)):
        whole = {
            "tokens": torch.arange(sequences * length).view(sequences, length),
            "loss_mask": torch.arange(sequences * length).view(sequences, length) % 3 % 2,
            "features": torch.arange(sequences * length * 4).view(sequences, length, 4),
        }
        ours = Layout.bshd_zigzag(sequences, length, **place)
        for number, call in enumerate(calls):
            cut = get_batch_on_this_cp_rank(dict(whole), **call)
            found = {
                name: torch.equal(cut[name].flatten(0, 1), value.flatten(0, 1)[ours.positions])
                for name, value in whole.items()
            }
            found["shorter"] = cut["tokens"].shape == (sequences, length // layout.cp)
            yield (sequences, length, number), found


def trained(run, mode):
    """Train a step; return the loss, which every rank must report alike, and the gradient."""
    measured = run.train(Case(aggregation=Aggregation(mode)))
    (loss,) = {values["loss"] for values in measured.values}
    return loss, gradients(run.chunks)[0]


def parity(layout):
    # Stock counts the training mask; the plan counts the counting mask: take them equal.
    sequences = [replace(sequence, counted=sequence.trained) for sequence in make_sequences()]
    for loss_scaling in LOSS_SCALINGS:
        run = run_of(layout, per_token=loss_scaling == "per_token", sequences=sequences)
        config = run.chunks[0].config
        before = dict(vars(config))
        (reports, (stock,)), (again, (after,)) = (
            stock_step(run.chunks, run.batches, layout) for _ in range(2)
        )
        loss = reported(reports, "loss")
        found = {
            "untouched": torch.equal(stock, after) and vars(config) == before,
            "loss": [loss, reported(again, "loss"), trained(run, "token_mean")[0]],
            "token_mean": distance([gradients(run.chunks)[0]], [stock]),
            "describes": run.aggregator.describe(),
        }
        # Megatron's grad_scale_func runs on top of what mb.outputs returns.
        found["unscaled"], unscaled = trained(run, "prompt_mean")
        scale = torch.tensor([1024.0])  # of one dimension, as that of Megatron's scalers
        config.grad_scale_func = lambda loss, scale=scale: loss * scale
        found["scaled"], scaled = trained(run, "prompt_mean")
        found["exactly"] = bool(unscaled.any()) and torch.equal(scaled, unscaled * 1024)
        yield [loss_scaling], found


LENGTH = 16
SIDE_LOSSES = {
    "aux": {"moe_z_loss_coeff": None},
    "sequence aux": {
        "moe_z_loss_coeff": None,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "z": {"moe_router_load_balancing_type": "none"},
    "MTP": {},
}


def batches(cp_size, cp_rank):
    """Draw two microbatches of three sequences, and slice them as Megatron does unpacked
    sequences.
    """
    draw = torch.Generator().manual_seed(5)
    held = zigzag([0, LENGTH], cp_size, cp_rank)
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=draw)
        mask = (torch.rand((3, LENGTH), generator=draw) < 0.6).float()
        positions = torch.arange(LENGTH).expand(3, LENGTH)
        whole = (tokens[:, :-1], tokens[:, 1:], mask, positions)
        yield [values[:, held].contiguous() for values in whole]


def side_loss(iterator, model):
    """Make the main loss 0, so that the gradient is the side loss's."""
    tokens, labels, mask, positions = next(iterator)
    output = model(tokens, positions, None, labels=labels, loss_mask=mask)

    def loss_func(output):
        num_tokens = mask.sum().int()
        loss = (output.view(-1) * mask.view(-1)).sum() * 0
        return loss, num_tokens, {"x": torch.stack([loss.detach(), num_tokens.float()])}

    return output, loss_func


def notes(layout):
    """Return the gradient norm of each side loss that the layout has, and the line on it."""
    own_batches = list(batches(layout.cp, parallel_state.get_context_parallel_rank()))
    for name, options in SIDE_LOSSES.items():
        if layout.mtp != (name == "MTP"):
            continue
        for loss_scaling in LOSS_SCALINGS:
            config = config_of(layout, per_token=loss_scaling == "per_token")
            vars(config).update(options)
            chunks = wrapped_chunks(layout, config)
            note = LossAggregator(chunks, "token_mean", options=Options(probe=False)).note
            run_schedule(side_loss, chunks, own_batches)
            norm = torch.cat(gradients(chunks)).norm().item()
            yield (name, loss_scaling), {"norm": norm, "note": note}


def main(what, job):
    for layout in each_layout(job):
        for key, found in globals()[what](layout):
            print_row([str(layout), key, of_ranks(found)])


if __name__ == "__main__":
    main(*sys.argv[1:])
