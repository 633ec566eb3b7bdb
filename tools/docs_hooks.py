"""MkDocs hooks of the site: paths, addresses, descriptions, maths, checks of what was built.

A page links to ``verify.md``, ``../examples/pairs.py`` or ``patches/x.patch`` as GitHub wants
it. MkDocs knows only what is in ``docs/``, by its path there. So :func:`on_files` names every file
by its path from the top of the repository, where such links mean the same, and adds the files
outside ``docs/`` that the navigation and pages name: Markdown as a page, anything else as it is.
Then no link is rewritten, and ``--strict`` checks all of them.

Pages are written for GitHub too. An alert (``> [!WARNING]``) and a quotation that begins with a
title of :data:`_ALERTS` become admonitions, ``<details>`` and numbered items that are indented by
three spaces may hold Markdown, and a link that reads ``verify.md`` takes that page's title.
Docstrings are written for a terminal: ``:class:`X``` and ``::`` of reStructuredText are removed.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tomllib
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]

from site_checks import faults_of  # noqa: E402, I001  next to this file
from megatron_lossagg.reduction.modes import ALIASES  # noqa: E402  imports no torch

_LOG = logging.getLogger("mkdocs.hooks.docs")
_LINK = re.compile(r"\]\(([^)#\s]+)")
_MATHS = re.compile(
    r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL
)  # \(...\) or \[...\], as pymdownx.arithmatex writes them

_ROLE = re.compile(r":(?:class|func|meth|mod):<code>(?:~[\w.]*\.)?([\w.]+)</code>")


_ALERT = re.compile(r"^> \[!(\w+)\][^\n]*\n((?:>.*(?:\n|$))*)", re.MULTILINE)
_ALERTS = {"What you would get silently wrong": "warning"}
"""Beginnings of a quotation that make it an admonition, and its kind."""
_QUOTED = re.compile(
    rf"^> \*\*({'|'.join(_ALERTS)})[.:]?\*\*[.:]?((?:.*(?:\n|$))(?:>.*(?:\n|$))*)", re.MULTILINE
)
_STEPS = re.compile(r"^\d+\. .*\n(?:[ \t]*\n|\d+\. .*\n| {2,}.*\n)*", re.MULTILINE)
"""A numbered list, with what its items hold."""
_NAME_OF_FILE = re.compile(r'<a href="([^"#]+)(#[^"]*)?">(?:<code>)?[\w./-]+\.md(?:</code>)?</a>')
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LONGEST_DESCRIPTION = 160
_FOR_MAINTAINERS = ("CHANGELOG", "CONTRIBUTING", "docs/decisions", "tests/public_failures")
"""Beginnings of the paths of pages that the search shows after the others."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the addresses from ``pyproject.toml``, the one place that has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lossagg"]
    config.site_url = config.site_url or settings["site"] or None
    if repository := settings["repository"]:
        config.repo_url, config.repo_name = repository, "/".join(repository.split("/")[-2:])
        config.edit_uri = "blob/main/"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Name files by their path in the repository and add those that pages link to."""
    site = Files([])
    for file in files:
        if file.src_dir != config.docs_dir:  # the theme's
            site.append(file)
            continue
        site.append(_at(f"docs/{file.src_uri}", config, file.dest_uri))
    _add(_paths_in(config.nav), site, config)
    for page in site.documentation_pages():
        _add(_linked_from(page), site, config)
    return site


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn what GitHub draws by itself into Markdown extensions; describe the page."""
    markdown = _ALERT.sub(lambda found: _admonition(found[1].lower(), "", found[2]), markdown)
    markdown = _QUOTED.sub(
        lambda found: _admonition(_ALERTS[found[1]], found[1], ">" + found[2]), markdown
    )
    markdown = _STEPS.sub(lambda found: _indented_by_four(found[0]), markdown)
    page.meta.setdefault("description", _description(markdown) or page.config_title)
    path = Path(page.file.src_uri)
    if path.parent == Path("docs/integrations"):
        names = (alias.partition(":") for alias in ALIASES)
        if tags := [name for system, _, name in names if system == path.stem]:
            page.meta["tags"] = tags
    if page.file.src_uri.startswith(_FOR_MAINTAINERS):
        page.meta["search"] = {"boost": 0.3}
    return markdown.replace("<details>", '<details markdown="1">')


def on_page_content(content: str, **_: object) -> str:
    """Replace the TeX of the page by MathML, and tidy what docstrings hold."""
    content = _MATHS.sub(_mathml, content)
    return _ROLE.sub(r"<code>\1</code>", content).replace("::</p>", ":</p>")


def on_env(env: object, config: MkDocsConfig, files: Files) -> None:
    """Give links that read as a file's name the title of its page, once all titles are known."""
    titles = {file.dest_uri: file.page.title for file in files.documentation_pages() if file.page}

    def titled(base: str, link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(base), link[1]))
        title = titles.get(target)
        return link[0] if title is None else f'<a href="{link[1]}{link[2] or ""}">{title}</a>'

    for file in files.documentation_pages():
        if file.page and file.page.content:
            base = file.dest_uri
            file.page.content = _NAME_OF_FILE.sub(
                lambda link, base=base: titled(base, link), file.page.content
            )


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Warn of what was drawn wrong; ``--strict`` makes it an error."""
    for fault in faults_of(output):
        _LOG.warning("%s: %s", page.file.src_uri, fault)
    return output


def _admonition(kind: str, title: str, quoted: str) -> str:
    """Write a quotation's lines as an admonition; its first line may be its title, in bold."""
    lines = [re.sub(r"^> ?", "", line) for line in quoted.splitlines()]
    if not title and lines and (bold := re.fullmatch(r"\*\*(.+?)\*\*", lines[0].strip())):
        title, lines = bold[1], lines[1:]
    heading = f'!!! {kind} "{title}"' if title else f"!!! {kind}"
    return "\n".join([heading, "", *(f"    {line}".rstrip() for line in lines), "", ""])


def _indented_by_four(steps: str) -> str:
    """Indent what numbered items hold as Python-Markdown wants it; GitHub takes three spaces."""
    held = re.findall(r"^( +)\S", steps, re.MULTILINE)
    missing = max(0, 4 - min(map(len, held), default=4))
    return re.sub(r"^(?= +\S)", " " * missing, steps, flags=re.MULTILINE)


def _description(markdown: str) -> str:
    """Return the page's title and the first sentences of its first paragraph, as plain text."""
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    before = "" if title is None else f"{_plain(title[1])}: "
    for paragraph in re.split(r"\n\s*\n", _FENCE.sub("", markdown)):
        text = " ".join(paragraph.split())
        if not re.match(r"[A-Z\d`*\[]", text) or text.startswith(("![", "[![", "* ")):
            continue
        text = before + _plain(text)
        if len(text) > _LONGEST_DESCRIPTION:
            cut = text[: _LONGEST_DESCRIPTION + 1]
            end = cut.rfind(". ")
            text = cut[: end + 1] if end > 60 else cut.rpartition(" ")[0] + " ..."
        return html.escape(text)
    return ""


def _plain(text: str) -> str:
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`*]|</?\w+[^>]*>", "", text).strip()


def _add(paths: Iterable[str], site: Files, config: MkDocsConfig) -> None:
    """Add files outside ``docs/``, and what the pages among them link to."""
    for path in paths:
        if site.get_file_from_path(path) is None and (ROOT / path).is_file():
            file = _at(path, config)
            site.append(file)
            if file.is_documentation_page():
                _add(_linked_from(file), site, config)


def _paths_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths_in(item)


def _mathml(found: re.Match[str]) -> str:
    display = "inline" if found[1] == "span" else "block"
    return convert(html.unescape(found[2]).strip(), display=display)


def _at(path: str, config: MkDocsConfig, dest_uri: str | None = None) -> File:
    return File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=dest_uri)


def _linked_from(page: File) -> Iterator[str]:
    for target in _LINK.findall((ROOT / page.src_uri).read_text()):
        if "://" not in target:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), target))
