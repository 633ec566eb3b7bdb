"""Add each wrong factor on purpose and check that ``lossagg verify`` fails and names it.

A file of this folder names a fault, a source file, and the lines to replace (conflict markers). For
each one the package is copied, the lines replaced, and the copy verifies itself at DP 3 x CP 2 with
M = 4, where M, DP, CP, DP * CP and N differ (those of ``MORE`` with further options).
Exit status 1 where a fault is not caught, where the cause that is printed is not the fault (its
file's name is the cause's) and no step refuses it by its coefficient, where its lines are not found
exactly once, or where the unpatched copy fails.

The ranks are forked from a process that has imported Megatron-Core: ``verify_copy_worker.py``.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "support"))

from fork_server import STAND_INS, WITH_MEGATRON, ForkServer  # noqa: E402

RANKS = 6
VERIFY = ["--dp", "3", "--cp", "2", "--microbatches", "4"]
MORE = {
    "zigzag_on_contiguous": ("--cp-partition", "contiguous"),
    "gathered_on_every_rank": ("--packing", "gathered"),
    "without_instances": (
        *("--float32", "--megatron-fsdp", "optim_grads_params"),
        *("--optimizer-instances", "3"),
    ),
}
"""Options of the faults that another layout shows."""
REFUSED = "arrived in the backward pass with the coefficient"
"""The audit's message, with the wrong factor."""
SECONDS = 300.0
SERVER = ForkServer(WITH_MEGATRON, path=f"{ROOT}:{HERE.parent / 'support'}")


def main(names: list[str]) -> int:
    """Run the faults named, all by default; print one line each."""
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
    SERVER.close()
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
        report = copy / "report.json"
        worker = HERE.parent / "verify" / "verify_copy_worker.py"
        command = [str(worker), folder, *VERIFY, *options, "--json", str(report)]
        # PYTHONPATH: of the process that computes the reference
        env = {"PYTHONPATH": folder}
        done = SERVER.launch(command, processes=RANKS, timeout=SECONDS, env=env)
        output = done.stdout + done.stderr
        if done.returncode != 0 or not report.exists():
            raise SystemExit(f"the ranks ended with {done.returncode}\n{output}")
        verdicts = json.loads(report.read_text())["verdicts"]
    if not verdicts:
        raise SystemExit(f"verify has no cases\n{output}")
    failed = [verdict for verdict in verdicts if not verdict["passed"]]
    for verdict in failed:  # what is printed is what is in the report
        if verdict["explanation"] not in output:
            raise SystemExit(f"not printed: {verdict['explanation']}\n{output}")
    causes = [cause for verdict in failed for cause in verdict["causes"]]
    if file is not None and not causes:  # a factor that the step refuses is in its message
        causes = [file.stem for verdict in failed if REFUSED in verdict["explanation"]]
    return len(failed), len(verdicts), sorted(set(causes))


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
