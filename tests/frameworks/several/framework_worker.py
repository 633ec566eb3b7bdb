"""The integration of a framework on live Megatron-Core without it: ``NAME_live.py``.

``framework_worker.py REFERENCE NAME`` on DP 2 x CP 2. The framework's own code runs in ``make
test-frameworks`` and on checkouts.
"""

import importlib
import itertools
import sys

import framework_step
import live_step
import tiny_gpt
import torch
import torch.distributed as dist
from live_step import CP, DP, gathered_log_probs
from megatron.core import parallel_state
from ranks import leave


def compare(path, framework):
    saved = torch.load(path)
    steps = [framework_step.samples()[rank::DP] for rank in range(DP)]
    integration = importlib.import_module(f"{framework}_live").Live(steps, dp_size=DP)
    # A trainer may be a process of its own: it has the whole step and no process group.
    prepared = {case: integration.prepare(case) for case in integration.cases}
    tiny_gpt.start(cp=CP)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=integration.per_token))
    for case, m in itertools.product(integration.cases, (1, 3)):
        sequences = prepared[case][parallel_state.get_data_parallel_rank()]
        integration.begin(case, sequences, m)

        def forward_step(iterator, model, m=m, case=case):
            batch = next(iterator)
            logits, read = gathered_log_probs(model, batch, integration.sums_gradients)

            def loss_func(logits):
                return integration.returned(integration.loss(case, batch, read(logits), m))

            return logits, loss_func

        tiny_gpt.run_schedule(forward_step, chunk, [sequences[first::m] for first in range(m)])
        numbers = [[one["number"] for one in rank] for rank in steps]
        places = {n: (r, i % m) for r, rank in enumerate(numbers) for i, n in enumerate(rank)}
        by = integration.sample_of(case)
        aggregation = framework_step.CASES.get(case) or live_step.OTHERS[case]
        _, grads = framework_step.expected(
            saved, {"pg": aggregation}, by=by, places=places, microbatches=[m] * DP
        )
        worst = framework_step.worst_error(chunk, grads)
        assert worst < 1e-12, (case, worst)
        if dist.get_rank() == 0:
            print(f"{case}, M = {m}: the reference, {worst:.1e}", flush=True)
    integration.refuse()


if __name__ == "__main__":
    compare(sys.argv[1], sys.argv[2])
    leave()
