"""What the users' pages claim is what the package does: aliases, messages, names, numbers."""

import argparse
import ast
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch
from steps import a_step

import megatron_lossagg
from megatron_lossagg import Aggregation, Layout, Sequences, add_loss_aggregation_args, plan_step
from megatron_lossagg.cli.main import _parser, main
from megatron_lossagg.errors import AggregationError
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.reduction.modes import ALIASES, MODES
from megatron_lossagg.reduction.table import StepTotals

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import checks_page  # noqa: E402  of tools/
import flags_page  # noqa: E402  of tools/
import names_page  # noqa: E402  of tools/

DOCS = ROOT / "docs"
COUNTED = {"sample_mean", "prompt_mean", "constant", "sample_sum"}
"""Modes whose denominator has B or P."""


def tables_by_section(page):
    """Cells of the table rows under each heading, without head and rule."""
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]
        yield section.splitlines()[0], [[c.strip() for c in r.split(" | ")] for r in rows]


@pytest.mark.parametrize("name", ALIASES)
def test_a_name_of_another_system_is_taken_by_our_flags(name, capsys):
    alias = ALIASES[name]
    needs = MODES[alias.mode].divisor == "required"
    flags = ["--loss-aggregation-divisor", "16384"] if needs else []
    parser = add_loss_aggregation_args(argparse.ArgumentParser())
    aggregation = aggregation_from_args(parser.parse_args(["--loss-aggregation", name, *flags]))
    assert aggregation.mode == alias.mode
    assert aggregation.count_empty == alias.count_empty
    assert alias.count_empty or alias.mode in COUNTED
    assert main(["explain", name, *flags]) == 0
    assert capsys.readouterr().out.startswith(f"{alias.mode}: w_s = ")


def test_the_names_of_papers_on_the_page_are_accepted():
    (section,) = re.findall(
        r"^### Papers\n(.*?)^#", (DOCS / "which-mode.md").read_text(), re.M | re.S
    )
    accepted, refused = section.split(" are accepted. ")
    assert {*re.findall(r"`(\w+)`", accepted)} < {name for name in ALIASES if ":" not in name}
    with pytest.raises(AggregationError, match=r"names two losses: token_mean.* and prompt_mean"):
        Aggregation(re.findall(r"^`(\w+)` is refused", refused)[0])


def test_the_names_that_move_are_names():
    named = re.findall(r"`([\w-]+:[\w=-]+)`", (DOCS / "which-mode.md").read_text())
    assert named
    assert {*named} <= ALIASES.keys()


def names_that_are_reported():
    """The names of a real report: one microbatch of one sequence on one rank."""
    plan = plan_step(
        Aggregation("token_mean"),
        Sequences(active_tokens=[2]),
        totals=StepTotals(active_tokens=2, samples=1),
    )
    step = a_step(plan, 1, shadows={"MODE": Aggregation("token_sum")})
    layout = Layout.local([2], cp_size=1, cp_rank=0)
    mb = step.microbatch([0], torch.ones(2), layout=layout)
    loss = mb.reduce(torch.ones(2, requires_grad=True))
    *_, report = mb.outputs(loss, report={PretrainIntegration.loss_name: loss})
    return set(report)


def test_the_dashboard_lists_the_names_of_a_report():
    sections = dict(tables_by_section(DOCS / "dashboard.md"))
    rows = sections["Each step"]
    listed = {row[0].strip("`") for row in rows if row[0].strip("`") not in {*MODES, "mode"}}
    # _Replay gives these names to what the framework reports, and to what it trains.
    framework = {"stock/lm_loss", "lossagg/shadow/stock"}
    assert listed == names_that_are_reported() | framework
    page = (DOCS / "dashboard.md").read_text()
    assert set(re.findall(r"lossagg/[\w/]+", page)) <= names_that_are_reported() | framework
    assert {row[0].strip("`") for row in rows} >= set(MODES)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_the_output_of_explain_on_a_page_is_what_it_prints(page, capsys, tmp_path, monkeypatch):
    text = page.read_text()
    for indent, name, content in re.findall(
        r"^( *)```python\n *# (\w+\.py)\n(.*?)^ *```", text, re.M | re.S
    ):
        (tmp_path / name).write_text(dedented(content, indent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    blocks = re.findall(
        r"^( *)```text\n *\$ lossagg (explain [^\n]+)\n(.*?)^ *```", text, re.M | re.S
    )
    assert blocks or page.name not in ("which-mode.md", "own-loop.md")
    for indent, command, output in blocks:
        assert main(command.split()) == 0
        printed = capsys.readouterr().out
        assert dedented(output, indent) in printed


def dedented(block, indent):
    return "".join(line.removeprefix(indent) for line in block.splitlines(keepends=True))


COMMANDS = sorted(
    {
        (page.name, " ".join(command.split()))
        for page in [ROOT / "README.md", *DOCS.rglob("*.md")]
        for command in re.findall(
            r"(?:lossagg|-m megatron_lossagg) ((?:verify|explain)\b[^`#\n]*)", page.read_text()
        )
        if " -" in command and "--list" not in command  # which prints and exits
    }
)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_on_a_page_has_flags_that_exist(page, command):
    filled = {"MODE": "token_mean", "NEW": "token_mean", "L": "4096", "...": "3,0/5"}
    words = [filled.get(word, word) for word in command.split()]
    _parser(words).parse_args(words)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_python_on_a_page_parses_and_imports_names_that_exist(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_los"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")


USERS_CODE = [
    *(
        path.read_text()
        for folder in ("examples", "benchmarks")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ),
    *(
        code
        for page in DOCS.rglob("*.md")
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ),
]


def test_examples_and_pages_import_a_public_name_from_the_package_itself():
    """The package's own modules are for what has no public name."""
    deep = [
        (node.module, name.name)
        for code in USERS_CODE
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_lossagg.")
        for name in node.names
    ]
    assert deep
    assert not [(module, name) for module, name in deep if name in megatron_lossagg.__all__]
    assert not [module for module, _ in deep if module.startswith("megatron_lossagg.cli")]


def test_the_page_of_checks_is_what_the_code_prints():
    assert checks_page.PAGE.read_text() == checks_page.page(), "run python -m tools.checks_page"


def test_the_page_of_flags_is_what_the_code_prints():
    assert flags_page.PAGE.read_text() == flags_page.page(), "run python -m tools.flags_page"


def test_the_page_of_names_is_what_the_code_prints():
    assert names_page.PAGE.read_text() == names_page.page(), "run python -m tools.names_page"


def test_what_ran_names_the_releases_that_the_tests_fetch_and_install():
    """The page says which, the list has them; Megatron-LM's commit is its tag there."""
    page = (DOCS / "evidence.md").read_text()
    listed = (ROOT / "tools" / "frameworks.txt").read_text()
    fetched = dict(re.findall(r"^(\S+) \S+ ([0-9a-f]{40})$", listed, re.M))
    assert fetched.pop("Megatron-LM").startswith("55ac7082")
    for name, commit in fetched.items():
        assert commit[:8] in page, name
    installed = (ROOT / "tests" / "frameworks" / "requirements.txt").read_text()
    for name, release in re.findall(r"^(\S+)==(\S+)$", installed.split("\n\n")[0], re.M):
        assert re.search(rf"\[{name}\]\S* \| [^|]*{re.escape(release)}", page, re.I), name


PACKAGE = ROOT / "megatron_lossagg"
FOLDERS = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
OURS = rf"(?:megatron_lossagg|tests|tools|{'|'.join(FOLDERS)})/[\w./]*\w"
PATH = re.compile(rf"(?<![\w/.-])(?:(?:[\w-]+/)+\w+\.py|{OURS})")
MAINTAINED = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


@pytest.mark.parametrize(
    "page",
    [*MAINTAINED, *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: f"{page.parent.name}-{page.stem}",
)
def test_a_file_or_module_of_the_package_that_a_page_names_exists(page):
    text = page.read_text()
    named = [code for code in re.findall(r"`([^`\n]+)`", text) if "://" not in code]
    for path in (path for code in named for path in PATH.findall(code)):
        places = (ROOT / path, PACKAGE / path, PACKAGE / f"{path}.py")
        assert any(place.exists() for place in places), path
    for name in re.findall(r"\bmegatron_lossagg(?:\.\w+)+", text):
        pkgutil.resolve_name(name)


def names_in(file):
    """What a file defines: functions, classes, and variables with their attributes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_the_architecture_names_every_folder_and_what_its_files_define():
    page = (DOCS / "architecture.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)/` \|", page, re.M)) == sorted(FOLDERS)
    found = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", page)
    assert len(found) > 10
    for file, names in found:
        for name in re.findall(r"\w+", names):
            assert name in names_in(PACKAGE / file), (file, name)
