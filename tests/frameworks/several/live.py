"""Launches ``framework_worker.py``: a framework's integration, live without the framework."""

from conftest import launched
from frameworks import reference


def assert_live(framework, *, cases, refused=0):
    """Each case is the reference at two numbers of microbatches; all refuse together so often."""
    arguments = (reference("float64"), framework)
    out = launched("frameworks/several/framework_worker.py", *arguments, processes=4)
    assert out.count(": the reference") == 2 * cases
    assert out.count("refused together") == refused
