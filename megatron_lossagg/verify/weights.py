"""The weights that arrived at the losses of a step, as they were weighed, against d loss / d y."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from megatron_lossagg.verify.causes import Facts
from megatron_lossagg.verify.reference_gradient import relative
from megatron_lossagg.weigh.compare import WeighedSequence


def weights_error(weighed: Sequence[WeighedSequence], facts: Facts, slope_Y: Tensor) -> float:
    """Return the largest relative error of a sequence's sum of weights.

    ``slope_Y``: d loss / d y by the reference. An error is relative to the sum of the sequence's
    absolute weights, of which rounding is a part also where they cancel, or, if that is small, to
    a thousandth of the largest one.
    """
    starts, assignment = facts.reference.starts, facts.assignment
    found = {(one.dp_rank, one.microbatch, one.sequence): one.weight_sum for one in weighed}
    wanted: dict[tuple[int, int, int], float] = {}
    sizes: dict[tuple[int, int, int], float] = {}
    places: Counter[tuple[int, int]] = Counter()
    for index, key in enumerate(assignment.keys):  # in their microbatch as in the step
        place, own_Y = (*key, places[key]), slope_Y[starts[index] : starts[index + 1]]
        wanted[place], sizes[place] = float(own_Y.sum()), float(own_Y.abs().sum())
        places[key] += 1
    floor = 1e-3 * max(sizes.values(), default=0.0)
    return max(
        relative(found.get(place, 0.0), wanted.get(place, 0.0), max(floor, sizes.get(place, 0.0)))
        for place in wanted.keys() | found.keys()
    )
