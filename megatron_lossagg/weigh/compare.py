"""From what all ranks have heard to sequences, modes, a verdict and its cause.

NumPy only; knows no groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.weigh.causes import Step, likely
from megatron_lossagg.weigh.measured import Added, measure
from megatron_lossagg.weigh.ratios import constant, counted_empty, equal_products, is_near, spread

COMPARED = ("token_mean", "sample_mean", "sample_sum", "token_sum", "microbatch_token_mean")
"""The modes that need nothing but the tokens of sequences and microbatches."""
NEEDS = {
    "prompt_mean": "prompt",
    "row_mean": "sample",
    "balanced": "group",
    "constant": "divisor",
    "length_power": "exponent",
}
"""What each of the others needs, by its name in :meth:`Weighing.losses` or :class:`Weighing`."""
_NOT_FINALIZED = (
    "it was not finalized: config.finalize_model_grads_func was not called while it ran, or "
    "a deferred step holds it"
)
_UNHEARD = (
    "its loss does not follow from what was heard: parameters have a gradient, and no token's loss "
    "has one; compute the loss from what losses() returns"
)
_OVER_SAMPLES = ("sample_mean", "sample_sum")
"""Those of them that divide by B, which may count sequences without a token."""
TOLERANCE = 1e-4
"""Relative, of float32 losses: a few roundings of the script's own."""
_FINEST = 1e-6
"""Relative: how well a weight in float32 is known at best."""


@dataclass(frozen=True, kw_only=True)
class WeighedSequence:
    """One sequence, whole over its context-parallel ranks; weights are a_t."""

    dp_rank: int
    """With dynamic context parallelism: the first rank of its microbatch's group."""
    microbatch: int
    sequence: int
    """Its segment in the microbatch."""
    name: str = ""
    """What a framework calls it, if it has a name for it."""
    tokens: int
    """Those with a weight."""
    weight_sum: float
    weight_min: float
    weight_max: float
    outside: int = 0
    """Those of them that are not in the mask."""
    missed: int = 0
    """Tokens of the mask without a weight."""
    sample: Hashable = None
    prompt: Hashable = None
    group: Hashable = None


@dataclass(frozen=True, kw_only=True)
class Part(WeighedSequence):
    """What one rank holds of one sequence of a microbatch; weights are g_t, 0 of no token."""

    cp_rank: int
    shown: str = ""
    """Its positions, if it is short: which have a weight, and which the mask has."""


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """What one rank has heard; ``sizes``: M, DP, CP, TP and PP."""

    sizes: Mapping[str, int]
    parts: Sequence[Part]
    num_tokens: float | None
    """What this rank passed to Megatron's finalize function."""
    is_divided: bool
    """Whether finalize divides by the sum of num_tokens."""
    is_finalized: bool
    counts: bool
    """Whether this rank's tokens count: last pipeline stage, first tensor-parallel rank."""
    tolerance: float
    """Relative: how far apart weights may be that are one."""
    factor: float = 1.0
    """What f should be but for the division by num_tokens."""
    added: Sequence[Added] = ()
    """The gradients of some parameters, at which f is measured."""
    padded: Mapping[int, int] = field(default_factory=dict)
    """How many losses each microbatch has here, padding included."""
    given: Mapping[str, float] = field(default_factory=dict)
    """``divisor`` and ``exponent``, if they were passed."""
    has_graph: bool = True
    """Whether its losses had a graph."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A weighed step."""

    sizes: Mapping[str, int]
    sequences: Sequence[WeighedSequence]
    """Those with a trained token."""
    num_empty: int
    """How many sequences, or segments of padding, have none."""
    counted_empty: int
    """How many of them the trained mode counts: those with the id of a sample of their own."""
    weight_sum: float
    modes: Mapping[str, tuple[float, float]]
    """Smallest and largest a_t / w_s of each mode that was compared."""
    lacks: Mapping[str, str]
    """What each mode that was not compared needs."""
    trains: str | None
    """The mode that is trained, if a_t / w_s is 1; the first of ``fits``. None if tokens outside of
    the mask have a weight, or some of the mask have none.
    """
    fits: Sequence[str]
    """All modes of which a_t / w_s is 1: in a step of equally long sequences, several."""
    unknown: str
    """Why the gradients are not those of these weights, in short, a colon, and in full; then
    ``fits`` is empty.
    """
    is_measured: bool
    """Whether f was measured; if not, it is what Megatron's or torch's own code does."""
    nearest: str
    """The mode whose ratios are closest to one another."""
    factors: Mapping[str, float]
    """a_t / w_s of each mode for which it is the same for all tokens."""
    relative: Sequence[float]
    """Each sequence's mean weight of a token over that of ``nearest``."""
    inside: float
    """The largest weight over the smallest in one sequence."""
    outside: int = 0
    """Tokens with a weight that are not in the mask."""
    missed: int = 0
    """Tokens of the mask without a weight."""
    shown: str = ""
    """The positions of a short sequence."""
    causes: Sequence[str] = field(default_factory=tuple)
    """What explains the numbers, by name."""

    def __str__(self) -> str:
        """Return the report that ``lossagg weigh`` prints."""
        from megatron_lossagg.weigh.report import text

        return text(self, advises=False)

    def fits_mode(self, mode: str) -> bool:
        """Whether it is trained, or one that this step does not tell from it."""
        return self.trains is not None and mode in {_mode_of(name) for name in self.fits}

    def alike(self, mode: str) -> list[str]:
        """Name the other modes that this step does not tell from one, and a later one may."""
        is_one = self.sizes["M"] * self.sizes["DP"] == 1
        same = {"token_mean", "microbatch_token_mean"} if is_one else set()
        found = dict.fromkeys(_mode_of(name) for name in self.fits)
        return [name for name in found if name != mode and not {name, mode} <= same]

    @property
    def factor(self) -> float | None:
        """a_t over the weight of ``nearest`` if it is the same for all tokens, else None."""
        return self.factors.get(self.nearest)

    @property
    def verdict(self) -> str:
        """Say in a line what is trained."""
        if self.unknown:
            return f"not known, for {self.unknown.split(':')[0]}"
        if all(one.weight_min == one.weight_max == 0 for one in self.sequences):
            return "trains nothing: no token has a weight"
        return self._trained + self._beside_the_mask

    @property
    def _trained(self) -> str:
        if self.fits:
            others = f", and so {' and '.join(self.fits[1:])}: this step cannot tell them apart"
            return f"trains {self.fits[0]}{others * (len(self.fits) > 1)}"
        if self.factor is not None:
            return f"trains {self.factor:.6g} times {self.nearest}"
        low, high = self.modes[self.nearest]
        at = f"{low:.4g} to {high:.4g} times its weights"
        return f"trains no mode; nearest is {self.nearest}, {at}"

    @property
    def _beside_the_mask(self) -> str:
        words = f" of {self.tokens:,} tokens, of which {self.outside:,} are outside of the mask"
        missed = f"; {self.missed:,} tokens of the mask have no weight"
        return words * (self.outside > 0) + missed * (self.missed > 0)

    @property
    def tokens(self) -> int:
        """N: the tokens of all sequences."""
        return sum(sequence.tokens for sequence in self.sequences)


def _mode_of(name: str) -> str:
    """Return the mode of a name such as ``sample_mean without its 3 empty``."""
    return name.split(" ")[0]


def compare(ranks: Sequence[RankWeights], *, is_heard: bool = True) -> Weighed:
    """Compare the weights of a step with every mode; ``ranks``: of the whole world.

    ``is_heard``: whether a gradient came by any losses, of this term or of another.
    """
    counted = [rank for rank in ranks if rank.counts]
    f = _F.of(ranks)
    every = _sequences(ranks, f.value)
    sequences = [one for one in every if one.tokens]
    empty = [one for one in every if not one.tokens and not one.missed]
    sizes = {**counted[0].sizes, "M": max(rank.sizes["M"] for rank in counted)}
    tolerance = max(rank.tolerance for rank in counted)
    weights, lacks, known_empty = _weights(sequences, empty, counted)
    lowest_S = np.array([sequence.weight_min for sequence in sequences])
    highest_S = np.array([sequence.weight_max for sequence in sequences])
    modes = {
        name: (float((lowest_S / weight_S).min()), float((highest_S / weight_S).max()))
        for name, weight_S in weights.items()
        if len(sequences)
    }
    found = {name: constant(low, high, tolerance) for name, (low, high) in modes.items()}
    outside, missed = sum(one.outside for one in every), sum(one.missed for one in every)
    unknown = f.unknown or (_UNHEARD if not is_heard and _has_gradient(ranks) else "")
    fits = [name for name, at in found.items() if at and is_near(at, 1, tolerance)]
    fits = [] if unknown else fits
    apart = {name: float(f"{spread(*bounds):.6g}") for name, bounds in modes.items()}
    nearest = min(apart, key=lambda name: apart[name], default="token_mean")
    nearest = fits[0] if fits else nearest
    shown = [part for rank in counted for part in rank.parts if part.shown]
    step = Weighed(
        sizes=sizes,
        sequences=sequences,
        num_empty=len(empty),
        counted_empty=known_empty if known_empty and fits and " without " not in fits[0] else 0,
        weight_sum=sum(sequence.weight_sum for sequence in sequences),
        modes=modes,
        lacks=lacks,
        trains=fits[0] if fits and not outside and not missed else None,
        fits=fits,
        unknown=unknown,
        is_measured=f.is_measured,
        nearest=nearest,
        factors={name: at for name, at in found.items() if at is not None},
        relative=[
            sequence.weight_sum / sequence.tokens / weight
            for sequence, weight in zip(sequences, weights.get(nearest, ()), strict=True)
        ],
        inside=max(map(spread, lowest_S.tolist(), highest_S.tolist()), default=1.0),
        outside=outside,
        missed=missed,
        shown=_shown(min(shown, key=lambda part: len(part.shown), default=None)),
    )
    causes = _causes(step, counted, f, tolerance, has_ids=known_empty is not None)
    return replace(step, causes=tuple(causes))


def _has_gradient(ranks: Sequence[RankWeights]) -> bool:
    return any(one.added.any() for rank in ranks for one in rank.added)


def _shown(part: Part | None) -> str:
    if part is None:
        return ""
    return f"{part.dp_rank}/{part.microbatch}/{part.sequence}: {part.shown}"


@dataclass(frozen=True, kw_only=True)
class _F:
    """f of a step."""

    value: float
    read: float
    is_measured: bool
    num_tokens: float
    """What finalize divides by, of all ranks; 0 if it should not divide, or by nothing."""
    unknown: str = ""
    """Why it is not one number."""

    @staticmethod
    def of(ranks: Sequence[RankWeights]) -> _F:
        """Measure f, and compare it with what it should be."""
        counted = [rank for rank in ranks if rank.counts]
        is_divided = any(rank.is_divided for rank in ranks)
        num_tokens = max(sum(rank.num_tokens or 0.0 for rank in counted), 0.0) * is_divided
        read = counted[0].factor / (num_tokens or 1.0)
        others = [rank for rank in ranks if not rank.counts]
        found = measure(one for rank in (*counted, *others) for one in rank.added)
        f = _F(value=read, read=read, is_measured=found is not None, num_tokens=num_tokens)
        if not any(rank.is_finalized for rank in ranks):
            return replace(f, unknown=_NOT_FINALIZED)
        if found is None or found.agrees(read):
            return f
        return replace(f, unknown=found.fault) if found.fault else replace(f, value=found.value)

    def difference(self, tolerance: float) -> list[str]:
        """Say why f is not what it should be, if it is not."""
        if self.value == self.read:
            return []
        times, n = self.value / self.read, self.num_tokens
        if n and is_near(times, n, tolerance):
            return [f"finalize was called with num_tokens {n:g} and did not divide"]
        names = equal_products(times, {}, {"num_tokens": n} if n else {}, tolerance=tolerance)
        equal = f" = {names[0]}" if names else ""
        return [
            f"gradients were multiplied by {self.value:.6g} after the losses, as measured, "
            f"{times:.6g}{equal} times what Megatron's or torch's own code does"
        ]


def whole(ranks: Sequence[RankWeights]) -> list[WeighedSequence]:
    """Put the parts of sequences together over context-parallel ranks; ``ranks``: of the world.

    Sequences without a trained token are left out.
    """
    return [one for one in _sequences(ranks, _F.of(ranks).value) if one.tokens]


def _sequences(ranks: Sequence[RankWeights], f: float) -> list[WeighedSequence]:
    parts: dict[tuple[int, int, int], list[Part]] = {}
    for rank in (rank for rank in ranks if rank.counts):
        for part in rank.parts:
            key = (part.dp_rank, part.microbatch, part.sequence)
            parts.setdefault(key, []).append(part)
    found = []
    for (dp_rank, microbatch, sequence), its in sorted(parts.items()):
        trained = [part for part in its if part.tokens] or its
        found.append(
            WeighedSequence(
                dp_rank=dp_rank,
                microbatch=microbatch,
                sequence=sequence,
                name=its[0].name,
                tokens=sum(part.tokens for part in its),
                weight_sum=f * sum(part.weight_sum for part in its),
                # A NaN of one part stays one, wherever it stands.
                weight_min=f * float(np.min([part.weight_min for part in trained])),
                weight_max=f * float(np.max([part.weight_max for part in trained])),
                outside=sum(part.outside for part in its),
                missed=sum(part.missed for part in its),
                sample=its[0].sample,
                prompt=its[0].prompt,
                group=its[0].group,
            )
        )
    return found


_Weights = dict[str, np.ndarray[Any, Any]]


def _weights(
    sequences: Sequence[WeighedSequence],
    empty: Sequence[WeighedSequence],
    ranks: Sequence[RankWeights],
) -> tuple[_Weights, dict[str, str], int | None]:
    """Return w_s of each sequence under each mode, by the formulas of ``MODES``; what the other
    modes lack; and how many samples have no token, None if no ids of samples were passed.
    """
    given = {name: value for rank in ranks for name, value in rank.given.items()}
    passed = {
        name for name in ("sample", "prompt", "group")
        if sequences and all(getattr(one, name) is not None for one in sequences)
    } | {*given}  # fmt: skip
    lacks = {name: what for name, what in NEEDS.items() if what not in passed}
    if not sequences:
        return {}, lacks, None
    of_samples = {one.sample for one in sequences}
    others = [one for one in empty if one.sample is not None] if "sample" in passed else []
    ids = {one.sample for one in others} - of_samples
    known_empty = len(ids) if "sample" in passed else None
    compared = [mode for mode in MODES.values() if mode.denominator and mode.name not in lacks]
    if "sample" in passed and len(of_samples) == len(sequences):
        compared = [mode for mode in compared if mode.name != "row_mean"]  # it is sample_mean
    compared.sort(key=lambda mode: (mode.name in NEEDS, [*COMPARED, *NEEDS].index(mode.name)))
    counts = _counts(sequences, others, ranks, given)
    without = _counts(sequences, [], ranks, given)
    weights: _Weights = {}
    for mode in compared:
        one = np.ones(len(sequences))
        weights[mode.name] = one / np.asarray(mode.denominator(counts))  # type: ignore[misc]
        alone = one / np.asarray(mode.denominator(without))  # type: ignore[misc]
        if not np.array_equal(alone, weights[mode.name]):
            weights[f"{mode.name} without its {known_empty} empty"] = alone
    ms = {rank.sizes["M"] for rank in ranks}
    if len(ms) > 1:  # ranks have as many, or heard fewer
        own = weights["microbatch_token_mean"]
        weights["microbatch_token_mean by the largest M"] = own * counts.M / max(ms)
    return weights, lacks, known_empty


def _counts(
    sequences: Sequence[WeighedSequence],
    empty: Sequence[WeighedSequence],
    ranks: Sequence[RankWeights],
    given: Mapping[str, float],
) -> Any:
    """Return what the denominators of ``MODES`` read, of each of ``sequences``.

    ``empty``: those without a token that are counted too.
    """
    every = [*sequences, *empty]
    n = np.array([one.tokens for one in every], dtype=np.float64)
    one_each = np.ones(len(every))

    def of(key: Callable[[WeighedSequence], Hashable], values: Any) -> Any:
        sums: dict[Hashable, float] = {}
        for one, value in zip(every, values, strict=True):
            sums[key(one)] = sums.get(key(one), 0.0) + value
        return np.array([sums[key(one)] for one in every])

    def sample(one: WeighedSequence) -> Hashable:
        return (one.dp_rank, one.microbatch, one.sequence) if one.sample is None else one.sample

    n_b, rows = of(sample, n), of(sample, one_each)
    group_tokens = of(lambda one: one.group, n)
    group_samples = of(lambda one: one.group, 1 / rows)
    m = {part.dp_rank: rank.sizes["M"] for rank in ranks for part in rank.parts}
    first = slice(len(sequences))
    power = n_b[first] ** given.get("exponent", 0.0)
    return SimpleNamespace(
        N=n.sum(),
        n_s=n[first],
        n_b=n_b[first],
        B=len({sample(one) for one in every}),
        R_b=rows[first],
        n_p=of(lambda one: one.prompt, n)[first],
        P=len({one.prompt for one in every}),
        n_c=group_tokens[first],
        k_c=group_samples[first],
        L=given.get("divisor", 1.0),
        n_b_to_a=power,
        Z=float((n_b[first] / power / rows[first]).sum()),
        M=np.array([m[one.dp_rank] for one in sequences]),
        DP=ranks[0].sizes["DP"],
        n_mb=of(lambda one: (one.dp_rank, one.microbatch), n)[first],
    )


def _causes(
    step: Weighed, ranks: Sequence[RankWeights], f: _F, tolerance: float, *, has_ids: bool
) -> list[str]:
    if step.unknown:
        return [step.unknown]
    if not step.sequences:
        return []
    if not math.isfinite(step.weight_sum):
        wrong = [s for s in step.sequences if not math.isfinite(s.weight_sum)]
        return [f"weights of {len(wrong)} sequences are not finite: 0 / 0 in the script's loss?"]
    # What changes no weight is not named: a deferred step of this package divides by itself.
    is_undone = any(is_near(at * f.read / f.value, 1, tolerance) for at in step.factors.values())
    causes = f.difference(tolerance) if step.trains is None or is_undone else []
    is_divided = any(rank.is_divided for rank in ranks)
    if is_divided and not f.num_tokens and "token_sum" in step.fits:
        return ["num_tokens is 0: finalize divides by nothing"]
    if step.trains is None or step.trains.startswith("microbatch_token_mean"):
        counted = Step.of(ranks, f.value, num_tokens=f.num_tokens)
        causes += likely(counted, tolerance, is_mode=step.trains is not None)
    if not has_ids and not step.fits:
        causes += _hints(step, tolerance)
    at = step.factors.get("sample_sum")
    if at is not None and at > 0 and not step.fits and "constant" in step.lacks:
        causes.append(f"or constant, if L is {1 / at:.6g}: pass divisor=")
    return causes


def _hints(step: Weighed, tolerance: float) -> list[str]:
    """Say if a mean over samples would be right if B counted some sequences without a token."""
    hints = []
    for name in _OVER_SAMPLES:
        at, apart = step.factors.get(name), tolerance
        if tolerance == TOLERANCE:  # of float32, whose weights are known better
            apart = max(spread(*step.modes.get(name, (1.0, 1.0))) - 1, _FINEST)
        if k := counted_empty(at, len(step.sequences), step.num_empty, apart):
            hints.append(
                f"or {name}, if B counts {k} of {step.num_empty} empty sequences: pass sample="
            )
    return hints
