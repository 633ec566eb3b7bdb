"""The table of modes: the formula of each, and the one weight per sequence that it gives.

``table.py`` has the counts, and divides by a mode's denominator. CONTRIBUTING.md lists what one
more mode costs.

Symbols (``docs/which-mode.md``): a sequence s has n_s active tokens, its sample n_b, its prompt
n_p, its sample's group n_c; the step has N active tokens, B samples and P prompts; sample b
has R_b sequences, group c has k_c samples; M microbatches on this rank, DP data-parallel ranks; the
divisor is L or C. Every mode is one weight per sequence::

    loss = sum_s w_s * sum_{t in s} m_t * x_t
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

_DivisorRule = Literal["required", "optional", "none"]
Count = Literal["mask", "weights"]
Ids = Literal["prompt", "group"]

COUNTS: dict[Count, str] = {
    "mask": "the tokens of the loss mask",
    "weights": "the sums of token weights",
}
"""What the denominators count; see :attr:`Aggregation.count`."""

CUSTOM = "custom"
OWN_WEIGHTS = "own_weights"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One line of the table of modes."""

    name: str
    weight: str
    """w_s as a format string over B, P, L, C and a; ``--help`` and the start of a run print it."""
    divisor: _DivisorRule
    meaning: str
    denominator: Callable[[Any], Any] | None
    """1 / w_s from the step's counts (``table.StepCounts``); None for a user's own."""
    expected: Callable[[Any], float] | None = None
    """The sum of w_s n_s over a step that has an active token, likewise; None: it is summed."""
    has_exponent: bool = False
    """Whether it needs the exponent a."""
    needs: tuple[Ids, ...] = ()
    """The kinds of ids that must be passed; ids of samples never: by default each is a sample."""
    needs_all: bool = False
    """Whether every rank needs the sequences of all ranks."""
    total: str | None = None
    """The one count of the whole step in the denominator, by its letter, such as N: a deferred step
    divides by it at its end. None: there is none."""

    @property
    def formula(self) -> str:
        """w_s in the letters of ``docs/which-mode.md``, such as ``1/(B L)``."""
        return self.weight.format(B="B", P="P", L="L", C="C", a="a")


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name="token_mean",
            weight="1/N",
            divisor="none",
            meaning="mean over all active tokens of the step (DAPO)",
            total="N",
            denominator=lambda c: c.N,
            expected=lambda c: c.N / c.N,
        ),
        Mode(
            name="sample_mean",
            weight="1/({B} n_b)",
            divisor="none",
            meaning="mean over samples of each sample's token mean (GRPO)",
            total="B",
            denominator=lambda c: c.n_b * c.B,
            expected=lambda c: c.V / c.B,
        ),
        Mode(
            name="prompt_mean",
            weight="1/({P} n_p)",
            divisor="none",
            needs=("prompt",),
            meaning="mean over prompts of each prompt's token mean (ScaleRL)",
            total="P",
            denominator=lambda c: c.n_p * c.P,
            expected=lambda c: c.Q / c.P,
        ),
        Mode(
            name="constant",
            weight="1/({B} {L})",
            divisor="required",
            meaning="token sums over a constant length L, mean over samples (Dr.GRPO)",
            total="B",
            denominator=lambda c: c.B * c.L,
            expected=lambda c: c.N / (c.B * c.L),
        ),
        Mode(
            name="sample_sum",
            weight="1/{B}",
            divisor="none",
            meaning="token sums, mean over samples",
            total="B",
            denominator=lambda c: c.B,
            expected=lambda c: c.N / c.B,
        ),
        Mode(
            name="token_sum",
            weight="1/{C}",
            divisor="optional",
            meaning="sum over all active tokens, over a constant C (1 by default)",
            total="L",
            denominator=lambda c: c.L,
            expected=lambda c: c.N / c.L,
        ),
        Mode(
            name="length_power",
            weight="1/(n_b^{a} Z)",
            divisor="none",
            has_exponent=True,
            needs_all=True,
            meaning="samples by a power of their length, over the sum Z of n_b^(1-a): all weights "
            "w_s n_s sum to 1; a = 0 is token_mean, a = 1 sample_mean without empty samples",
            total="Z",
            denominator=lambda c: c.n_b_to_a * c.Z,
            expected=lambda c: 1.0,
        ),
        Mode(
            name="balanced",
            weight="k_c/({B} n_c)",
            divisor="none",
            needs=("group",),
            needs_all=True,
            meaning="token means of groups c, such as prompt and sign of the advantage, weighted "
            "by their samples k_c",
            total="B",
            denominator=lambda c: c.n_c / c.k_c * c.B,
        ),
        Mode(
            name="row_mean",
            weight="1/({B} R_b n_s)",
            divisor="none",
            needs_all=True,
            meaning="mean over samples of the mean of their R_b sequences' token means (sessions)",
            total="B",
            denominator=lambda c: c.n_s * c.R_b * c.B,
        ),
        Mode(
            name="microbatch_token_mean",
            weight="1/(M DP n_mb)",
            divisor="none",
            meaning=(
                "mean of microbatch token means; depends on the layout, "
                "kept only to reproduce old runs"
            ),
            denominator=lambda c: c.n_mb * c.M * c.DP,
            expected=lambda c: c.microbatch_means / c.DP,
        ),
        Mode(
            name=CUSTOM,
            weight="known to the custom reducer",
            divisor="none",
            meaning="what the factory at --loss-aggregation-reducer-path returns",
            denominator=None,
        ),
        Mode(
            name=OWN_WEIGHTS,
            weight="known to the weights function",
            divisor="none",
            needs_all=True,
            meaning="what the function at --loss-aggregation-weights-path returns",
            denominator=None,
        ),
    )
}
