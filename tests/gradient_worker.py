"""Gradient cases of one layout on real Megatron-Core; run under torch.distributed.run.

``reference FILE`` (one process): every case's loss and gradients, from single unpacked rows
through stock attention and ``oracle.py``. ``compare FILE``: the same cases through packed
microbatches, the package and Megatron's schedule; rank 0 prints one JSON line a case.
"""

import argparse
import itertools
import json
import sys

import oracle
import tiny_gpt
import torch
import torch.distributed as dist
from gradient_cases import BETA, CASES
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from step_data import deal, make_rows

import megatron_lossagg.cpu as cpu
from megatron_lossagg import Aggregation, Layout, MegatronContract, Sequences, plan_step

ROW_LENGTH = 28  # of unpacked rows: the longest, padded to a multiple of 2 CP


def aggregation_of(case):
    return Aggregation(case.split(",")[0].split(" ")[0], **CASES[case])


def layouts_of(microbatches, dp):
    """M of every data-parallel rank: the same everywhere, or ``3+5`` spelled out."""
    return (
        [int(m) for m in microbatches.split("+")]
        if "+" in microbatches
        else [int(microbatches)] * dp
    )


def reference(path):
    tiny_gpt.start()
    config = tiny_gpt.config_of(parallel=False)
    model = tiny_gpt.gpt(config, get_gpt_layer_local_spec())
    rows = make_rows()
    results = {}
    for case in CASES:
        mode = aggregation_of(case).mode
        deals = (
            itertools.product((1, 2, 3), ("1", "3", "4")) if "microbatch" in case else [(1, "1")]
        )
        deals = [*deals, (2, "3+5")] if "microbatch" in case else deals
        for dp, microbatches in deals:
            ms = layouts_of(microbatches, dp)
            keys = deal(rows, dp, ms)
            live = []
            for row, key in zip(rows, keys, strict=True):
                tokens = torch.tensor(row["tokens"])
                position = torch.arange(len(tokens) - 1)
                logits = model(tokens[None, :-1], position[None], None)[0]
                logp = torch.log_softmax(logits, dim=-1)[position, tokens[1:]]
                live.append({**row, "microbatch": key, "logp": list(logp)})
            losses = [
                {**r, "x": [-c * v for c, v in zip(r["coefficient"], r["logp"], strict=True)]}
                for r in live
            ]
            options = {"microbatches": ms, **CASES[case]}
            loss = oracle.step_loss(mode, losses, **options)
            if "+" in case:
                squares = [{**r, "x": [v * v for v in r["logp"]]} for r in live]
                loss = loss + BETA * oracle.step_loss("token_mean", squares)
            named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
            grads = torch.autograd.grad(loss, list(named.values()))
            assert all(grad.norm() > 1e-6 for grad in grads), case
            counted = [{**r, "trained": r["counted"]} for r in losses]
            results[key_of(case, dp, microbatches)] = {
                "loss": loss.item(),
                "weight_sum": oracle.weight_sum(mode, losses, **options),
                "weight_expected": oracle.weight_sum(mode, counted, **options),
                "grads": {n: g.detach() for n, g in zip(named, grads, strict=True)},
            }
    torch.save(results, path)


def key_of(case, dp, microbatches):
    return (case, dp, microbatches) if "microbatch" in case else (case, 1, "1")


def compare(path, arguments):
    dtype = torch.float32 if arguments.float32 else torch.float64
    tiny_gpt.start(tp=arguments.tp, pp=arguments.pp, cp=arguments.cp, dtype=dtype)
    results = torch.load(path)
    for per_token in (False, True):
        config = tiny_gpt.config_of(per_token=per_token, sequence_parallel=arguments.sp)
        chunk = tiny_gpt.wrapped(
            config,
            use_distributed_optimizer=arguments.distributed_optimizer,
            # Megatron refuses an average in the collective in the per-token regime.
            average_in_collective=arguments.average_in_collective and not per_token,
        )
        contract = MegatronContract.read([chunk])
        for microbatches, case in itertools.product(arguments.microbatches, CASES):
            want = results[key_of(case, contract.dp_size, microbatches)]
            ms = layouts_of(microbatches, contract.dp_size)
            got = train_step(case, chunk, contract, ms, layout=arguments.layout)
            if arguments.distributed_optimizer:
                gather_gradients(chunk)
            grad_error = gradient_error(chunk, want["grads"])
            errors = {
                name: abs(value - want[name]) / max(abs(want[name]), 1e-30)
                for name, value in got.items()
            }
            worst = torch.tensor([grad_error, errors.get("loss", 0.0)], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            evaluated = evaluate(case, chunk, contract, ms, arguments.layout)
            gauge = max(errors.get("weight_sum", 0.0), errors.get("weight_expected", 0.0))
            evaluation = abs(evaluated - want["loss"]) / abs(want["loss"]) if got else 0.0
            others = torch.tensor([gauge, evaluation], dtype=torch.float64)
            dist.all_reduce(others, op=dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                line = {
                    "case": case,
                    "M": microbatches,
                    "regime": contract.regime,
                    "gradient": worst[0].item(),
                    "loss": worst[1].item(),
                    "gauge": others[0].item(),
                    "evaluation": others[1].item(),
                }
                print("CASE " + json.dumps(line), flush=True)


def train_step(case, chunk, contract, ms, *, layout="thd", forward_only=False):
    """Run one schedule call; returns the reported values on the last pipeline stage."""
    rows = make_rows()
    keys = deal(rows, contract.dp_size, ms)
    rank = dist.get_rank(contract.dp_group)
    m = ms[rank]
    mine = [index for index, key in enumerate(keys) if key[0] == rank]
    here = [rows[index] for index in mine]
    in_microbatch = [
        [i for i, index in enumerate(mine) if keys[index][1] == number] for number in range(m)
    ]
    batches = [
        tiny_gpt.microbatch(
            here,
            indices,
            contract.cp_size,
            contract.cp_rank,
            row_length=ROW_LENGTH if layout == "bshd" else None,
        )
        for indices in in_microbatch
    ]
    last = parallel_state.is_pipeline_last_stage()
    if last:  # the stages without labels need no plan
        sequences = Sequences(
            active_tokens=[sum(row["counted"]) for row in here],
            sample=[row["sample"] for row in here],
            prompt=[row["prompt"] for row in here],
            microbatch=[keys[index][1] for index in mine],
            num_microbatches=m,
        )
        plan = plan_step(aggregation_of(case), sequences, group=contract.dp_group)
        step = contract.step(plan, num_microbatches=m, forward_only=forward_only)

    def forward_step(iterator, model):
        batch = next(iterator)
        megatron_loss = torch.get_default_dtype() == torch.float32
        labels = batch["labels"] if megatron_loss else None
        output = model(
            batch["tokens"],
            batch["positions"],
            None,
            labels=labels,
            packed_seq_params=batch["packed"],
        )

        def loss_func(output):
            if megatron_loss:
                nll = output.reshape(-1)
            else:
                picked = batch["labels"].reshape(-1, 1)
                logits = output.reshape(-1, output.size(-1))
                nll = -torch.log_softmax(logits, dim=-1).gather(1, picked).squeeze(1)
            # What stands at a masked position must not matter.
            nll = nll.masked_fill(batch["masked_here"], torch.inf)
            mask = batch["mask_here"] if layout == "local" else batch["mask"]
            pg = plan.reducer(batch["rows"], mask, layout_of(batch, contract, layout))
            loss = pg(nll * batch["coefficient"])
            if "+" in case:
                loss = loss + BETA * pg.under("token_mean")(nll.square())
            return step.returns(loss, pg, report={"loss": loss})

        return output, loss_func

    forward_data = tiny_gpt.run_schedule(forward_step, chunk, batches, forward_only=forward_only)
    if not last:
        return {}
    step.close()
    names = {
        "loss": "loss",
        "weight_sum": "lossagg/weight_sum",
        "weight_expected": "lossagg/weight_expected",
    }
    if len(set(ms)) > 1:  # reported values assume one M
        return {}
    return {name: tiny_gpt.reported(forward_data, key) for name, key in names.items()}


def layout_of(batch, contract, name):
    """The package's description of how a batch was sliced."""
    place = {"cp_size": contract.cp_size, "cp_rank": contract.cp_rank}
    if name == "bshd":
        return Layout.bshd_zigzag(len(batch["rows"]), ROW_LENGTH, **place)
    if name == "local":
        return Layout.local(batch["offsets"].diff() // contract.cp_size, **place)
    return contract.thd(batch["offsets"])


def evaluate(case, chunk, contract, ms, layout):
    """The loss that a forward-only schedule call reports."""
    with torch.no_grad():
        got = train_step(case, chunk, contract, ms, layout=layout, forward_only=True)
    return got.get("loss", 0.0)


def gather_gradients(chunk):
    """Bring together what the distributed optimizer's reduce-scatter left on each rank."""
    size, rank = dist.get_world_size(chunk.dp_cp_group), dist.get_rank(chunk.dp_cp_group)
    for bucket in itertools.chain(*(buffer.buckets for buffer in chunk.buffers)):
        pieces = bucket.grad_data.view(size, -1)
        mine = pieces[rank].clone()
        pieces.fill_(torch.nan)
        dist.all_gather(list(pieces), mine, group=chunk.dp_cp_group)


def gradient_error(chunk, want):
    """Largest over this rank's parameters of norm(g - g_ref) / norm(g_ref)."""
    errors, names = [0.0], []
    for shard in cpu.named_shards([chunk]):
        expected = shard.cut(want[shard.name]).double()
        assert expected.norm() > 1e-9, shard.name
        got = shard.parameter.main_grad.double()
        errors.append(((got - expected).norm() / want[shard.name].double().norm()).item())
        names.append(shard.name)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, names)
    assert set(itertools.chain(*every)) == set(want), "a parameter of the model was not compared"
    return max(errors)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("reference", "compare"))
    parser.add_argument("path")
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--layout", choices=("thd", "bshd", "local"), default="thd")
    parser.add_argument("--microbatches", nargs="+", default=["1", "3", "4"])
    for name in ("float32", "sp", "distributed-optimizer", "average-in-collective"):
        parser.add_argument(f"--{name}", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "reference":
        reference(arguments.path)
    else:
        compare(arguments.path, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
