"""A verification as one page for a pull request: self-contained HTML, no script.

The result comes first, then the table of cases, the checks of a framework, the causes of what
failed,
the plot of errors, the environment, and how to read it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from megatron_lossagg.scaling import K_FORMULA
from megatron_lossagg.text import error_text, number_of
from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.frameworks import section as framework_section
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE

__all__ = ["page"]

_Verdict = Mapping[str, Any]
_Layouts = Mapping[str, Sequence[_Verdict]]
"""The verdicts of each layout, in the report's order; none where the run ended before it."""

_ERRORS = ("gradient_error", "loss_error", "weight_sum_error")
_COLUMNS = {
    "aggregation": "the configured loss",
    "w_s": "the weight of a row, with the divisor's value",
    "loss_scaling": "how Megatron scales the loss",
    "K": "what the package multiplies the loss by",
    "factor": "the gradient's measured multiple of the oracle's; 1 is right",
    "gradient error": "largest relative error of any parameter's gradient",
    "loss error": "relative error of the reported loss",
    "weight sum error": "relative error of the reported weight sum",
    "verdict": "PASS where every error is below its tolerance",
}


def page(report: Mapping[str, Any]) -> str:
    """Write a report as a page; errors may be None, infinite or NaN, text is escaped."""
    verdicts = [{**verdict, "number": n} for n, verdict in enumerate(report["verdicts"], 1)]
    layouts: dict[str, list[_Verdict]] = {str(layout): [] for layout in report["layouts"]}
    for verdict in verdicts:
        layouts.setdefault(str(verdict["layout"]), []).append(verdict)
    passed = bool(report["passed"]) and all(layouts.values()) and bool(verdicts)
    framework = report.get("framework")
    of_framework = framework_section.headline(framework) if framework else None
    is_whole = len(verdicts) == report["num_verdicts"]
    found, meaning = _outcome(verdicts, passed, of_framework if is_whole else None)
    lead = _lead(verdicts, layouts) + (framework_section.lead(framework) if framework else "")
    body = [
        f'<header class="{_class(passed)}"><p class="soft">lossagg verify</p>',
        f"<h1><b>{found}:</b> {meaning}</h1>{lead}</header>",
        _tables(layouts),
        framework_section.section(framework) if framework else "",
        _failures(verdicts, layouts),
        _plot(layouts),
        _facts(report, layouts),
        _READING,
    ]
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{found}: {meaning}</title><style>{_STYLE}"
        f"{framework_section.STYLE if framework else ''}</style>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><main>\n'
        + "\n".join(filter(None, body))
        + "\n</main></body></html>\n"
    )


def _outcome(
    verdicts: Sequence[_Verdict], passed: bool, of_framework: tuple[str, str] | None
) -> tuple[str, str]:
    """Write what was found, and what it means; ``of_host``: of failed checks of a framework."""
    failed = sum(not verdict["passed"] for verdict in verdicts)
    cases = number_of(len(verdicts), "case")
    if failed:
        fail = "fails" if failed == 1 else "fail"
        what = "the trained or the reported loss is not the configured loss"
        return f"{failed} of {cases} {fail}", what
    if of_framework:
        return of_framework
    if not passed:
        measured = f"{cases} measured, none of them fails"
        return "The run did not finish", measured if verdicts else "nothing was measured"
    pass_ = "passes" if len(verdicts) == 1 else "pass"
    return f"{len(verdicts)} of {cases} {pass_}", "the trained loss is the configured loss"


def _lead(verdicts: Sequence[_Verdict], layouts: _Layouts) -> str:
    if not verdicts:
        return ""
    errors = [_number(verdict["gradient_error"]) for verdict in verdicts]
    largest = max(error if math.isfinite(error) else math.inf for error in errors)
    allowed = sorted({_number(verdict["tolerance"]) for verdict in verdicts})
    bars = " or ".join(f"{bar:g}" for bar in allowed)
    why = ' <a href="#why">Why</a>' if _failures(verdicts, layouts) else ""
    return (
        f"<p>Largest relative error of any parameter's gradient: {error_text(largest)}. "
        f"Allowed: {bars}.{why}</p>"
    )


def _failures(verdicts: Sequence[_Verdict], layouts: _Layouts) -> str:
    """Write the causes, each with its first case, and the layouts that were not measured."""
    by_cause: dict[tuple[str, ...], list[_Verdict]] = {}
    for verdict in verdicts:
        if not verdict["passed"]:
            by_cause.setdefault(tuple(verdict["causes"]), []).append(verdict)
    items = [
        f"<li><p><b>{escape(' or '.join(causes) or 'no known cause')}</b> "
        f'<span class="soft">{number_of(len(failed), "case")}{", first" if failed[1:] else ":"} '
        f'<a href="#case-{failed[0]["number"]}">{escape(_where(failed[0]))}</a></span></p>'
        f"<p>{escape(_explanation(failed[0]))}</p></li>"
        for causes, failed in by_cause.items()
    ]
    missing = [escape(layout) for layout, measured in layouts.items() if not measured]
    if missing:
        ended = "The run ended before the cases of " + "; ".join(missing)
        items.append(f"<li><p><b>not measured</b></p><p>{ended}</p></li>")
    if not items:
        return ""
    return f'<section><h2 id="why">Why</h2><ul class="why">{"".join(items)}</ul></section>'


def _facts(report: Mapping[str, Any], layouts: _Layouts) -> str:
    """Write what ran, with which versions, on which layouts."""
    tool = report["tool"]
    run = [
        ("command", f"<code>{escape(str(report['command']))}</code>"),
        ("started", escape(str(report["started"]).replace("T", " "))),
        ("took", f"{_number(report['seconds']):.0f} s"),
        (escape(str(tool["name"])), escape(str(tool["version"]))),
    ]
    environment = [(escape(str(fact["name"])), _fact(fact)) for fact in report["environment"]]
    tested = [
        (f'<a href="#layout-{number}">{escape(layout)}</a>', _count(verdicts))
        for number, (layout, verdicts) in enumerate(layouts.items(), 1)
    ]
    parts = [("Run", run), ("Environment", environment), ("Layouts", tested)]
    return f'<div class="facts">{"".join(_definitions(*part) for part in parts)}</div>'


def _definitions(title: str, facts: Sequence[tuple[str, str]]) -> str:
    pairs = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<section class="{title.lower()}"><h2>{title}</h2><dl>{pairs}</dl></section>'


def _fact(values: Mapping[str, Any]) -> str:
    fact = Fact(**values)
    version = escape(fact.version)
    if fact.state != "found":
        version = f"<b>{fact.state}</b> {version}"
    detail = fact.where
    details = f'<span class="soft">{escape(detail)}</span>' if detail else ""
    return f"{version or escape(fact.state)} {details}".strip()


def _count(verdicts: Sequence[_Verdict]) -> str:
    if not verdicts:
        return '<b class="fail">not measured</b>'
    passed = sum(bool(verdict["passed"]) for verdict in verdicts)
    text = f"{passed} of {len(verdicts)} pass"
    return text if passed == len(verdicts) else f'<b class="fail">{text}</b>'


def _tables(layouts: _Layouts) -> str:
    titles = "".join(
        f'<th scope="col" title="{title}">{name}</th>' for name, title in _COLUMNS.items()
    )
    head = f"<thead><tr>{titles}</tr></thead>"
    tables = []
    for number, (layout, verdicts) in enumerate(layouts.items(), 1):
        bodies = "".join(
            f"<tbody>{''.join(map(_case, group))}</tbody>"
            for _, group in groupby(verdicts, key=lambda verdict: str(verdict["loss_scaling"]))
        )
        tables.append(
            f'<div class="wide"><table id="layout-{number}"><caption><b>{escape(layout)}</b> '
            f"{_count(verdicts)}</caption>{head if verdicts else ''}{bodies}</table></div>"
        )
    return f"<section><h2>Cases</h2>{''.join(tables)}</section>"


def _case(verdict: _Verdict) -> str:
    bars = (_number(verdict["tolerance"]), _number(verdict["tolerance"]), WEIGHT_SUM_TOLERANCE)
    errors = [_number(verdict[name]) for name in _ERRORS]
    passed = bool(verdict["passed"])
    factor = _number(verdict["measured_factor"])
    cells = [
        f'<th scope="row">{escape(str(verdict["case"]))}</th>',
        f"<td>{escape(str(verdict['formula']))}</td>",
        f"<td>{escape(str(verdict['loss_scaling']))}</td>",
        f"<td>{escape(str(verdict['k']))}</td>",
        f"<td>{f'{factor:.9g}' if math.isfinite(factor) else 'not finite'}</td>",
        *(
            f"<td{'' if error < bar else ' class=over'}>{error_text(error)}</td>"
            for error, bar in zip(errors, bars, strict=True)
        ),
        f'<td class="{_class(passed)}">{"PASS" if passed else "FAIL"}</td>',
    ]
    if not passed:
        cells.append(f'<td class="why">{escape(_explanation(verdict))}</td>')
    return f'<tr id="case-{verdict["number"]}">{"".join(cells)}</tr>'


# The plot: one band per layout, gradient errors from left to right on the same axis in every
# report, so that two reports can be compared. Lengths are pixels at full width.

_WIDTH, _LEFT, _RIGHT, _LOST, _TOP, _BAND = 940, 218, 24, 84, 8, 48
_DECADES = (-17, 1)  # the axis where no error is larger; smaller ones are drawn at its left end


def _plot(layouts: _Layouts) -> str:
    """Draw the gradient error of every case, and the tolerance."""
    measured = {layout: verdicts for layout, verdicts in layouts.items() if verdicts}
    errors = [_number(v["gradient_error"]) for verdicts in measured.values() for v in verdicts]
    finite = [error for error in errors if math.isfinite(error)]
    if not errors:
        return ""
    low, high = _DECADES
    high = max(high, math.ceil(math.log10(max([1.0, *finite]))))
    lost = _LOST if len(finite) < len(errors) else 0
    end = _WIDTH - _RIGHT - lost

    def x(error: float) -> float:
        """Return the position of an error; those that are not finite have a place of their own."""
        if not math.isfinite(error):
            return end + lost / 2 + _RIGHT / 2
        decade = math.log10(max(error, 10.0**low))
        return _LEFT + (end - _LEFT) * (decade - low) / (high - low)

    marks, top, known = [], _TOP, set[float]()
    for layout, verdicts in measured.items():
        lines = textwrap.wrap(layout, 30) or [""]
        height = max(_BAND, 16 * len(lines) + 12)
        marks.append(f'<path class="grid" d="M0 {top}H{_WIDTH}"/>')
        marks += _label(lines, top + height / 2)
        bars = {_number(verdict["tolerance"]) for verdict in verdicts}
        for bar in sorted(filter(math.isfinite, bars)):
            marks.append(f'<path class="bar" d="M{x(bar):.1f} {top}v{height}"/>')
            if bar not in known:
                at = f'x="{x(bar) + 6:.1f}" y="{top + 14}"'
                marks.append(f'<text class="soft" {at}>tolerance {bar:g}</text>')
        known = bars
        step = (height - 14) / len(verdicts)
        for place, verdict in enumerate(verdicts):
            y = top + 7 + (place + 0.5) * step
            marks.append(_point(verdict, x(_number(verdict["gradient_error"])), y))
        top += height
    axis = [f'<path class="grid" d="M0 {top}H{_WIDTH}"/>']
    for decade in range(low + low % 2, high + 1, 2 * math.ceil((high - low) / 24)):
        tick = f"{x(10.0**decade):.1f}"
        axis.append(f'<path class="grid" d="M{tick} {_TOP}V{top + 5}"/>')
        axis.append(f'<text class="tick" x="{tick}" y="{top + 20}">{_power(decade)}</text>')
    if lost:
        axis.append(f'<path class="grid" d="M{end + _RIGHT / 2} {_TOP}V{top}"/>')
        axis.append(f'<text class="tick" x="{x(math.nan):.1f}" y="{top + 20}">not finite</text>')
    return (
        '<section><h2>Gradient error of every case</h2><figure><svg role="img" '
        f'viewBox="0 0 {_WIDTH} {top + 26}" aria-labelledby="plot-title plot-desc">'
        '<title id="plot-title">Gradient error of every case, by layout</title>'
        f'<desc id="plot-desc">{_described(errors, finite, measured)}</desc>'
        f"{''.join(axis)}{''.join(marks)}</svg>"
        "<figcaption>Relative, on a logarithmic scale. <svg class=key viewBox='0 0 12 12'>"
        '<circle class="pass" cx="6" cy="6" r="3.5"/></svg> the case passes '
        '<svg class=key viewBox=\'0 0 12 12\'><path class="fail" d="M6 1l5 5-5 5-5-5z"/></svg> '
        "the case fails, by its gradient, reported loss or weight sum. In a layout from top to "
        "bottom: the order of its table. A wrong factor is an error near 1.</figcaption></figure>"
        "</section>"
    )


def _label(lines: Sequence[str], middle: float) -> Iterator[str]:
    for number, line in enumerate(lines):
        y = middle + 4 + 16 * (number - (len(lines) - 1) / 2)
        yield f'<text x="0" y="{y:.1f}">{escape(line)}</text>'


def _point(verdict: _Verdict, x: float, y: float) -> str:
    error = _number(verdict["gradient_error"])
    title = f"<title>{escape(_where(verdict))}: {error_text(error)}</title>"
    kind = "point" if math.isfinite(error) else "lost"
    if verdict["passed"]:
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="3.5"'
        return f'<circle class="{kind} pass" {place}>{title}</circle>'
    return f'<path class="{kind} fail" d="M{x:.1f} {y - 5:.1f}l5 5-5 5-5-5z">{title}</path>'


def _described(errors: Sequence[float], finite: Sequence[float], layouts: _Layouts) -> str:
    cases, bands = number_of(len(errors), "case"), number_of(len(layouts), "layout")
    text = f"{cases} on {bands}, logarithmic scale."
    if finite:
        text += f" Errors from {error_text(min(finite))} to {error_text(max(finite))}."
    lost = len(errors) - len(finite)
    return text + (f" {number_of(lost, 'case')} without a finite error." if lost else "")


def _power(decade: int) -> str:
    return "1" if decade == 0 else f"1e{decade}"


def _class(passed: bool) -> str:
    return "pass" if passed else "fail"


def _where(verdict: _Verdict) -> str:
    return f"{verdict['layout']}; {verdict['case']}; {verdict['loss_scaling']}"


def _explanation(verdict: _Verdict) -> str:
    return str(verdict["explanation"] or "no explanation was given")


def _number(value: Any) -> float:
    """Read a number of the report; None is NaN."""
    return math.nan if value is None else float(value)


_READING = f"""<section class="reading"><h2>How to read it</h2>
<p>Each case trains one optimizer step of a small model with the installed Megatron-Core as shipped:
its own schedule, <code>DistributedDataParallel</code> and <code>finalize_model_grads</code>. Every
parameter's gradient, and the reported loss, is compared with a float64 oracle: loops over tokens as
the papers define them, in one process, on unpacked rows. The data are uneven on purpose: rows with
holes, fully masked rows and prompts, samples split over ranks and microbatches, infinities at every
masked position.</p>
<dl>
<div><dt>w_s</dt><dd>The weight of each token of row s in the configured loss, with the divisor's
value; of both terms where a case adds two.</dd></div>
<div><dt>loss scaling</dt><dd>How Megatron scales, never which loss is configured:
<code>calculate_per_token_loss</code> off (average) or on (per-token).</dd></div>
<div><dt>K</dt><dd>The package multiplies a returned loss by it, to cancel Megatron's own factors on
the way to the gradient: {K_FORMULA["average"]} in the average loss scaling, the step's active
tokens
{K_FORMULA["per_token"]} in the per-token loss scaling.</dd></div>
<div><dt>factor</dt><dd>The trained gradient as a multiple of the oracle's, by projection. 1 is
right; 1/M, for example, is a mean over microbatches that was not compensated. A factor of 1 with
a large error is a wrong direction, or a wrong reported loss.</dd></div>
<div><dt>gradient error</dt><dd>The largest, over all parameters, of
‖g &minus; g<sub>oracle</sub>‖ / ‖g<sub>oracle</sub>‖.</dd></div>
<div><dt>loss error</dt><dd>The reported loss against the oracle's, in training and in a
forward-only call.</dd></div>
<div><dt>weight sum error</dt><dd><code>lossagg/weight_sum</code> and
<code>lossagg/weight_expected</code>, reported in float32: {WEIGHT_SUM_TOLERANCE:g} is
allowed.</dd></div>
<div><dt>tolerance</dt><dd>The rounding of the least precise part, and a margin: 1e-12 in float64,
1e-06 with experts (Megatron's routers compute in float32), 1e-05 in float32. A wrong factor or a
wrong denominator is an error many orders of magnitude larger.</dd></div>
</dl>
<p><b>What it does not prove.</b> It proves the aggregation, on this Megatron-Core, in this
environment and on these layouts. Your own model, data, loss function and kernels took no part
in it.</p></section>"""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2125;--soft:#5b646d;--line:#e1e5e9;
--pass:#0a5fa5;--fail:#b23c00}
@media screen and (prefers-color-scheme:dark){:root{--paper:#15181b;--ink:#e3e6e9;--soft:#9aa4ae;
--line:#2d3339;--pass:#6fb4f0;--fail:#ff9b61}}
*{box-sizing:border-box}
html{background:var(--paper);color:var(--ink);-webkit-text-size-adjust:100%;
font:14px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
body{margin:0;padding:56px 28px 96px;overflow-wrap:anywhere}
main{max-width:940px;margin:0 auto}
section{margin-top:48px}
h1{font-size:26px;line-height:1.3;font-weight:400;letter-spacing:-.01em;margin:4px 0 10px}
h1 b,header b{font-weight:650}
h2{font-size:15px;font-weight:650;margin:0 0 12px}
p{margin:0 0 10px;max-width:72ch}
a{color:inherit;text-decoration-color:var(--soft);text-underline-offset:3px}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.soft,header p{color:var(--soft);margin:0}
.pass,header.pass h1 b{color:var(--pass)}
.fail,header.fail h1 b{color:var(--fail)}
header.pass,header.fail{color:inherit}
ul.why{list-style:none;margin:0;padding:0}
ul.why li{border-left:3px solid var(--fail);padding-left:16px;margin-bottom:16px}
ul.why p{margin:0;max-width:none}
.facts{display:grid;grid-template-columns:1fr 1fr;column-gap:48px}
.facts dl,.reading dl{margin:0}
.facts dl div{display:grid;grid-template-columns:150px 1fr;gap:12px;padding:2px 0}
.layouts{grid-column:1/-1}
.facts .layouts dl div{grid-template-columns:300px 1fr}
dt{color:var(--soft)}
.layouts dt{color:inherit}
dd{margin:0}
.reading p,.reading dl{max-width:80ch}
.reading dl{margin:16px 0}
dd .soft{margin-left:6px}
.reading dl div{display:grid;grid-template-columns:150px 1fr;gap:12px;padding:3px 0}
figure{margin:0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12.5px;fill:currentColor}
svg text.soft,svg text.tick{fill:var(--soft)}
svg text.tick{text-anchor:middle}
svg .grid{stroke:var(--line);fill:none}
svg .bar{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:5 3;fill:none}
svg circle,svg path.fail{fill:currentColor;fill-opacity:.7}
svg.key{display:inline-block;width:12px;height:12px;vertical-align:-1px;margin-left:10px}
figcaption{color:var(--soft);font-size:13px;margin-top:8px;max-width:100ch}
table{display:block;font-size:13px;font-variant-numeric:tabular-nums;margin-bottom:32px;
scroll-margin-top:16px}
caption,thead,tbody{display:block;text-align:left}
caption{padding:8px 0;font-size:14px}
caption b:first-child{margin-right:10px}
tr{display:grid;grid-template-columns:minmax(0,1fr) 112px 70px 48px 96px 96px 76px 112px 48px;
column-gap:8px;padding:3px 0;border-top:1px solid var(--line);break-inside:avoid}
tbody+tbody{border-top:2px solid var(--line)}
tr:target{outline:2px solid var(--soft);outline-offset:2px}
th,td{padding:0;text-align:right;font-weight:400}
th:first-child,td:nth-child(2),th:nth-child(2),td:nth-child(3),th:nth-child(3){text-align:left}
thead th{color:var(--soft);font-size:12px}
td.over,td.fail{font-weight:650}
td.over{color:var(--fail)}
td.why{grid-column:1/-1;text-align:left;color:var(--soft);padding:0 0 4px 16px}
@media screen and (max-width:800px){.facts{grid-template-columns:1fr}.wide{overflow-x:auto}
table{min-width:800px}.reading dl div{grid-template-columns:1fr;gap:0}}
@media print{body{padding:0}section,h2{break-after:avoid}}
"""
