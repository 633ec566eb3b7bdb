"""What a built page must not have: faults of rendering that ``mkdocs build --strict`` does not see.

``tools/docs_hooks.py`` calls :func:`faults_of` for every page, and a fault ends ``make docs``.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
_CODE = {"code", "pre", "script", "style"}
_TITLES = {"h1", "h2", "h3", "h4", "h5", "h6"}
_TABLE = re.compile(r"\|\s*:?-{3,}:?\s*\||^\s*\|.*\|\s*$", re.MULTILINE)


def faults_of(page: str) -> list[str]:
    """List the faults of a page's HTML, each as one line."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    return parser.faults


class _Page(HTMLParser):
    """Collects faults while it reads the article of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self._open: list[str] = []
        self._children: list[list[str]] = [[]]
        """Names of the elements that have ended in each open element, since the last title."""
        self._texts: list[str] = []
        self._link: str | None = None
        self._described = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "meta" and given.get("name") == "description":
            self._described = bool(given.get("content"))
        if tag in _VOID:
            return
        if tag == "ol" and "start" not in given and "ol" in self._children[-1]:
            self.faults.append(f"a numbered list begins again at 1 {self._after()}")
        if tag == "a":
            self._link = ""
        self._open.append(tag)
        self._children.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag not in self._open:
            return
        while self._open.pop() != tag:  # an element whose end HTML leaves out
            self._children.pop()
        self._children.pop()
        siblings = self._children[-1]
        if tag in _TITLES:
            siblings.clear()
        siblings.append(tag)
        if tag == "a" and self._link is not None:
            if self._link.strip().endswith(".md"):
                self.faults.append(f"a link reads {self._link.strip()}: write what the page is")
            self._link = None

    def handle_data(self, data: str) -> None:
        if self._link is not None:
            self._link += data
        if _CODE & {*self._open}:
            return
        self._texts.append(data)
        if row := _TABLE.search(data):
            self.faults.append(f"a table is shown as text: {row[0].strip()[:60]}")
        if alert := re.search(r"\[!\w+\]", data):
            self.faults.append(f"an alert is shown as text: {alert[0]}")

    def close(self) -> None:
        super().close()
        if not self._described:
            self.faults.append("it has no description")

    def _after(self) -> str:
        text = " ".join(" ".join(self._texts).split())
        return f"after: ...{text[-60:]}"
