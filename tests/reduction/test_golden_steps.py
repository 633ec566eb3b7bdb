"""500 random steps weigh as they did before counting became one table, bit by bit."""

import json
from collections import Counter
from dataclasses import replace

import golden_steps
import numpy as np
import pytest

from megatron_lossagg.reduction.modes import MODES

MADE_ON, WANTED = golden_steps.read()


@pytest.fixture(scope="module")
def found():
    return json.loads(json.dumps(golden_steps.all_results()))


def test_every_weight_expected_sum_count_and_message_is_as_it_was(found):
    drawn = [[step[0] for step in steps] for steps in (WANTED, found)]
    assert drawn[0] == drawn[1], "other steps were drawn: their weights cannot be compared"
    differing = [*_differences(WANTED, found)]
    assert not differing, (
        f"{len(differing)} values differ, written on {MADE_ON} and compared on "
        f"{golden_steps.machine()}; the first: {differing[0]}"
    )


def test_the_steps_have_each_mode_on_one_to_four_ranks_and_many_messages():
    weights, messages, ranks = Counter(), Counter(), Counter()
    for _, *results in WANTED:
        same = isinstance(results[0], str) and results[0].endswith("ranks")
        ranks[int(results[0][0]) if same else len(results)] += 1
        for result in results[1:] if same else results:
            if isinstance(result, str):
                messages[result.split(":")[0]] += 1
                continue
            for one in result[2:]:
                name = (one if isinstance(one, str) else one[0]).split(":")[0].split()[0]
                (messages if isinstance(one, str) else weights)[name] += 1
    assert {mode for mode, _ in golden_steps.MODES} | {"own_weights"} <= set(weights)
    assert min(weights.values()) > 20, weights
    assert set(ranks) == {1, 2, 3, 4}
    assert sum(messages.values()) > 100, messages


def test_one_mode_whose_weights_change_in_the_last_bit_is_seen(monkeypatch):
    mode = MODES["row_mean"]
    monkeypatch.setitem(
        MODES,
        "row_mean",
        replace(mode, denominator=lambda c: np.nextafter(mode.denominator(c), np.inf)),
    )
    results = json.loads(json.dumps(golden_steps.all_results()))
    assert sum(one != wanted for one, wanted in zip(results, WANTED, strict=True)) > 20


def _differences(wanted, found, path=(), under=""):
    """List where values differ, with both.

    What was not known may be known now: the expected sum of microbatches' means with weights of
    sequences, since microbatches are gathered with the other columns.
    """
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        under = wanted[0] if wanted and isinstance(wanted[0], str) else under
        for index, pair in enumerate(zip(wanted, found, strict=True)):
            yield from _differences(*pair, (*path, index), under)
    elif wanted != found and not (wanted is None and under.startswith("microbatch_token_mean")):
        yield path, wanted, found
