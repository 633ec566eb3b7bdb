"""A GPU result as one self-contained page, and as Markdown for a job's summary."""

from __future__ import annotations

from html import escape
from typing import Any

Json = dict[str, Any]

ROW_COLUMNS = {
    "tokens": "tokens",
    "dtype": "losses",
    "build_seconds": "build, us",
    "call_seconds": "call, us",
    "floor_seconds": "floor, us",
    "call_seconds_with_launches": "call with launches, us",
    "floor_seconds_with_launches": "floor with launches, us",
    "of_copy_bandwidth": "of the copy bandwidth",
    "sync": "host syncs",
}


def title(result: Json) -> str:
    """Write the result in one line."""
    if result["on_cpu"]:
        return f"{result['verdict']}, on the CPU: no GPU took part, nothing was measured"
    return f"{result['verdict']}: {result['machine']['devices']}"


def markdown(result: Json) -> str:
    """Write the result as Markdown."""
    lines = [f"## make gpu: {title(result)}", ""]
    lines += markdown_table(["part", "result", ""], part_cells(result))
    if "partition" in result["parts"].get("tests", {}):
        partition = result["parts"]["tests"]["partition"]
        lines += [f"Transformer Engine's partition of packed rows: {partition}", ""]
    machine = [[name, value] for name, value in result["machine"].items()]
    return "\n".join([*lines, *markdown_table(["machine", ""], machine)])


def markdown_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Write a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(v.replace("|", "\\|") for v in line) + " |" for line in lines] + [""]


def part_cells(result: Json) -> list[list[str]]:
    """Return name, verdict and reason of each part."""
    return [[name, part["verdict"], part["reason"]] for name, part in result["parts"].items()]


def page(result: Json) -> str:
    """Write the result as a page: what was found, where, and the numbers."""
    head = escape(title(result))
    sections = [
        f"<h1>{head}</h1><p>make gpu, {escape(result['written'])}</p>",
        section("Parts", table(["part", "result", ""], part_cells(result))),
        section("Machine", table(["", ""], [[k, v] for k, v in result["machine"].items()])),
        tests(result["parts"].get("tests", {})),
        verifications(result["parts"].get("verify", {})),
        rows(result["parts"].get("rows", {})),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{head}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main></body></html>\n"
    )


def tests(part: Json) -> str:
    """List what of the tests did not pass, and Transformer Engine's partition."""
    if "cases" not in part:
        return ""
    others = [
        [case["test"], case["outcome"], case["reason"]]
        for case in part["cases"]
        if case["outcome"] != "passed"
    ]
    partition = f"<p>Transformer Engine's partition of packed rows: {escape(part['partition'])}</p>"
    counts = f"<p>{escape(part['reason'])}</p>"
    listed = table(["test", "outcome", "reason"], others) if others else ""
    return section("Tests marked gpu", counts + partition + listed)


def verifications(part: Json) -> str:
    """List the layouts that were verified, with their reports."""
    if "layouts" not in part:
        return ""
    items = []
    for layout in part["layouts"]:
        links = ", ".join(f'<a href="{escape(f)}">{escape(f)}</a>' for f in layout["files"])
        items.append(f"<li>{escape(layout['summary'])} ({links})</li>")
    return section(f"lossagg verify on {part['ranks']} ranks", f"<ul>{''.join(items)}</ul>")


def rows(part: Json) -> str:
    """Tabulate the rows of the benchmark."""
    if "rows" not in part:
        return ""
    cells = [[row_cell(name, row[name]) for name in ROW_COLUMNS] for row in part["rows"]]
    note = f"<p>Copy bandwidth: {part['copy_bytes_per_second'] / 1e9:.0f} GB/s</p>"
    return section("Building and calling a reducer", note + table([*ROW_COLUMNS.values()], cells))


def row_cell(name: str, value: Any) -> str:
    """Write one number of a row."""
    if "seconds" in name:
        return f"{value * 1e6:.0f}"
    if name == "of_copy_bandwidth":
        return f"{value:.0%}"
    return str(value) or "none"


def section(heading: str, body: str) -> str:
    """Write a section."""
    return f"<section><h2>{escape(heading)}</h2>{body}</section>"


def table(columns: list[str], cells: list[list[str]]) -> str:
    """Write a table; without a heading where the columns have no names."""
    heading = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in cells
    )
    head = f"<thead><tr>{heading}</tr></thead>" if any(columns) else ""
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


STYLE = """
:root{color-scheme:light dark}
body{margin:0;padding:48px 24px;font:14px/1.55 system-ui,sans-serif;overflow-wrap:anywhere}
main{max-width:940px;margin:0 auto}
h1{font-size:24px;font-weight:600;line-height:1.3}
h2{font-size:15px;margin:36px 0 8px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:4px 16px 4px 0;border-top:1px solid #8884}
"""
