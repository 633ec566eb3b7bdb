"""The lines of pages that no framework needs; a framework's are in its own test file.

Those of released ones are in ``*_checks.py``.
"""

from argparse import ArgumentParser

import page_lines

from megatron_lossagg import add_loss_aggregation_args
from megatron_lossagg.loop.flags import aggregation_from_args


def test_an_aliass_line_is_the_mode_that_its_system_names():
    parser = add_loss_aggregation_args(ArgumentParser())
    args = parser.parse_args(page_lines.words(page_lines.blocks("aliases", "sh")[0]))
    assert str(aggregation_from_args(args)) == "constant: w_s = 1/(B 4096)"
