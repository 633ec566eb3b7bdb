"""The site: what is drawn wrong is seen, workflows are pinned, and a built site is whole.

``make test-site`` builds the site once and runs the tests that read it, which skip otherwise. Node
searches as a page does, and chromium measures; what is not installed skips.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from site_checks import faults_of  # noqa: E402  of tools/

PYTHON = ROOT / os.environ.get("TEST_SITE", ".venv-docs") / "bin" / "python"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SITE = "https://o.example/megatron_lossagg/"
BUILD = """
import logging
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
logging.basicConfig(level=logging.WARNING)
config = load_config("mkdocs.yml", site_url=sys.argv[1], site_dir=sys.argv[2], strict=True)
config.plugins.on_startup(command="build", dirty=False)
build(config)
"""
HEAD = '<meta name="description" content="What it is.">'


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<p>| a | b |\n|---|---|\n| 1 | 2 |</p>", "a table is shown as text: | a | b |"),
        ("<ol><li>a</li></ol><pre>x</pre><ol><li>b</li></ol>", "a numbered list begins again at 1"),
        ('<a href="x.html"><code>math.md</code></a>', "a link reads math.md"),
        ("<blockquote><p>[!WARNING]\nIt breaks.</p></blockquote>", "an alert is shown as text"),
    ],
)
def test_what_is_drawn_wrong_is_a_fault(body, fault):
    (found,) = faults_of(HEAD + body)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "body",
    [
        "<table><tr><td>a</td></tr></table><pre><code>| a | b |\n|---|---|</code></pre>",
        "<ol><li>a</li><li>b<pre>x</pre></li></ol><h2>Next</h2><ol><li>a</li></ol>",
        '<ol><li>a</li></ol><p>and</p><ol start="2"><li>b</li></ol>',
        '<a href="math.html">The math</a> <p>P(a | b) is at most 1.<br>f(x) | x</p>',
    ],
)
def test_what_is_drawn_right_is_none(body):
    assert not faults_of(HEAD + body)


def test_a_page_without_a_description_is_a_fault():
    assert faults_of("<p>Text.</p>") == ["it has no description"]


def test_the_addresses_are_in_one_place():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lossagg"]
    assert {*settings} == {"repository", "site"}
    config = (ROOT / "mkdocs.yml").read_text()
    assert not re.search(r"^(site_url|repo_url):", config, re.MULTILINE)


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"(actions/[\w-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_by_commit_and_ends(workflow):
    text = workflow.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert all(PINNED.fullmatch(action) for action in used)
    assert text.count("timeout-minutes:") == text.count("runs-on:")
    assert "\npermissions:\n  contents: read\n" in text


def test_an_action_has_one_commit_in_all_workflows():
    pinned = {pin for workflow in WORKFLOWS for pin in PINNED.findall(workflow.read_text())}
    names = [name for name, _ in pinned]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def site(launches, tmp_path_factory):
    """Build the site for an address under a folder; return where it is."""
    if "TEST_SITE" not in os.environ:
        pytest.skip("builds the site: run make test-site")
    folder = tmp_path_factory.mktemp("site") / "megatron_lossagg"
    done = subprocess.run(
        [PYTHON, "-c", BUILD, SITE, folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def pages_of(site):
    return [page for page in site.rglob("*.html") if page.name != "404.html"]


def test_every_page_has_a_description_of_its_own(site):
    found = [
        re.search(r'<meta name="description" content="([^"]+)"', page.read_text())[1]
        for page in pages_of(site)
    ]
    assert len({*found}) == len(found)


def test_the_sitemap_has_every_page(site):
    urls = {element.text for element in ET.parse(site / "sitemap.xml").iter() if element.text}
    expected = {SITE + str(page.relative_to(site)) for page in pages_of(site)}
    assert len(expected) > 40
    assert expected - {SITE + "index.html"} <= urls
    assert SITE in urls or SITE + "index.html" in urls


def test_every_link_of_the_404_page_leads_to_a_file_from_any_folder(site):
    links = re.findall(r'(?:href|src)="([^"#]+)', (site / "404.html").read_text())
    local = [link for link in links if not re.match(r"https?:|data:", link)]
    assert local
    for link in local:
        assert link.startswith("/megatron_lossagg/"), link
        path = site / link.removeprefix("/megatron_lossagg/").partition("?")[0]
        assert path.is_file() or (path / "index.html").is_file(), link


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_search_finds_a_frameworks_setting_on_its_page_first(site):
    worker = next((site / "assets/javascripts/workers").glob("search.*.min.js"))
    done = subprocess.run(
        ["node", Path(__file__).with_name("search.cjs"), worker, site / "search/search_index.json",
         "patch_zero_bubble"], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found[0].startswith("integrations/primus.html")


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed: chromium")
def test_no_block_of_output_is_wider_than_its_column(site, tmp_path):
    """At 1400 pixels, by a script in a frame that holds each page."""
    pages = [str(page.relative_to(site)) for page in pages_of(site)]
    script = Path(__file__).with_name("widths.html").read_text()
    (site / "widths.html").write_text(script.replace("PAGES", json.dumps(pages)))
    serve = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,900",
             "--virtual-time-budget=600000", f"--user-data-dir={tmp_path}", "--dump-dom",
             f"http://127.0.0.1:{server.server_port}/widths.html"],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        server.shutdown()
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    result = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert result["pages"] == len(pages)
    assert not result["wide"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *_):
        pass
