"""What makes the weights of a step: a kind of mean times a factor, which explains every token.

A kind is a mean over places (microbatches, ranks, all) of token means or sample means, each place
with its share; a factor is a quotient of the sizes and counts of the step. Of all that explain the
step, those with the fewest factors are named.

NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_lossagg.weigh.ratios import constant, is_near, quotients

_SMALL = 64
"""A count below it may equal a number by chance."""
_MOST = 2
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The parts of sequences with a weight, ``[P]``, and the sizes of the step."""

    low_P: Array
    high_P: Array
    tokens_P: Array
    masked_P: Array
    """Of the mask."""
    padded_P: Array
    """Losses of its microbatch on its rank, padding included."""
    dp_rank_P: Array
    cp_rank_P: Array
    microbatch_P: Array
    sequence_P: Array
    m_P: Array
    """M of its rank."""
    sizes: Mapping[str, int]
    counts: Mapping[str, float]

    @staticmethod
    def of(ranks: Sequence[Any], f: float, *, num_tokens: float) -> Step:
        """Put the parts of ranks together; ``f``: what their weights are multiplied by."""
        pairs = [(rank, part) for rank in ranks for part in rank.parts if part.tokens]
        columns = np.array(
            [
                (
                    *(f * part.weight_min, f * part.weight_max, part.tokens),
                    part.tokens - part.outside + part.missed,
                    rank.padded.get(part.microbatch, 0),
                    *(part.dp_rank, part.cp_rank, part.microbatch, part.sequence),
                    rank.sizes["M"],
                )
                for rank, part in pairs
            ]
        ).T
        m = {rank.sizes["M"] for rank in ranks}
        sequences = {(part.dp_rank, part.microbatch, part.sequence) for _, part in pairs}
        masked = sum(part.missed - part.outside for rank in ranks for part in rank.parts)
        n = float(columns[2].sum())
        return Step(
            **dict(zip(_COLUMNS, columns, strict=True)),
            sizes={
                name: size
                for name, size in ranks[0].sizes.items()
                if name != "PP" and (name != "M" or len(m) == 1)
            },
            counts={
                "N": n,
                "B": len(sequences),
                "padded tokens": sum(sum(rank.padded.values()) for rank in ranks),
                "num_tokens": num_tokens if num_tokens != n else 0,
                "tokens of the mask": n + masked if masked else 0,
            },
        )


_COLUMNS = [name for name in Step.__dataclass_fields__ if name.endswith("_P")]


class Kind(NamedTuple):
    """A kind of mean."""

    words: str
    weight_P: Array
    cost: int = 0
    note: str = ""
    """What to add if it is trained as it is."""
    is_mode: bool = False


class _Place(NamedTuple):
    words: str
    columns: tuple[str, ...]
    """What parts of one place have in common."""
    sizes: tuple[str, ...]
    """How many places there are: the product of these."""
    only_if: str = ""
    """The size that tells it from another place, if it is not 1."""


PLACES = (
    _Place("microbatch", ("dp_rank_P", "microbatch_P"), ("M", "DP")),
    _Place(
        "microbatch and context-parallel rank",
        ("dp_rank_P", "microbatch_P", "cp_rank_P"),
        ("M", "DP", "CP"),
        "CP",
    ),
    _Place("microbatch of all ranks", ("microbatch_P",), ("M",), "DP"),
    _Place("data-parallel rank", ("dp_rank_P",), ("DP",), "DP"),
)


def kinds(step: Step) -> Iterator[Kind]:
    """List the kinds of means, with the weight of a token of each part."""
    n_P, one = step.tokens_P, np.ones(len(step.tokens_P))
    sequence = _numbers(step, ("dp_rank_P", "microbatch_P", "sequence_P"))
    b = float(sequence.max() + 1)
    yield Kind("token_mean", one / n_P.sum(), is_mode=True)
    yield Kind("sample_mean", 1 / (b * _sums(sequence, n_P)), is_mode=True)
    yield Kind("token_sum", one, cost=1, is_mode=True)
    yield Kind("sample_sum", one / b, cost=1, is_mode=True)
    if (step.masked_P != n_P).any():
        of_mask = b * np.maximum(_sums(sequence, step.masked_P), 1)
        yield Kind("sample_mean of the mask's counts", 1 / of_mask, cost=1, is_mode=True)
    for place in PLACES:
        if place.only_if and step.sizes.get(place.only_if, 1) == 1:
            continue  # it is one of the others
        number = _numbers(step, place.columns)
        n_place, b_place = _sums(number, n_P), _distinct(number, sequence)
        here = _numbers(step, (*place.columns, "dp_rank_P", "microbatch_P", "sequence_P"))
        of = {"token": n_place, "sample": b_place * _sums(here, n_P)}
        ranks = np.prod([step.sizes.get(name, 1) for name in place.sizes if name != "M"])
        means = ranks * (step.m_P if "M" in place.sizes else one)
        found, total = int(number.max()) + 1, round(float(means.max()))
        is_same = bool((means == means[0]).all())
        note = f"; {total - found} of {total} have no token" * (is_same and found < total)
        for name, count_P in of.items():
            words = f"a mean of one {name} mean per {place.words}"
            yield Kind(words, 1 / (means * count_P), note=note)
        padded_P = _sums_of_places(number, step.padded_P, step)
        for name, share_P in (("samples", b_place), ("padded tokens", padded_P)):
            whole = share_P[np.unique(number, return_index=True)[1]].sum()
            if place.words.startswith("microbatch") and whole:
                words = f"token means of each {place.words}, weighted by its {name}"
                yield Kind(words, share_P / whole / n_place, cost=1)
        words = f"sample means of each {place.words}, weighted by its tokens"
        yield Kind(words, n_place / n_P.sum() / of["sample"], cost=1)


def likely(step: Step, tolerance: float, *, is_mode: bool = False) -> list[str]:
    """Name what explains every token with the fewest factors, the first as the likely one.

    ``is_mode``: of a trained mode, so that only a mean without a factor explains it.
    """
    found: list[tuple[int, str]] = []
    unnamed: list[str] = []
    seen: set[str] = set()
    for kind in kinds(step):
        low, high = step.low_P / kind.weight_P, step.high_P / kind.weight_P
        factor = constant(float(low.min()), float(high.max()), tolerance)
        if factor is None or (is_mode and kind.is_mode):
            continue
        if is_near(factor, 1, tolerance):
            if not kind.is_mode and "1" not in seen:
                found.append((kind.cost, kind.words + kind.note))
                seen.add("1")
            continue
        number, names = quotients(factor, step.sizes, step.counts, tolerance=tolerance)
        of = f"a constant factor on {kind.words}: " if kind.is_mode else f"{kind.words}, times "
        if not names:
            unnamed.append(f"{of}{factor:.6g}")
        elif names[0] not in seen:
            seen.add(names[0])
            text = f"{of}{factor:.6g} = {' = '.join(names)}"
            if number == 1 and 1 / _SMALL < factor < _SMALL and names[0].split("/")[-1] in "NB":
                text += ", or a number of the script's own: weigh a second step"
            found.append((number + kind.cost, text))
    if is_mode or not found:
        return [text for _, text in found[:1]] or unnamed[: not is_mode]
    least = min(cost for cost, _ in found)
    first, *others = [text for cost, text in found if cost == least][:_MOST]
    return [first, *(f"or {text}" for text in others)]


def _numbers(step: Step, columns: Sequence[str]) -> Array:
    """Number the parts by what they have in common."""
    rows = np.stack([getattr(step, name) for name in columns])
    numbers: Array = np.unique(rows, axis=1, return_inverse=True)[1].reshape(-1)
    return numbers


def _sums(numbers: Array, values: Array) -> Array:
    """Sum over the parts with the same number, for each part."""
    sums: Array = np.bincount(numbers, values)[numbers]
    return sums


def _distinct(numbers: Array, of: Array) -> Array:
    """Count the distinct values of the parts with the same number, for each part."""
    pairs = np.unique(np.stack([numbers, of]), axis=1)
    counts: Array = np.bincount(pairs[0])[numbers]
    return counts.astype(float)


def _sums_of_places(numbers: Array, values: Array, step: Step) -> Array:
    """Sum a value of each microbatch on a rank over the places that it is in, for each part."""
    each = _numbers(step, ("dp_rank_P", "microbatch_P", "cp_rank_P"))
    at = np.unique(each, return_index=True)[1]
    sums: Array = np.bincount(numbers[at], values[at], minlength=int(numbers.max()) + 1)[numbers]
    return sums
