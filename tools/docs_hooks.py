"""MkDocs hooks of the site: every file has its path in the repository; maths become MathML.

A page links to ``math.md``, ``../examples/drgrpo/README.md`` or ``patches/x.patch`` as GitHub wants
it. MkDocs knows only what is in ``docs/``, by its path there. So :func:`on_files` names every file
by its path from the top of the repository, where such links mean the same, and adds the files
outside ``docs/`` that the navigation and pages name: Markdown as a page, anything else as it is.
Then no link is rewritten, and ``--strict`` checks all of them.

Docstrings are written for a terminal: ``:class:`X``` and ``::`` of reStructuredText are removed.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(([^)#\s]+)")
_MATHS = re.compile(
    r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL
)  # \(...\) or \[...\], as pymdownx.arithmatex writes them

_ROLE = re.compile(r":(?:class|func|meth|mod):<code>(?:~[\w.]*\.)?([\w.]+)</code>")


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


def on_page_content(content: str, **_: object) -> str:
    """Replace the TeX of the page by MathML, and tidy what docstrings hold."""
    content = _MATHS.sub(_mathml, content)
    return _ROLE.sub(r"<code>\1</code>", content).replace("::</p>", ":</p>")


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
