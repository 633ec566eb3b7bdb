"""Random steps on 1 to 4 ranks: each weight bit by bit, expected sums, counts and messages.

    python tests/reduction/golden_steps.py

writes what the package computes now to ``golden_steps.json.gz``, which ``test_golden_steps.py``
compares. The file was written before counting became one table, and is written anew only where a
weight or a message is changed on purpose. It names the machine that wrote it: ``math.pow`` may
differ in its last bit elsewhere.
"""

import gzip
import hashlib
import json
import platform
import random
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

from steps import Threads, in_threads

from megatron_lossagg import Aggregation, Options, Sequences, StepTotals
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.reduction import plan as plans
from megatron_lossagg.reduction.modes import MODES as MODES_OF

FILE = Path(__file__).with_name("golden_steps.json.gz")
NUM_STEPS = 500
PER_STEP = 4
"""Aggregations of a step: the first is planned, the others are of the same plan."""


def machine():
    """Name what a last bit may depend on."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def of_prompts(c):
    return 1 / (c.P * c.k_p * c.n_b)


def of_rows(c):
    return c.R_b * c.n_s / (c.N * c.R)


def of_groups(c):
    return c.k_c / (c.B * c.n_c)


def of_turns(c):
    return c.columns["turns"] / (c.B + c.columns["score"].max(initial=0.0))


OWN = (of_prompts, of_rows, of_groups, of_turns)
for _own in OWN:
    _own.__module__ = "golden"  # as a script and as a module, for ranks' messages
MODES = (
    ("token_mean", {}),
    ("prompt_mean", {}),
    ("sample_mean", {}),
    ("token_sum", {"divisor": 3.0}),
    ("sample_sum", {}),
    ("token_sum", {}),
    ("constant", {"divisor": 40.0}),
    ("length_power", {"exponent": 0.3}),
    ("length_power", {"exponent": 1.7}),
    ("balanced", {}),
    ("row_mean", {}),
    ("microbatch_token_mean", {}),
)


def an_aggregation(r, given):
    """Draw a mode, or weights of one's own, and what is counted; most can be of the step."""
    has_weights = "token_weight_sums" in given
    numbers = {
        "count_empty": r.random() < 0.6,
        "count": "weights" if r.random() < (0.6 if has_weights else 0.03) else "mask",
        "count_left_out": r.random() < 0.3,
    }
    wanted = {"prompt_mean": "prompt", "balanced": "group", "microbatch_token_mean": "microbatch"}
    wanted |= {of_prompts: "prompt", of_groups: "group", of_turns: "columns"}
    if r.random() < 0.2:
        function = OWN[int(r.random() * len(OWN))]
        if wanted.get(function, "active_tokens") in given or r.random() < 0.1:
            return Aggregation(weights=function, **numbers)
    mode, more = MODES[int(r.random() * len(MODES))]
    if wanted.get(mode, "active_tokens") not in given and r.random() < 0.9:
        mode, more = MODES[int(r.random() * 4) * 2]  # which needs no ids
    return Aggregation(mode, **numbers, **more)


def sequences_of_ranks(r, num_ranks, *, plain):
    """Draw what each rank passes to :class:`Sequences`; ``plain``: counts and microbatches."""

    def number(least, most):
        return least + int(r.random() * (most - least + 1))

    def has(p):
        return not plain and r.random() < p

    given = {
        name: has(p)
        for name, p in (
            ("sample", 0.6), ("prompt", 0.8), ("group", 0.5), ("token_weight_sums", 0.45),
            ("sequence_weight", 0.4), ("left_out", 0.35), ("columns", 0.5), ("num_padding", 0.3),
        )
    }  # fmt: skip
    has_microbatches = r.random() < 0.7
    style, far = number(0, 2), 10 ** number(1, 12)
    num_prompts, num_samples, m = number(1, 5), number(1, 8), number(1, 3)
    lengths = (0, 0, 1, 3, 7, 20, 513, number(1, 4000))

    def an_id(kind, value):
        return (value, value * far - 7, f"{kind}/{value}")[style]

    ranks = []
    for _ in range(num_ranks):
        n = number(0, 7)
        active = [lengths[number(0, len(lengths) - 1)] for _ in range(n)]
        sample = [number(1, num_samples) for _ in range(n)]
        prompt = [1 + s % num_prompts for s in sample]
        found = {
            "sample": [an_id("s", s) for s in sample],
            "prompt": [an_id("p", p) for p in prompt],
            "group": [an_id("g", 2 * p + s % 2) for p, s in zip(prompt, sample, strict=True)],
            "token_weight_sums": [
                t * r.random() if t and r.random() < 0.9 else 0.0 for t in active
            ],
            "sequence_weight": [(0.0, 0.5, 1.0, 2.0, 1 / 3)[number(0, 4)] for _ in active],
            "left_out": [r.random() < 0.3 for _ in active],
            "columns": {
                "turns": [float(number(1, 4)) for _ in active],
                "score": [r.random() - 0.5 for _ in active],
            },
            "num_padding": number(0, 3),
        }
        found = {name: one for name, one in found.items() if given[name]}
        if has_microbatches:
            found["microbatch"] = sorted(number(0, m - 1) for _ in active)
        ranks.append({"active_tokens": active, "num_microbatches": m} | found)
    return ranks


def a_step(seed):
    """Draw a step: what each rank passes, its totals, and how one rank may disagree."""
    r = random.Random(f"golden {seed}")
    num_ranks = 1 + int(r.random() * 4)
    kind = r.random()
    plain = kind < 0.3
    ranks = sequences_of_ranks(r, num_ranks, plain=plain)
    aggregations = [an_aggregation(r, ranks[0]) for _ in range(PER_STEP)]
    options = {"shadow": ("sample_sum", "row_mean")} if r.random() < 0.1 else {}
    calls = [
        {"aggregation": aggregations[0], "sequences": one, "options": options} for one in ranks
    ]
    if kind > 0.85 and num_ranks > 1:
        disagree(r, calls)
    totals = {}
    if plain and r.random() < 0.5:
        tokens = [n for one in ranks for n in one["active_tokens"]]
        known = {
            "active_tokens": sum(tokens),
            "samples": len(tokens),
            "active_samples": sum(map(bool, tokens)),
            "prompts": len(tokens),
            "active_prompts": sum(map(bool, tokens)),
        }
        totals = {name: n for name, n in known.items() if r.random() < 0.8}
        if r.random() < 0.15:
            totals["samples"] = int(r.random() * 4)
        if r.random() < 0.3:
            totals["microbatch_means"] = r.random() + 1
    # With a group totals are compared with the counts.
    has_group = not totals or r.random() < 0.5
    return calls, aggregations, totals, has_group


def disagree(r, calls):
    """Let one rank differ from the others in one thing."""
    call = calls[int(r.random() * len(calls))]
    own, n = call["sequences"], len(call["sequences"]["active_tokens"])
    which = int(r.random() * 12)
    if which == 0:
        call["aggregation"] = Aggregation("constant", divisor=41.5)
    elif which == 1:
        own["prompt"] = [str(one) for one in range(n)]
    elif which == 2:
        own.pop("sample", own.pop("microbatch", None))
    elif which == 3:
        own["samples_per_prompt"], own["prompt"] = 3, [1] * n
    elif which == 4:
        own["sample_count"] = n + 1
    elif which == 5:
        call["fault"] = "this rank has no data"
    elif which == 6:
        own["active_tokens"] = [*own["active_tokens"], -4]
    elif which == 7:
        call["options"] = {"empty_step": "error"}
    elif which == 8:
        for number, one in enumerate(calls):
            one["forward_only"], one["iteration"] = False, 4 + number
    elif which == 9:
        calls[0]["forward_only"], calls[-1]["forward_only"] = True, False
    elif which == 10:
        own["columns"] = {"reward": [0.5] * n}
    else:
        own["left_out"] = [2] * n


def floats(values):
    return [float(value).hex() for value in values]


def of_plan(plan, aggregation):
    """Return what a plan has under an aggregation: text, expected sum, weights; or a message."""
    try:
        plan = plan if aggregation == plan.aggregation else plan.under(aggregation)
        of_calls = replace(plan, num_calls=3)
        found = [str(plan.aggregation), plan.expected_weight, *floats(plan.weight_S)]
        found += ["over 3", of_calls.expected_weight, *floats(of_calls.weight_S)[:2]]
        found += ["deferred", *_deferred(plan)]
        return [one.hex() if isinstance(one, float) else one for one in found]
    except LossAggregationError as error:
        return str(error)


def _deferred(plan):
    if not MODES_OF[plan.aggregation.mode].total:
        return []
    try:
        call = replace(plan, total=1.0)
        return [plan.counted_total, call.expected_weight, *floats(call.weight_S)]
    except LossAggregationError as error:
        return [str(error)]


class Ranks(Threads):
    """Each step has a barrier of its own: totals are compared with counts in a first step."""

    @property
    def ranks(self):
        return None if self.group is None else (self.group[1], *range(self.size))


def result_of(seed):
    """Plan a step on all of its ranks at once."""
    calls, aggregations, totals, has_group = a_step(seed)

    def work(rank, group):
        call = dict(calls[rank])
        call["sequences"] = Sequences(**call["sequences"])
        call["options"] = Options(**call["options"])
        if totals:
            call["totals"] = StepTotals(**totals)
        if has_group and len(calls) > 1:
            call["group"] = group
        try:
            plan = plans.plan_step(**call)
        except LossAggregationError as error:
            return str(error)
        known = {f.name: getattr(plan.totals, f.name) for f in fields(StepTotals)}
        if known["microbatch_means"] is not None:
            known["microbatch_means"] = known["microbatch_means"].hex()
        counted = [str(plan.counted), *plan.counted.values()]
        return [known, counted, *(of_plan(plan, one) for one in aggregations)]

    results = in_threads(work, len(calls))
    drawn = hashlib.sha256(repr((calls, totals, has_group)).encode()).hexdigest()[:12]
    # What is the same on all ranks is said once.
    if all(result == results[0] for result in results):
        results = [f"{len(results)} ranks", results[0]]
    return [drawn, *results]


def all_results():
    """Plan every step; in one thread at a time but for its ranks."""
    own, plans.Exchange = plans.Exchange, Ranks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [result_of(seed) for seed in range(NUM_STEPS)]
    finally:
        plans.Exchange = own


def read():
    """Return the machine that wrote the file, and the steps."""
    found = json.loads(gzip.decompress(FILE.read_bytes()))
    return found["made on"], found["steps"]


if __name__ == "__main__":
    text = json.dumps({"made on": machine(), "steps": all_results()}, indent=0)
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{FILE.name}: {NUM_STEPS} steps, {FILE.stat().st_size} bytes")
