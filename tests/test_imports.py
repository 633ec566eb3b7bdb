"""Imports go one way, and only some folders import Megatron: read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import fork_server
from fork_server import WITHOUT_MEGATRON
from step_record import STEP

import megatron_lossagg
from megatron_lossagg.reduction.modes import CUSTOM, MODES, OWN_WEIGHTS

PACKAGE = Path(__file__).parents[1] / "megatron_lossagg"
FOLDERS = [
    "reduction",
    "contract",
    "weigh",
    "guards",
    "record",
    "loop",
    "integrations",
    "cpu",
    "verify",
    "cli",
]
"""Each imports only from those before it, and from ``errors``."""
TOP = {"__init__.py", "__main__.py", "errors.py"}
ANNOTATIONS = {
    "__future__", "__future__.annotations", "collections.abc", "collections.abc.Iterable",
    "collections.abc.Callable", "collections.abc.Sequence", "typing", "typing.Any", "torch.Tensor",
}  # fmt: skip
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports_of(path):
    """Yield every module imported anywhere in a file, inside functions too."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # imports for a type checker alone do not count
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported(path):
    names = (name.split(".") for name in imports_of(path))
    return {parts[1] for parts in names if parts[0] == "megatron_lossagg" and len(parts) > 1}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_from_those_before_it(folder):
    later = {*FOLDERS[FOLDERS.index(folder) + 1 :], *megatron_lossagg.__all__}
    for path in (PACKAGE / folder).rglob("*.py"):
        assert not modules_imported(path) & later, path


def test_the_package_has_these_folders_and_three_files():
    names = {path.parts[0] for path in MODULES}
    assert names == {*FOLDERS, *TOP}


def test_the_cpu_package_imports_nothing_of_aggregations():
    for path in (PACKAGE / "cpu").rglob("*.py"):
        assert modules_imported(path) <= {"cpu", "errors"}, path


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_megatron_is_imported_by_these_folders_only(module):
    names = {name.split(".")[0] for name in imports_of(PACKAGE / module)}
    is_probe = module.parts[:2] == ("loop", "probe.py")
    if module.parts[0] not in ("contract", "integrations", "cpu", "verify") and not is_probe:
        assert "megatron" not in names
    assert "transformer_engine" not in names


PRINT_MODULES = "\nimport sys\nprint({m.partition('.')[0] for m in sys.modules})"


def modules_after(code):
    """Return the top-level packages that a process has imported after this code."""
    out = subprocess.check_output([sys.executable, "-c", code + PRINT_MODULES], text=True)
    return ast.literal_eval(out.splitlines()[-1])


@pytest.mark.launches
def test_a_plan_a_layout_and_a_reducer_load_nothing_but_the_reduction(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from megatron_lossagg import Aggregation, Layout, Sequences, plan_step\n"
        "plan = plan_step(Aggregation('token_mean'), Sequences(active_tokens=[2]))\n"
        "layout = Layout.thd_zigzag([0, 4], cp_size=1, cp_rank=0)\n"
        "reducer = plan.reducer([0], torch.tensor([1, 1, 0, 0]), layout)\n"
        "assert reducer(torch.ones(4)).item() == 1\n"
        "assert 'torch._dynamo' not in sys.modules\n"  # a second, and 50 MB
        "loaded = [m.split('.') for m in sys.modules if m.startswith('megatron_lossagg.')]\n"
        "print({name for _, name, *_ in loaded})"
    )
    done = fork_server(WITHOUT_MEGATRON).launch([str(script)], processes=1, timeout=300)
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {"reduction", "errors"}


@pytest.mark.launches
def test_importing_the_package_imports_neither_megatron_nor_transformer_engine(tmp_path):
    """In a process that has imported torch, as the package does."""
    script = tmp_path / "script.py"
    script.write_text("from megatron_lossagg import *\nLossAggregator" + PRINT_MODULES)
    done = fork_server(WITHOUT_MEGATRON).launch([str(script)], processes=1, timeout=300)
    modules = ast.literal_eval(done.stdout.splitlines()[-1])
    assert "megatron_lossagg" in modules
    assert not {"megatron", "transformer_engine"} & modules


@pytest.mark.launches
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_version_and_the_help_need_no_torch(option):
    modules = modules_after(
        "from megatron_lossagg.cli.main import main\n"
        f"try: main([{option!r}])\n"
        "except SystemExit as ended: assert ended.code == 0"
    )
    assert "megatron_lossagg" in modules
    assert not {"torch", "numpy", "rich", "megatron"} & modules


ENDS = """
from megatron_lossagg.cli.main import main
for words, status in COMMANDS:
    try: ended = main(words.split())
    except SystemExit as error: ended = error.code
    assert ended == status, words
"""


@pytest.mark.launches
def test_only_what_trains_needs_torch(tmp_path):
    """Each command's help and wrong usage, and all of explain and diff."""
    record, rollouts = tmp_path / "record.jsonl", tmp_path / "r.jsonl"
    record.write_text(STEP.line())
    rollouts.write_text('{"response_length": 3}')
    commands = [
        *((f"{command} --help", 0) for command in ("explain", "plot", "diff", "run", "verify")),
        ("explain --list", 0),
        ("explain token_meen", 2),
        ("explain token_mean --lengths 3,x", 2),
        ("explain token_mean --dp 0", 2),
        ("explain constant", 2),
        *(
            (f"explain {mode} --divisor 9 --exponent 0.5", 0)
            for mode in MODES.keys() - {CUSTOM, OWN_WEIGHTS}
        ),
        ("explain token_mean --dp 2 --cp 2 --loss-scaling per_token", 0),
        (f"plot {rollouts} --html page.html --exponent x", 2),
        ("plot a.jsonl --html page.html", 2),
        ("plot a.csv --html page.html", 2),
        ("plot a.jsonl --html page.html --column a=b", 2),
        (f"diff {record} absent.jsonl", 2),
        (f"diff {record} {record}", 0),
        ("run absent.py --loss-aggregation token_mean", 2),
        ("verify --absent", 2),
        ("verify --dp 0", 2),
        ("verify --moe --cp-partition contiguous", 2),
        ("verify --loss-aggregation token_meen", 2),
        ("verify --dp 2 --json absent/report.json", 2),
    ]
    modules = modules_after(f"COMMANDS = {commands}{ENDS}")
    assert "megatron_lossagg" in modules
    assert not {"torch", "megatron", "pandas", "matplotlib"} & modules


@pytest.mark.launches
def test_a_plot_needs_no_torch(tmp_path):
    pytest.importorskip("pandas", reason="not installed")
    pytest.importorskip("matplotlib", reason="not installed")
    rollouts = tmp_path / "r.jsonl"
    rollouts.write_text('{"response_length": 3}')
    command = (f"plot {rollouts} --png {tmp_path / 'r.png'} --html {tmp_path / 'r.html'}", 0)
    modules = modules_after(f"COMMANDS = {[command]}{ENDS}")
    assert {"pandas", "matplotlib"} <= modules
    assert not {"torch", "megatron"} & modules


def test_every_public_name_can_be_imported_and_is_listed():
    for name in megatron_lossagg.__all__:
        assert getattr(megatron_lossagg, name).__module__.startswith("megatron_lossagg.")
        assert name in dir(megatron_lossagg)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        megatron_lossagg.absent  # noqa: B018


def test_the_table_of_modes_needs_neither_torch_nor_argparse():
    assert not {"torch", "numpy", "argparse"} & set(imports_of(PACKAGE / "reduction" / "modes.py"))


@pytest.mark.launches
def test_the_flags_are_read_without_torch():
    modules = modules_after(
        "import argparse\n"
        "from megatron_lossagg.loop.flags import add_loss_aggregation_args, aggregation_from_args\n"
        "parser = add_loss_aggregation_args(argparse.ArgumentParser())\n"
        "assert aggregation_from_args(parser.parse_args(['--loss-aggregation', 'token_mean']))"
    )
    assert "megatron_lossagg" in modules
    assert not {"torch", "numpy", "megatron"} & modules


def test_the_reference_shares_no_code():
    assert set(imports_of(PACKAGE / "verify" / "reference_loss.py")) - ANNOTATIONS == {
        "torch",
        "numpy",
        "math",
        "types",
        "types.SimpleNamespace",
    }
