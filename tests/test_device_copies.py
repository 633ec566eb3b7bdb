"""Nothing in a step's path waits for a device: what each file may do is a table.

A framework's own file says it itself, by a comment at the line: ``# waits before the step``.

The device double (``tests/support/device_double.py``) counts the waits of what a test runs. This
looks at every line of the folders that a training step runs, the integrations among them, of which
many run on no double. A copy to a device stands in ``reduction/devices.py`` only, which pins.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_lossagg"
FOLDERS = ("reduction", "contract", "guards", "record", "loop", "integrations")
COPIES = "reduction/devices.py"
OWN = "integrations/"
SAYS = re.compile("# (waits before the step|does not wait: )")

ALLOWED = {
    # reads, with why none waits in a step
    ("reduction/microbatch.py", "partial_loss.item()"): "on the CPU only",
    ("reduction/checks.py", "partial_loss.item()"): "on the CPU only",
    ("reduction/faults.py", "value.item()"): "on the CPU only",
    (
        "reduction/faults.py",
        "torch.cat([part.double() for part in parts]).cpu()",
    ): "at the end of the step: what its checks found",
    ("reduction/exchange.py", ".cpu()"): "before the step: counts of a group, to be read",
    ("reduction/integers.py", "values.detach().cpu()"): "before the step: counts and ids",
    ("reduction/sequences.py", "given.cpu()"): "before the step: lengths, and which are padding",
    ("loop/aggregator.py", "one.item()"): "before the step: counts and ids",
    ("loop/probe.py", ".item()"): "once per run: the probe",
    ("integrations/_shared.py", "advantage[mask.bool()].cpu()"): "before the step",
    ("integrations/_shared.py", ".detach().cpu()"): "before the step",
    ("integrations/_shared.py", "advantage[mask.bool()]"): "before the step",
    ("integrations/weigh_rl.py", "torch.as_tensor(cu_seqlens).cpu()"): "a weighed step only",
    # pinned memory that stays pinned
    ("loop/buffer.py", "torch.empty_like(array, pin_memory=True)"): "a copy on the CPU",
    # NumPy arrays, dictionaries and counters
    ("reduction/plan.py", "_steps_with_totals[exchange.ranks] += 1"): "a Counter",
    ("reduction/exchange.py", "_numbers[name] += 1"): "a Counter",
    ("guards/ownership.py", "self._is_noted_S[sequences_G[is_sequence_G]] = True"): "NumPy",
    ("reduction/checks.py", "nonzero[0].item()"): "NumPy",
    ("loop/flags.py", "args[_WEIGHTS] = None"): "a dictionary",
    ("loop/flags.py", "args['loss_aggregation_count'] = None"): "a dictionary",
    ("integrations/megatron_lm.py", "is_padding_BG[:, -1] = True"): "NumPy",
}


def waits_in(source, file):
    """Yield line and text of each expression that copies to a device or reads from one."""
    for node in ast.walk(ast.parse(source, file)):
        if _writes_numbers(node) or _selects(node) or _copies_or_reads(node):
            yield node.lineno, ast.unparse(node)


def _writes_numbers(node):
    """Whether numbers or a list are written by index, as ``pair[1] = 1``."""
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    written = ast.walk(node.value)
    is_number = all(
        isinstance(part, (ast.Constant, ast.UnaryOp, ast.USub, ast.List, ast.Tuple, ast.Load))
        and not (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in written
    )
    return is_number and any(isinstance(target, ast.Subscript) for target in targets)


def _selects(node):
    """Whether a mask is an index: its number of entries is read."""
    is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    return is_read and re.fullmatch(r"~?\w*mask(\.bool\(\)| \S+ 0)?", ast.unparse(node.slice))


def _copies_or_reads(call):
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if {"non_blocking", "pin_memory"} & {*keywords, name}:
        return True
    if name in ("tensor", "as_tensor", "new_tensor", "from_numpy"):
        return name == "new_tensor" or "device" in keywords
    if name == "to" and any("device" in ast.unparse(a) for a in (*call.args, *call.keywords)):
        return True
    return name in ("item", "cpu", "cuda", "masked_select")


def files():
    for folder in FOLDERS:
        yield from sorted((PACKAGE / folder).rglob("*.py"))


def allowed(file, text):
    return any(file == where and text.endswith(what) for where, what in ALLOWED)


def said(source):
    """Return the numbers of lines of which a comment, there or above, says why none waits."""
    lines = source.splitlines()
    comments = [number for number, line in enumerate(lines, 1) if SAYS.search(line)]
    return [one + lines[one - 1].strip().startswith("#") for one in comments]


def test_nothing_in_a_steps_path_copies_to_a_device_or_reads_one_but_what_the_table_says():
    found = []
    for path in files():
        file = path.relative_to(PACKAGE).as_posix()
        if file != COPIES:
            source = path.read_text()
            own = said(source) if file.startswith(OWN) else []
            found += [
                f"{file}:{line}: {text}"
                for line, text in waits_in(source, file)
                if line not in own and not allowed(file, text)
            ]
    assert not found, "waits for a device, or say in ALLOWED why not:\n" + "\n".join(found)


def test_the_table_says_nothing_that_is_gone():
    used = set()
    for path in files():
        file = path.relative_to(PACKAGE).as_posix()
        texts = [text for _, text in waits_in(path.read_text(), file)]
        used |= {
            (where, what)
            for where, what in ALLOWED
            if where == file and any(text.endswith(what) for text in texts)
        }
    assert used == {*ALLOWED}


def test_a_comment_that_says_why_none_waits_is_at_a_line_that_could():
    for path in files():
        source = path.read_text()
        found = {line for line, _ in waits_in(source, str(path))}
        assert {*said(source)} <= found, path


@pytest.mark.parametrize(
    "planted",
    [
        "pair[1] = 1",
        "pair[:2] = [0.5, -1]",
        "w = x.new_tensor([1.0])",
        "w = torch.tensor([1.0, 2.0], device=x.device)",
        "w = weights.to(x.device)",
        "w = weights.to(x.device, non_blocking=True)",
        "w = weights.to(device=x.device)",
        "w = weights.cuda()",
        "n = mask.sum().item()",
        "w = losses[mask]",
    ],
)
def test_a_planted_wait_is_found(planted):
    source = f"def path(x):\n    {planted}  # waits before the step\n"
    assert said(source) == [2]
    assert said(source.replace("    ", "    # does not wait: NumPy\n    ", 1)) == [3, 3]
    assert not said(source.replace("# waits", "# it"))
    ((line, text),) = waits_in(f"def path(x):\n    {planted}\n", "planted")
    assert line == 2
    assert text in planted.replace("w = ", "").replace("n = ", "") or text == planted
