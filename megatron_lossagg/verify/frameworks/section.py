"""A framework's checks as a section of the HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from megatron_lossagg.verify.frameworks.check import FAIL, PASS, cells, counted, none_ran
from megatron_lossagg.verify.words import number_of

__all__ = ["STYLE", "headline", "lead", "section"]

_COLUMNS = {
    "check": "what is compared with the reference",
    "function": "the system's own function",
    "loss error": "relative error of the loss",
    "gradient error": "largest relative error of any gradient, or of its norm",
    "verdict": "PASS where both errors are below the tolerance",
}

STYLE = """
.framework tr{grid-template-columns:minmax(0,1.2fr) minmax(0,1fr) 96px 96px 76px}
.framework td:nth-child(3),.framework th:nth-child(3){text-align:right}
"""


def headline(framework: Mapping[str, Any]) -> tuple[str, str] | None:
    """Write what was found and what it means, where a check failed or none ran; else None."""
    if none_ran(framework["checks"]):
        return f"No check of {framework['name']} ran", "nothing is known of its own code"
    failed = sum(check["state"] == FAIL for check in framework["checks"])
    if not failed:
        return None
    found = (
        f"{failed} of {number_of(len(framework['checks']), 'check')} of {framework['name']} fail"
    )
    return found + "s" * (failed == 1), "its own code does not train the configured loss"


def lead(framework: Mapping[str, Any]) -> str:
    """Write one line for the head of the page."""
    text = f"{framework['name']}: {counted(framework['checks'])}."
    return f'<p>{escape(text)} <a href="#framework">Which</a></p>'


def section(framework: Mapping[str, Any]) -> str:
    """Write the table of checks, with the reason of each that failed or did not run."""
    heads = "".join(
        f'<th scope="col" title="{text}">{name}</th>' for name, text in _COLUMNS.items()
    )
    rows = "".join(map(_row, framework["checks"]))
    took = f"{framework['seconds']:.0f} s"
    return (
        f'<section><h2 id="framework">{escape(framework["name"])}</h2>'
        "<p>The system's own functions, as installed here, in a process of their own on the CPU: "
        "loss and gradient of a drawn step against the reference. A check that did not run proves "
        'nothing.</p><div class="wide">'
        f'<table class="framework"><caption>{counted(framework["checks"])}, {took}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _row(check: Mapping[str, Any]) -> str:
    name, function, *errors, state = map(escape, cells(check))
    kind = {PASS: "pass", FAIL: "fail"}.get(check["state"], "soft")
    why = check["explanation"]
    return (
        f'<tr><th scope="row">{name}</th><td title="{escape(check["function"])}">{function}</td>'
        + "".join(f"<td>{error}</td>" for error in errors)
        + f'<td class="{kind}">{state}</td>'
        + (f'<td class="why">{escape(why)}</td>' if why else "")
        + "</tr>"
    )
