"""The shares of the loss weight as one page: self-contained HTML, no script, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megatron_lossagg.aggregation import MODES
from megatron_lossagg.cli.shares import Shares

__all__ = ["page"]


def page(shares: Shares) -> str:
    """Write the page: the finding, the picture, the numbers, how to read them."""
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Where the loss comes from: {escape(shares.source)}</title><style>{_STYLE}</style>"
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in shares.notes)
    body = [
        '<header><p class="soft">lossagg plot</p>',
        f"<h1>{escape(shares.finding)}</h1><p>{escape(shares.summary)}.</p></header>",
        _picture(shares),
        _table(shares),
        _READING,
        f'<section><h2>What was read</h2><ul class="soft">{notes}</ul></section>',
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><main>\n'
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


# The picture: a column per bucket; above the number of responses, below the share of the loss
# weight with one bar per group of modes that share alike. Lengths are pixels at full width.

_WIDTH, _LEFT, _ABOVE, _BELOW, _MIDDLE = 940, 48, 120, 240, 34
_BARS = 0.84
"""Part of a bucket's width that its bars take."""


def _picture(shares: Shares) -> str:
    column = (_WIDTH - _LEFT) / len(shares.buckets)
    top, floor = _MIDDLE + _ABOVE, _MIDDLE + _ABOVE + _MIDDLE + _BELOW
    most = max(bucket.num for bucket in shares.buckets)
    highest = max(max(bucket.weight.values()) for bucket in shares.buckets)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25) if highest / s <= 5)
    scale = _BELOW / (highest * 1.06)
    marks = [f'<path class="axis" d="M{_LEFT} {top}H{_WIDTH}M{_LEFT} {floor}H{_WIDTH}"/>']
    marks += _ticks(floor, scale, step, highest)
    for k, bucket in enumerate(shares.buckets):
        x, middle = _LEFT + k * column + column * (1 - _BARS) / 2, _LEFT + (k + 0.5) * column
        height = _ABOVE * bucket.num / most
        y = top - height
        title = f"{bucket.num} responses of {bucket.label} {shares.unit}s"
        marks.append(_bar("histogram", x, y, column * _BARS, height, title))
        marks.append(_label(middle, y - 18, f"{bucket.responses:.1%} of responses", column))
        marks.append(_label(middle, y - 5, f"{bucket.tokens:.1%} of {shares.unit}s", column))
        width = column * _BARS / len(shares.groups)
        for g, group in enumerate(shares.groups):
            share = bucket.weight[group[0]]
            at = x + g * width
            title = f"{', '.join(group)}: {share:.2%} of the loss weight, {bucket.label}"
            y = floor - scale * share
            marks.append(_bar(f"g{g}", at, y, 0.94 * width, scale * share, title))
        marks.append(f'<text class="tick" x="{middle:.1f}" y="{floor + 18}">{bucket.label}</text>')
    middle = (_LEFT + _WIDTH) / 2
    marks.append(
        f'<text class="tick soft" x="{middle:.0f}" y="{floor + 38}">response length, active '
        f"{shares.unit}s</text>"
    )
    keys = "".join(_key(f"g{g}", ", ".join(group)) for g, group in enumerate(shares.groups))
    return (
        "<section><h2>Share of the loss weight, by response length</h2><figure>"
        f'<ul class="keys">{keys}{_key("histogram", "number of responses")}</ul>'
        f'<div class="wide"><svg role="img" viewBox="0 0 {_WIDTH} {floor + 44}" '
        'aria-label="Number of responses and share of the loss weight by response length; the '
        f'table below has the numbers">{"".join(marks)}</svg></div></figure></section>'
    )


def _ticks(floor: float, scale: float, step: float, highest: float) -> Iterator[str]:
    for n in range(1, int(highest / step) + 1):
        y = floor - scale * n * step
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH}"/>'
        yield f'<text class="left soft" x="{_LEFT - 8}" y="{y + 4:.1f}">{n * step:.0%}</text>'


def _key(kind: str, text: str) -> str:
    box = (
        f'<svg class="key" viewBox="0 0 12 12"><rect class="{kind}" width="12" height="12"/></svg>'
    )
    return f"<li>{box}{escape(text)}</li>"


def _bar(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}><title>{escape(title)}</title></rect>'


def _label(x: float, y: float, text: str, column: float) -> str:
    size = "" if column >= 124 else ' style="font-size:10px"'
    return f'<text class="tick"{size} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _table(shares: Shares) -> str:
    head = "".join(f'<th scope="col">{bucket.label}</th>' for bucket in shares.buckets)
    rows = [
        ("responses", "", [bucket.responses for bucket in shares.buckets]),
        (f"{shares.unit}s", "", [bucket.tokens for bucket in shares.buckets]),
    ]
    for mode in (mode for group in shares.groups for mode in group):
        weight = MODES[mode].weight.format(B="B", P="P", L="L", C="C")
        rows.append((mode, weight, [bucket.weight[mode] for bucket in shares.buckets]))
    body = "".join(
        f'<tr><th scope="row">{name}</th><td class="w">{weight}</td>'
        + "".join(f"<td>{value:.1%}</td>" for value in values)
        + "</tr>"
        for name, weight, values in rows
    )
    return (
        '<section><h2>The numbers</h2><div class="wide"><table><thead><tr><th scope="col">share of'
        f'</th><th scope="col" class="w">w_s</th>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div></section>"
    )


_READING = """<section><h2>How to read it</h2>
<p>A mode gives every token of row s the weight w_s; the row's weight in the loss is w_s n_s, with
n_s its active tokens. A bar is the part of a step's whole weight that the responses of one length
have: how much they can move the gradient when every token's loss is of equal size. Advantages,
importance ratios and clipping come on top; they are not in the file.</p>
<p>A mode whose bars follow the tokens treats every token alike, so long responses dominate. One
whose bars follow the responses treats every response alike: a token in a long response then weighs
less. Modes in one group differ in the size of the loss, which this picture does not show:
<code>lossagg explain MODE --lengths-file FILE</code> prints it.</p></section>"""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2125;--soft:#5b646d;--line:#e1e5e9;
--grey:#a3acb4}
@media screen and (prefers-color-scheme:dark){:root{--paper:#15181b;--ink:#e3e6e9;--soft:#9aa4ae;
--line:#2d3339;--grey:#6c757d}}
*{box-sizing:border-box}
html{background:var(--paper);color:var(--ink);-webkit-text-size-adjust:100%;
font:14px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
body{margin:0;padding:56px 28px 96px}
main{max-width:940px;margin:0 auto}
section{margin-top:44px}
h1{font-size:24px;line-height:1.35;font-weight:600;letter-spacing:-.01em;margin:4px 0 10px}
h2{font-size:15px;font-weight:650;margin:0 0 12px}
p{margin:0 0 10px;max-width:80ch}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.soft,header p{color:var(--soft);margin:0}
figure{margin:0}
.keys{list-style:none;display:flex;flex-wrap:wrap;gap:4px 22px;padding:0;margin:0 0 12px}
svg{display:block;width:100%;height:auto}
svg.key{display:inline-block;width:12px;height:12px;vertical-align:-1px;margin-right:7px}
svg text{font-size:12px;fill:currentColor}
svg text.soft{fill:var(--soft)}
svg text.tick{text-anchor:middle}
svg text.left{text-anchor:end}
svg .grid{stroke:var(--line);fill:none}
svg .axis{stroke:var(--soft);fill:none}
.histogram{fill:var(--grey)}
.g0{fill:#0072b2}.g1{fill:#e69f00}.g2{fill:#009e73}.g3{fill:#cc79a7}.g4{fill:#56b4e9}
.g5{fill:#d55e00}.g6{fill:#888}
@media screen and (prefers-color-scheme:dark){.g0{fill:#3d9bd6}}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:4px 0 4px 14px;text-align:right;font-weight:400;border-top:1px solid var(--line);
white-space:nowrap}
thead th{color:var(--soft);font-size:12px;border:0}
th:first-child,td.w,th.w{text-align:left}
th:first-child{padding-left:0}
td.w{color:var(--soft)}
.wide{overflow-x:auto}
@media screen and (max-width:700px){.wide svg{min-width:700px}body{padding:28px 16px 64px}}
"""
