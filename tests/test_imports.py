"""Imports go one way, and only five modules import Megatron: read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import fork_server
from fork_server import WITHOUT_MEGATRON

import megatron_lossagg

PACKAGE = Path(__file__).parents[1] / "megatron_lossagg"
ORDER = [
    "errors",
    "writing",
    "integers",
    "devices",
    "aggregation",
    "custom",
    "options",
    "flags",
    "scaling",
    "layout",
    "exchange",
    "faults",
    "divisor_check",
    "sequences",
    "counts",
    "mode_counts",
    "state",
    "microbatch",
    "reducer",
    "plan",
    "buffer",
    "integration",
    "first_step",
    "ownership",
    "record",
    "recorder",
    "outputs",
    "megatron_options",
    "live",
    "tracker",
    "step",
    "probe",
    "aggregator",
    "schedule",
    "integrations",
    "cpu",
    "verify",
    "cli",
]
LATER = {
    "aggregator": {"schedule"},  # LossAggregator.wrap makes the hook, which may make it
    "verify": {"cli"},  # a rank of Megatron-LM runs `lossagg run`
}
ANNOTATIONS = {
    "__future__", "__future__.annotations", "collections.abc", "collections.abc.Iterable",
    "collections.abc.Sequence", "typing", "typing.Any", "torch.Tensor",
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


def files_of(module):
    folder = sorted((PACKAGE / module).rglob("*.py"))
    return folder or [PACKAGE / f"{module}.py"] * (PACKAGE / f"{module}.py").exists()


@pytest.mark.parametrize("module", ORDER)
def test_no_module_imports_a_later_one(module):
    before = set(ORDER[: ORDER.index(module)])
    for path in files_of(module):
        later = LATER.get(module, set())
        assert modules_imported(path) & {*ORDER} - {module} - later <= before, path


def test_every_module_has_its_place_in_the_order():
    names = {path.parts[0].removesuffix(".py") for path in MODULES}
    assert names == {*ORDER, "__init__", "__main__"}


def test_the_cpu_package_imports_nothing_of_aggregations():
    assert files_of("cpu")
    for path in files_of("cpu"):
        assert modules_imported(path) <= {"cpu", "errors"}, path


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_megatron_is_imported_by_five_modules_only(module):
    names = {name.split(".")[0] for name in imports_of(PACKAGE / module)}
    if module.parts[0] not in ("probe", "live.py", "integrations", "cpu", "verify"):
        assert "megatron" not in names
    assert "transformer_engine" not in names


PRINT_MODULES = "\nimport sys\nprint({m.partition('.')[0] for m in sys.modules})"


def modules_after(code):
    """Return the top-level packages that a process has imported after this code."""
    out = subprocess.check_output([sys.executable, "-c", code + PRINT_MODULES], text=True)
    return ast.literal_eval(out.splitlines()[-1])


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


def test_every_public_name_can_be_imported_and_is_listed():
    for name in megatron_lossagg.__all__:
        assert getattr(megatron_lossagg, name).__module__.startswith("megatron_lossagg.")
        assert name in dir(megatron_lossagg)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        megatron_lossagg.absent  # noqa: B018


def test_the_table_of_modes_needs_neither_torch_nor_argparse():
    assert not {"torch", "numpy", "argparse"} & set(imports_of(PACKAGE / "aggregation.py"))


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
        "math",
    }
