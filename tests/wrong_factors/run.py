"""Add each wrong factor on purpose and check that ``lossagg verify`` fails and names it.

A file of this folder names a fault, a source file, and the lines to replace (conflict markers). For
each one the package is copied, the lines replaced, and the copy verifies itself at DP 3 x CP 2 with
M = 4, where M, DP, CP, DP * CP and N differ (those of ``MORE`` with further options).
Exit status 1 where a fault is not caught, where the cause that is printed is not the fault (its
file's name is the cause's), where its lines are not found exactly once, or where the unpatched copy
fails.

The ranks are forked from this process, which has imported Megatron-Core with the CPU stand-ins: a
rank has a launcher's environment, forgets the package but for the stand-ins, and runs the copy's
command line.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "support"))

from copy_worker import use_copy  # noqa: E402
from fork_server import STAND_INS, fork_ranks  # noqa: E402

RANKS = 6
VERIFY = ["verify", "--dp", "3", "--cp", "2", "--microbatches", "4"]
MORE = {
    "zigzag_on_contiguous": ("--cp-partition", "contiguous"),
    "gathered_on_every_rank": ("--packing", "gathered"),
}
"""Options of the faults that another layout shows."""
SECONDS = 300.0
UNEXPECTED = 70
"""Exit status of a rank whose command raised: neither that it passed nor that a case failed."""


def main(names: list[str]) -> int:
    """Run the faults named, all by default; print one line each."""
    import_megatron()
    files = [HERE / f"{name}.txt" for name in names] or sorted(HERE.glob("*.txt"))
    good = True
    for options in {options_of(file) for file in files}:
        failed, total, _ = verify(None, options)
        print(f"unpatched: {failed} of {total} cases fail", flush=True)
        good = good and failed == 0
    caught = named = 0
    for file in files:
        failed, total, causes = verify(file, options_of(file))
        caught += failed > 0
        named += causes == [file.stem]
        verdict = "caught" if failed else "NOT CAUGHT"
        cause = ", ".join(causes) or "no cause"
        print(f"{verdict}: {file.stem}: {failed} of {total} cases fail; {cause}", flush=True)
    print(f"{len(files)} wrong factors, {caught} caught, {named} named")
    return int(not (good and caught == named == len(files)))


def options_of(file: Path) -> tuple[str, ...]:
    """Return what ``VERIFY`` lacks for a fault."""
    return MORE.get(file.stem, ())


def verify(file: Path | None, options: tuple[str, ...]) -> tuple[int, int, list[str]]:
    """Copy, patch and verify: how many cases fail, of how many, and the causes named."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "megatron_lossagg", copy / "megatron_lossagg")
        if file is not None:
            apply(file, copy)
        report, printed = copy / "report.json", copy / "printed.txt"
        statuses = run_ranks(copy, [*VERIFY, *options, "--json", str(report)], printed)
        output = printed.read_text()
        if not set(statuses) <= {0, 1} or not report.exists():
            raise SystemExit(f"the ranks ended with {statuses}\n{output}")
        verdicts = json.loads(report.read_text())["verdicts"]
    if not verdicts:
        raise SystemExit(f"verify has no cases\n{output}")
    failed = [verdict for verdict in verdicts if not verdict["passed"]]
    for verdict in failed:  # what is printed is what is in the report
        if verdict["explanation"] not in output:
            raise SystemExit(f"not printed: {verdict['explanation']}\n{output}")
    causes = [cause for verdict in failed for cause in verdict["causes"]]
    return len(failed), len(verdicts), sorted(set(causes))


def import_megatron() -> None:
    """Import, once for all ranks, the stand-ins and every module of Megatron that they use."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module(STAND_INS).install()
    importlib.import_module("megatron_lossagg.verify.verdict")


def run_ranks(copy: Path, arguments: list[str], printed: Path) -> list[int]:
    """Fork the ranks of a command of the copy; their exit statuses, -9 where one was killed."""
    outputs = [copy / f"printed-{rank}.txt" for rank in range(RANKS)]
    ended = fork_ranks(
        lambda: run_command(copy, arguments),
        processes=RANKS,
        outputs=[(output, output) for output in outputs],
        # PYTHONPATH: of the process that computes the reference
        environment={**os.environ, "PYTHONPATH": str(copy)},
        timeout=SECONDS,
        good=(0, 1),
    )
    printed.write_text("".join(output.read_text() for output in outputs if output.exists()))
    return ended.statuses


def run_command(copy: Path, arguments: list[str]) -> int:
    """Run the copy's command line in this process, a rank; its exit status."""
    try:
        use_copy(copy)
        command = importlib.import_module("megatron_lossagg.cli.main")
        assert command.__file__.startswith(str(copy)), command.__file__
        status: int = command.main(arguments)
    except BaseException:
        traceback.print_exc()
        return UNEXPECTED
    return status


def apply(file: Path, copy: Path) -> None:
    """Replace the lines between the first two markers by those between the last two.

    The copy's verification then knows the faults of this folder: see ``predictions.py``.
    """
    match = re.fullmatch(
        r".+\n\n(.+)\n<<<<<<<\n(.*)=======\n(.*)>>>>>>>\n", file.read_text(), re.DOTALL
    )
    if match is None:
        raise SystemExit(f"{file.name}: not of the form fault, file, <<<<<<<, =======, >>>>>>>")
    path, old, new = match.groups()
    source = (copy / path).read_text()
    if source.count(old) != 1:
        raise SystemExit(
            f"{file.name}: its lines occur {source.count(old)} times in {path}, expected 1"
        )
    if path.startswith(STAND_INS.replace(".", "/")):
        raise SystemExit(f"{file.name}: {path} is not loaded from the copy: fault another file")
    (copy / path).write_text(source.replace(old, new))
    teach(copy)


def teach(copy: Path) -> None:
    """Add the faults of this folder to the causes that the copy's verification knows."""
    verify = copy / "megatron_lossagg" / "verify"
    shutil.copy(HERE / "predictions.py", verify / "predictions.py")
    with (verify / "causes.py").open("a") as causes:
        causes.write(
            "\nfrom megatron_lossagg.verify import predictions\n\n"
            "CAUSES = (*CAUSES, *predictions.CAUSES)\n"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
