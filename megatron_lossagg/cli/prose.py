"""Write an :class:`Explanation` as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from megatron_lossagg.aggregation import MODES
from megatron_lossagg.cli.explanation import Comparison, Explanation, exact
from megatron_lossagg.cli.shares import Shares
from megatron_lossagg.scaling import K_FORMULA, LOSS_SCALINGS
from megatron_lossagg.text import number_of

__all__ = ["hanging", "lines"]

_INDENT = "  "
_GAP = "  "
_NARROWEST_CELL = 16
"""A wrapped column keeps at least as many columns."""

_Table = Sequence[Sequence[str]]


def lines(e: Explanation, *, width: int) -> Iterator[str]:
    """Write an explanation in lines of at most ``width`` columns, but for long names and flags."""
    yield f"{e.mode}: w_s = {e.formula}"
    yield from _mode(e, width)
    yield from ("", "WEIGHTS")
    yield from _weights(e, width)
    yield from ("", "FROM LOSS TO GRADIENT")
    yield from _factors(e, width)
    yield from ("", "ON THE DASHBOARD")
    yield from _dashboard(e, width)


def hanging(line: str, *, width: int) -> list[str]:
    """Wrap a line of a table; what does not fit continues under its second column."""
    second_column = re.match(r"\S*\s*", line)
    indent = " " * (second_column.end() if second_column else 0)
    wrapped = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    return wrapped or [""]


def _mode(e: Explanation, width: int) -> Iterator[str]:
    article = "The " if e.meaning.startswith("mean") else ""
    meaning = article + e.meaning
    yield from _text(f"{meaning[0].upper()}{meaning[1:]}.", width)
    if e.name != e.mode:
        note = f": {e.note}" if e.note else ""
        yield from _text(f"{e.name} is another system's name for it{note}.", width)
    if e.divisor is not None and MODES[e.mode].divisor == "none":
        yield from _text(
            f"It takes no divisor: {exact(e.divisor)} is used for the other modes below.", width
        )
    yield from _text(f"Train it with  {e.flags}", width)


def _weights(e: Explanation, width: int) -> Iterator[str]:
    yield from _text("loss = sum over rows s of w_s * (sum of the row's per-token losses)", width)
    yield from _weights_of_rows(e, width) if e.shares is None else _shares(e, e.shares, width)


def _shares(e: Explanation, shares: Shares, width: int) -> Iterator[str]:
    """Write what ``lossagg plot`` draws: this mode in detail, then every mode."""
    yield from _text(f"{shares.summary}.", width)
    yield ""
    unit = f"{shares.unit}s"
    table = [["length", "responses", "of all", f"of {unit}", "of weight", f"weight / {unit}"]]
    for bucket in shares.buckets:
        weight = bucket.weight[e.mode]
        table.append(
            [
                bucket.label,
                str(bucket.num),
                *(f"{share:.1%}" for share in (bucket.responses, bucket.tokens, weight)),
                f"{weight / bucket.tokens:.3g}" if bucket.tokens else "",
            ]
        )
    yield from _table(table, left=0)
    yield ""
    yield from _text(
        f"of weight: the part of the step's w_s n_s. weight / {unit}: how much a {shares.unit} of "
        "such a response weighs, 1 for a mean one.",
        width,
    )
    yield ""
    yield from _text("The same part under every mode, by the bucket's longest response:", width)
    yield ""
    table = [["", *(_in_thousands(bucket.high) for bucket in shares.buckets)]]
    for mode in shares.buckets[0].weight:
        table.append([mode, *(f"{bucket.weight[mode]:.1%}" for bucket in shares.buckets)])
    yield from _table(table, left=1)
    yield ""
    for note in shares.notes:
        yield from _text(note, width)


def _in_thousands(number: int) -> str:
    """Write a length in few columns."""
    return f"{number // 1000}k" if number >= 10_000 and number % 1000 == 0 else str(number)


def _weights_of_rows(e: Explanation, width: int) -> Iterator[str]:
    t = e.totals
    yield from _text(
        f"N = {number_of(t.active_tokens or 0, 'active token')}, "
        f"B = {number_of(t.samples or 0, 'sample')} "
        f"(V = {t.active_samples} with an active token), "
        f"P = {number_of(t.prompts or 0, 'prompt')} (Q = {t.active_prompts})",
        width,
    )
    yield ""
    by_microbatch = e.mode == "microbatch_token_mean"
    columns = ["row", "prompt", "n_s", "n_b", "n_p", "w_s", "w_s n_s", "part"]
    if by_microbatch:
        columns = ["row", "rank", "mb", "n_s", "n_mb", "w_s", "w_s n_s", "part"]
    table = [columns]
    for s, row in enumerate(e.rows):
        cells = {
            "row": str(s),
            "prompt": str(row.prompt),
            "rank": str(row.rank),
            "mb": str(row.microbatch),
            "n_s": str(row.n_s),
            "n_b": str(row.n_b),
            "n_p": str(row.n_p),
            "n_mb": str(row.n_mb),
            "w_s": _number(row.w_s),
            "w_s n_s": _number(row.w_s * row.n_s),
            "part": f"{row.part:.1%}",
        }
        table.append([cells[column] for column in columns])
    blank = [""] * (len(columns) - 3)
    table.append(["sum", *blank, _number(e.total_weight), "100.0%"])
    yield from _table(table, left=0)
    yield ""
    if by_microbatch:
        legend = (
            "rank: data-parallel rank; mb: microbatch of that rank; n_s, n_mb: active tokens of "
            "the row, its microbatch"
        )
    else:
        legend = (
            "n_s, n_b, n_p: active tokens of the row, its sample, its prompt (here a row is a "
            "sample)"
        )
    yield from _text(
        f"{legend}; part: w_s n_s over its sum. A training run reports the sum as "
        "lossagg/weight_expected.",
        width,
    )


def _factors(e: Explanation, width: int) -> Iterator[str]:
    s = e.split
    microbatches = number_of(s.microbatches, "microbatch")
    yield from _text(
        f"loss scaling {s.loss_scaling}, M = {microbatches} per rank, DP = {s.dp}, CP = {s.cp}",
        width,
    )
    if e.several_steps and s.loss_scaling == "per_token":
        yield from _text("K is N, which every step has its own of: here the first step's.", width)
    yield ""
    table = [["where", "what happens to a share", "factor", "so far"]]
    table += [[x.where, x.does, str(x.factor), str(x.so_far)] for x in e.chain]
    yield from _table(_wrapped(table, column=1, width=width), left=2)
    yield ""
    if s.loss_scaling == "average":
        tokens = "1"
    else:
        some = " + ".join(map(str, e.num_tokens[:8])) + (" + ..." if e.num_tokens[8:] else "")
        tokens = (
            "the counted tokens of the microbatch's rows on CP rank 0 and 0 on other CP ranks "
            f"({some} = {e.totals.active_tokens})"
        )
    yield from _text(f"loss_func returns share * {e.factor}, and as num_tokens {tokens}.", width)
    if e.factor == 1:
        yield from _text(
            "K is 1 here, so a loss_func that returns the bare share is right too.", width
        )
    else:
        inverse = f"1/({e.k_formula})" if " " in e.k_formula else f"1/{e.k_formula}"
        yield from _text(
            "A loss_func that returns the bare share with the same num_tokens trains "
            f"{inverse} = 1/{e.factor} of this loss, without an error.",
            width,
        )
    formulas = " and ".join(
        f"{K_FORMULA[loss_scaling]} in the {loss_scaling} loss scaling"
        for loss_scaling in LOSS_SCALINGS
    )
    yield from _text(
        f"K does not depend on the mode: it is {formulas}. The K that the start of a run measures "
        "is that of the probe's own small step, with an M and N of its own.",
        width,
    )


def _dashboard(e: Explanation, width: int) -> Iterator[str]:
    yield from _text(
        "The same rows under every mode: first with a loss of 1 for every token, then with losses "
        "that rise along a row (token t of a row has t / longest row). A curve that jumps by such "
        "a ratio after a switch is expected: NovaSky-AI/SkyRL#1296 reported 0.322, 0.065 and "
        "0.001 for the same data.",
        width,
    )
    yield ""
    yield from _comparison_table(e, width)
    yield ""
    ranks = number_of(e.split.dp, "rank")
    microbatches = number_of(e.split.microbatches, "microbatch")
    lacking = [c.mode for c in e.comparisons if c.ones is None]
    if lacking:
        yield from _text(f"To compare with {', '.join(lacking)}, give --divisor.", width)
    if e.several_steps:
        yield from _text(
            "Losses are means over the steps. rescaled: in every step the gradient is only scaled, "
            "by a number of the step's own.",
            width,
        )
    yield from _text(
        f"ratio: to {e.mode}. For microbatch_token_mean the rows are assigned in turn to {ranks} x "
        f"{microbatches}; its values change with them.",
        width,
    )
    yield from _text(
        "grad_norm is that of the configured loss, so curves of two modes cannot be compared, and "
        "a clipping threshold does not carry over: where the gradient is only scaled, multiply "
        "the threshold by the ratio; where rows are reweighted, look at the new grad_norm first. "
        "Under Adam the scale changes only clipping, epsilon, and the balance with side losses, "
        "weight decay and losses under another mode (KL, entropy). More: docs/math.md.",
        width,
    )


def _comparison_table(e: Explanation, width: int) -> Iterator[str]:
    """Write the modes with their formulas; without them, and shorter, where space is short."""
    for with_formula, digits in ((True, 5), (False, 5), (False, 3), (False, 2)):
        head = ["mode", "w_s", "all 1", "ratio", "rising", "ratio", "gradient"]
        table = [head, *([c.mode, c.w_s, *_losses(c, e.mode, digits)] for c in e.comparisons)]
        if not with_formula:
            table = [[cells[0], *cells[2:]] for cells in table]
        if _width_of(table) <= width:
            break
    yield from _table(table, left=2 if with_formula else 1)


def _losses(c: Comparison, mode: str, digits: int) -> list[str]:
    """Write the two losses of a comparison, their ratios, and what becomes of the gradient."""
    if None in (c.ones, c.ones_ratio, c.rising, c.rising_ratio):
        return ["", "", "", "", "no divisor"]
    numbers = [f"{x:.{digits}g}" for x in (c.ones, c.ones_ratio, c.rising, c.rising_ratio)]
    if c.mode == mode:
        return [*numbers, "this mode"]
    if c.scales_only:
        return [*numbers, "scaled"]
    return [*numbers, "rescaled" if c.scales_steps else "reweighted"]


def _number(value: float) -> str:
    return f"{value:.6g}"


def _text(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _widths(table: _Table) -> list[int]:
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _width_of(table: _Table) -> int:
    widths = _widths(table)
    return len(_INDENT) + sum(widths) + len(_GAP) * (len(widths) - 1)


def _wrapped(table: _Table, *, column: int, width: int) -> _Table:
    """Wrap one column over several lines so that the table is at most ``width`` wide."""
    excess = _width_of(table) - width
    if excess <= 0:
        return table
    cell_width = max(_widths(table)[column] - excess, _NARROWEST_CELL)
    wrapped = []
    for row in table:
        first, *rest = textwrap.wrap(row[column], cell_width, subsequent_indent=_INDENT)
        wrapped.append([*row[:column], first, *row[column + 1 :]])
        before, after = [""] * column, [""] * (len(row) - column - 1)
        wrapped += [[*before, line, *after] for line in rest]
    return wrapped


def _table(table: _Table, *, left: int) -> Iterator[str]:
    """Align the columns: the first ``left`` to the left, the others to the right."""
    widths = _widths(table)
    for row in table:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield _INDENT + _GAP.join(cells).rstrip()
