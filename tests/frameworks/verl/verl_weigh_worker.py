"""Weigh verl's own MegatronEngine, DP 2 x CP 2: stock, and under our modes.

``verl_weigh_worker.py PER_TOKEN``; the engine is that of ``verl_engine_worker.py``. Each term's
weights of every sequence are compared with loops over tokens.
"""

import sys
from functools import partial

import framework_step
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
import verl_engine_worker as engine_worker  # first: it chooses verl's engine
from device_double import DeviceDouble
from megatron.core import parallel_state
from ranks import leave

from megatron_lossagg import Aggregation
from megatron_lossagg.integrations import weigh_rl

COEFFICIENTS = {
    "pg_loss": 1.0,
    "kl_loss": framework_step.KL,
    "entropy_loss": -framework_step.ENTROPY,
}
STOCK = {
    "token-mean": Aggregation("token_mean"),
    "seq-mean-token-mean": Aggregation("sample_mean"),
    "seq-mean-token-sum": Aggregation("sample_sum"),
}
OURS = ("token_mean", "sample_mean", "constant", "prompt_mean")


def by_hand(aggregation):
    """Return every sequence's uid, tokens and weight of a token, of data-parallel rank and all."""
    step = framework_step.samples()
    weights = framework_step.weights(aggregation, by="number")
    return sorted(
        (number % 2, step[number]["uid"], sum(step[number]["mask"]), weight)
        for number, weight in weights.items()
    )


def assert_weighed(terms, aggregation, *, factor=1.0):
    assert terms.keys() == COEFFICIENTS.keys()
    for name, step in terms.items():
        found = sorted(
            (one.dp_rank, one.name, one.tokens, one.weight_sum / one.tokens / COEFFICIENTS[name])
            for one in step.sequences
        )
        wanted = by_hand(aggregation)
        assert [one[:3] for one in found] == [one[:3] for one in wanted]
        for got, want in zip(found, wanted, strict=True):
            assert got[3] == pytest.approx(want[3] * factor, rel=2e-8), (name, got)  # its own 1e-8
        for one in step.sequences:
            assert one.weight_max == pytest.approx(one.weight_min, rel=1e-10)


def gradient(engine, chunk, config):
    """Run a step of verl's, and return what it trains."""
    import verl.workers.utils.losses as losses

    sequences = framework_step.samples()[parallel_state.get_data_parallel_rank() :: 2]
    batch, _ = engine_worker.batch_of(sequences, num_microbatches=3, with_uid=True, odd=0)
    chunk.zero_grad_buffer()
    with DeviceDouble():
        engine.forward_backward_batch(batch, partial(losses.ppo_loss, config=config))
    return [parameter.main_grad.clone() for parameter in chunk.parameters()]


def weigh(per_token):
    tiny_gpt.start(cp=2)
    import verl.workers.utils.losses as losses

    engine, chunk = engine_worker.build(per_token)
    terms = {}
    config = engine_worker.actor_config("vanilla")
    unweighed = gradient(engine, chunk, config)
    weighing = weigh_rl.install(
        "verl", steps=1000, report=lambda step, _, term: terms.update({term: step})
    )
    weighed = gradient(engine, chunk, config)
    assert all(torch.equal(one, other) for one, other in zip(weighed, unweighed, strict=True))
    sequences = framework_step.samples()[parallel_state.get_data_parallel_rank() :: 2]

    def trained(config, m, odd):
        batch, tokens = engine_worker.batch_of(
            sequences, num_microbatches=m, with_uid=True, odd=odd
        )
        terms.clear()
        chunk.zero_grad_buffer()
        with DeviceDouble():
            engine.forward_backward_batch(batch, partial(losses.ppo_loss, config=config))
        counted = torch.tensor([tokens, tokens - m * odd])
        dist.all_reduce(counted, group=parallel_state.get_data_parallel_group())
        return (counted[0] / counted[1]).item()

    for m in (1, 3):
        for mode, aggregation in STOCK.items():
            for odd in range(1 + per_token):
                config = engine_worker.actor_config("vanilla")
                config = type(config)(**{**vars(config), "loss_agg_mode": mode})
                factor = trained(config, m, odd)
                if dist.get_rank() == 0:
                    assert (factor > 1) == odd
                    assert_weighed(terms, aggregation, factor=factor)
                    print(f"stock {mode}, M = {m}, {factor:.6f}: the reference", flush=True)
        for mode in OURS:
            trained(engine_worker.actor_config(f"lossagg_{mode}"), m, 0)
            if dist.get_rank() == 0:
                assert_weighed(terms, framework_step.CASES[mode])
                print(f"lossagg_{mode}, M = {m}: the reference", flush=True)
    assert weighing.num_steps == 1 + 2 * (len(STOCK) * (1 + per_token) + len(OURS))


if __name__ == "__main__":
    weigh(per_token=int(sys.argv[1]))
    leave()
