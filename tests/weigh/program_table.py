"""A table of programs whose true weights are known.

A row runs a program and returns what was weighed, the gradient that was trained, and each token's
weight by hand. The gradient is compared with the weights by hand, and what was weighed with both.
``@row`` says what the report has to say.
"""

import json
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist
import toy
from megatron.core import parallel_state

from megatron_lossagg.errors import ContractError
from megatron_lossagg.weigh.report import as_json

ROWS = {}


@dataclass
class Row:
    run: object
    trains: str | None = None
    factor: float | None = None
    says: str = ""
    """Words of the report, or of what it is refused for."""
    is_refused: bool = False
    is_known: bool = True
    is_measured: bool = True
    is_zeroed: bool = False
    """Whether calls are left out, for gradients were zeroed after they trained."""
    term: str = ""
    """The one that is compared, if there are several."""
    names: list | None = None
    """Of the terms."""
    on: int | None = None
    """Only on this number of processes."""
    sizes: dict = field(default_factory=dict)
    """Of Megatron's groups; without, all is data parallel."""


def row(name, **expected):
    def put(run):
        assert name not in ROWS, name
        ROWS[name] = Row(run, **expected)
        return run

    return put


def rounding():
    """Return how far a weight may be off, relative, of a model in the default dtype."""
    return 1e-9 if torch.get_default_dtype() == torch.float64 else 2e-6


def run(one):
    """Run a row on all ranks, and compare."""
    rtol = rounding()
    if one.is_refused:
        try:
            weighing, *_ = one.run()
            found = weighing.weighed()
        except ContractError as error:
            found = error
        assert isinstance(found, ContractError), found
        assert one.says in str(found)
        return
    found, gradient, weights = one.run()
    if weights is not None:
        np.testing.assert_allclose(gradient, weights, rtol=rtol, atol=1e-15)
    steps = found if isinstance(found, dict) else found.terms()
    step = steps[one.term] if one.term else next(iter(steps.values()))
    assert len(steps) == 1 or one.term
    assert one.names in (None, [*steps])
    said = " ".join(str(step).split())
    assert (step.trains, bool(step.unknown)) == (one.trains, not one.is_known), said
    assert one.says in said, said
    assert bool(step.zeroed) == one.is_zeroed, said
    assert json.loads(json.dumps(as_json(step, number=1)))["trains"] == step.trains
    assert step.is_measured == one.is_measured, said
    assert not one.is_known or ("could not be measured" in said) != one.is_measured
    if one.factor is not None:
        assert step.factor == pytest.approx(one.factor)
    if one.is_known and weights is not None:
        at, weights = 0, weights[weights != 0]
        for s in step.sequences:
            part, at = weights[at : at + s.tokens], at + s.tokens
            values = [s.weight_sum, s.weight_min, s.weight_max]
            np.testing.assert_allclose(values, [part.sum(), part.min(), part.max()], rtol=rtol)
        assert at == len(weights)


def main():
    """Run the rows on all ranks, or those with one of the words that were passed in the name."""
    only = sys.argv[1:]
    for name, one in ROWS.items():
        if only and not any(word in name for word in only):
            continue
        if one.on not in (None, toy.world()):
            continue
        if one.sizes:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(**one.sizes)
        try:
            run(one)
            failed = ""
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        if one.sizes:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()
        every = [None] * toy.world()
        dist.all_gather_object(every, failed)
        if dist.get_rank() == 0:
            print(f"FAILED {name}: {every}" if any(every) else f"PASSED {name}", flush=True)
