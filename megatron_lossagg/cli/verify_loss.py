"""``lossagg verify --loss-func``: a loss function of one's own, without this package in it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_lossagg.cli.files import check_outputs, write_json
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.own_loss import SPLITS, TIMEOUT, check_loss

_ITS_OWN = {"loss_func", "batch", "loss_scaling", "json", "timeout"}
_OF_SPLITS = {"dp", "cp", "microbatches", "packing", "cp_partition"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a check of a loss function."""
    group = parser.add_argument_group("a loss function of one's own")
    group.add_argument(
        "--loss-func",
        metavar="pkg.mod:NAME",
        help="check that the gradient of this loss_func(microbatch, output), which knows nothing "
        "of this package, does not depend on M, DP, CP and packing",
    )
    group.add_argument(
        "--batch",
        metavar="pkg.mod:NAME",
        help="a function that returns the sequences for --loss-func, with the columns it reads "
        "(default: 12 sequences with loss_mask)",
    )


def run(args: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Check and print the report; return the exit status. ``given``: the options in use."""
    sizes = {name: value for name, value in given.items() if name in _OF_SPLITS}
    if other := given.keys() - sizes.keys() - _ITS_OWN:
        raise ProofError(
            f"got --{min(other).replace('_', '-')} with --loss-func, which is checked without a "
            "model, a mode and a launcher: drop one of them"
        )
    check_outputs({"--json": args.json})
    check = check_loss(
        args.loss_func,
        args.batch,
        loss_scaling=args.loss_scaling or LOSS_SCALINGS,
        splits=[sizes] if sizes else SPLITS,
        timeout=args.timeout or TIMEOUT,
    )
    print(check)
    write_json(args.json, {"passed": check.passed, **asdict(check)})
    return int(not check.passed)
