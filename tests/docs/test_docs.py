"""The pages hang together: links, names of the machine, the reference, the decisions."""

import importlib
import re
from pathlib import Path

import pytest

import megatron_lossagg

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = sorted(ROOT.glob("*.md"))
PAGES = sorted([*DOCS.rglob("*.md"), *OUTSIDE, ROOT / "examples/drgrpo/README.md"])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def name_of(page):
    return str(page.relative_to(ROOT))


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title).lower() for title in titles)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in words}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_an_anchor_of_it(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target}: link to a file, so that GitHub and the site have it"
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "mkdocs.yml", ROOT / "tools/docs_hooks.py"], ids=name_of
)
def test_no_page_names_a_place_of_the_machine_that_wrote_it(page):
    assert not re.search(r"(?<![\w.$}-])/(work|tmp|root|home)/", page.read_text())


def test_every_page_of_the_site_is_in_the_navigation_or_listed_under_it():
    listed = set(re.findall(r"(docs/[\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {name_of(page) for page in DOCS.rglob("*.md") if not page.name.startswith("0")}
    assert listed == pages


def test_the_reference_has_every_public_name_once():
    pages = (DOCS / "reference").glob("*.md")
    entries = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    names = [entry.rpartition(".")[2] for entry in entries]
    assert len(names) == len(set(names))
    assert set(megatron_lossagg.__all__) <= set(names)
    for entry in entries:
        module, _, name = entry.rpartition(".")
        assert getattr(importlib.import_module(module), name).__module__ == module


def test_every_decision_is_listed_by_its_title():
    index = (DOCS / "decisions/README.md").read_text()
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        number, title = page.read_text().splitlines()[0].removeprefix("# ").split(" ", 1)
        assert f"| [{number.rstrip(':')}]({page.name}) | {title} |" in index


@pytest.mark.parametrize("page", [*PAGES, ROOT / "launch/README.md"], ids=name_of)
def test_no_page_installs_from_an_index_or_clones_from_an_address_that_is_not_there(page):
    if '\nrepository = ""' not in (ROOT / "pyproject.toml").read_text():
        pytest.skip("there is an address")
    found = re.search(r"pip install [^`\n]*megatron-lossagg|git clone <", page.read_text())
    assert found is None, "write pip install ., in a checkout"


def linked(pages):
    """The pages that some pages link to, and these pages."""
    found = set(pages)
    for page in pages:
        paths = (link.partition("#")[0] for link in LINK.findall(FENCE.sub("", page.read_text())))
        found |= {(page.parent / path).resolve() for path in paths if path.endswith(".md")}
    return {page for page in found if page.is_file()}


def test_every_page_but_a_decision_is_two_clicks_from_the_first():
    pages = {page for page in DOCS.rglob("*.md") if not page.name.startswith("0")}
    assert not pages - linked(linked([ROOT / "README.md"]))


def words_of(pages):
    return sum(len(page.read_text().split()) for page in pages)


def test_the_pages_stay_short():
    """What is printed from the code, or quoted by tests, is in the reference."""
    own = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert words_of([*DOCS.glob("*.md"), *(DOCS / "integrations").glob("*.md"), *own]) <= 20_000
    assert words_of((DOCS / "decisions").glob("*.md")) <= 5_000


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("0*.md")), ids=name_of)
def test_a_decision_is_one_short_paragraph(page):
    title, text = page.read_text().split("\n\n")
    assert title.startswith("# 0")
    assert len(text.split()) <= 120


SECTIONS = [
    "## What a sample is",
    "## What is not covered",
    "> **What you would get silently wrong**",
    "## Weigh it",
]
NO_FRAMEWORK = ("README", "aliases", "integration")
FRAMEWORKS = [p for p in (DOCS / "integrations").glob("*.md") if p.stem not in NO_FRAMEWORK]


@pytest.mark.parametrize("page", sorted(FRAMEWORKS), ids=name_of)
def test_a_frameworks_page_says_in_one_order_what_all_say(page):
    """First the line that turns it on; longer matter stands below a rule."""
    lines = page.read_text().split("\n---\n")[0].splitlines()
    assert [line for line in lines if line.startswith(("## ", "> **What"))] == SECTIONS
    assert lines.index(SECTIONS[0]) > min(n for n, line in enumerate(lines) if line[:3] == "```")
