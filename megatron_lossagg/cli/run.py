"""Run an unmodified Megatron-LM script with --loss-aggregation.

Under torchrun, in a Megatron-LM checkout: write the script and all its
options as ever, and the options below anywhere among them. Without any of
them the script runs as it is. Known scripts: pretrain_gpt.py, packed SFT
included, those that share its loss, and train_rl.py.
"""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from megatron_lossagg.errors import AggregationError, ContractError, LossAggregationError, say
from megatron_lossagg.loop.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.reduction.aggregation import Aggregation, Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lossagg run``."""
    parser.allow_abbrev = False  # the script's own options are not abbreviations of ours
    _add_cpu(parser)
    parser.add_argument(
        "script", help="a script of a Megatron-LM checkout, such as pretrain_gpt.py"
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="the script's own options, and those of the group below",
    )
    add_loss_aggregation_args(parser)


def _add_cpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="train on CPU and gloo, with stand-ins for CUDA (docs/integrations/megatron-lm.md)",
    )


def run(args: argparse.Namespace, *, before: Callable[[], None] = lambda: None) -> int:
    """Run the script in this process; return its exit status, 1 if a step is refused.

    ``before`` is called before the script runs, when Megatron can be imported as the script will.

    Raises :class:`ContractError` if an aggregation was asked for and the script ended without
    the training loop that it is put into. A loop that had no step left to do is no error. Raises
    :class:`RecordError` for a record that cannot be written, on one node before the script runs.
    """
    parser = argparse.ArgumentParser(
        prog="lossagg run",
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_cpu(parser)
    add_loss_aggregation_args(parser)
    # ``args`` has those that stand before the script; of a flag given twice, the last one counts.
    flags, rest = parser.parse_known_args(args.arguments, args)
    _check_names(rest, parser)
    aggregation = aggregation_from_args(flags)
    script = Path(args.script)
    if not script.is_file():
        raise LossAggregationError(
            f"got the script {script}, which does not exist: give the path that python would take"
        )
    sys.argv = [str(script), *rest]
    sys.path[0] = str(script.resolve().parent)
    if {"-h", "--help"} & set(rest):
        return _help(script, parser, on_cpu=args.cpu)
    options = Options.from_args(flags)
    _check_record(options.record)
    if args.cpu:
        _install_cpu()
    before()
    if aggregation is None and not options.shadow:
        return run_stock(script, on_cpu=args.cpu)
    return run_hooked(script, aggregation, options=options, on_cpu=args.cpu)


def _check_names(rest: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse a misspelt option of ours, which the script would not know either."""
    known = [name for action in parser._actions for name in action.option_strings]
    for option in rest:
        name = option.partition("=")[0]
        near = get_close_matches(name, known, n=1, cutoff=0.92)
        if near or name.startswith(("--loss-agg", "--no-loss-agg")):
            expected = near[0] if near else "those that lossagg run --help lists"
            raise AggregationError(
                f"got {name}, which is not an option of ours, expected {expected}: correct the name"
            )


def _check_record(path: str | None) -> None:
    """Open the record before a model is built, if this is the node of the rank that writes it."""
    world = os.environ.get("WORLD_SIZE", "1")
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE", "1") == world
    if path is not None and is_one_node and os.environ.get("RANK", "0") == "0":
        from megatron_lossagg.record.writer import RecordFile

        RecordFile(path)


def _help(script: Path, parser: argparse.ArgumentParser, *, on_cpu: bool) -> int:
    """Print our options, and the script's if it can say them here."""
    if os.environ.get("RANK", "0") == "0":
        parser.usage = argparse.SUPPRESS
        parser.print_help()
        sys.stdout.flush()
    try:
        if on_cpu:
            _install_cpu()
        return run_stock(script, on_cpu=False)
    except Exception as error:  # whatever the script needs
        say(
            f"{script} could not print its own options ({type(error).__name__}: {error}); on a "
            "machine without a GPU add --cpu"
        )
        return 0


def _install_cpu() -> None:
    from megatron_lossagg.cpu.training import install_training

    install_training()


def run_hooked(
    script: Path, aggregation: Aggregation | None, *, options: Options, on_cpu: bool
) -> int:
    """Run a script under the hook; return its exit status, 1 if a step is refused.

    ``on_cpu``: its ranks leave gloo together. Raises :class:`ContractError` if the script ends
    without the training loop that the hook is put into. A loop that had no step left to do is no
    error.
    """
    # Here, for a script that runs stock needs none of them.
    from megatron_lossagg.integrations import megatron_lm, megatron_rl
    from megatron_lossagg.integrations._shared import HOOK, report_if_unused

    if HOOK.encode() in script.read_bytes():  # of any encoding
        raise ContractError(
            f"{script} calls {HOOK} itself, expected a script that trains by megatron.training"
            "'s pretrain: wrap its schedule with LossAggregator.wrap"
        )
    is_rl = script.name == "train_rl.py"
    integration = megatron_rl.RLIntegration if is_rl else megatron_lm.PretrainIntegration
    hook = megatron_lm.install(aggregation, options=options, integration=integration())
    try:
        status = run_stock(script, on_cpu=on_cpu)
    finally:
        atexit.unregister(report_if_unused)  # said below, or by the status
    if status == 0 and hook.num_steps == 0:
        if not hook.is_found:
            raise ContractError(
                f"{script} ended without a step that {hook.flag} could reach: "
                "its training loop is not the one of megatron.training, or it never began"
            )
        say(f"{script} had no step left to do, so nothing was trained")
    return status


def run_stock(script: Path, *, on_cpu: bool) -> int:
    """Run the script as ``python script`` would; return its exit status."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            status = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
            status = 1
        if status:
            return status
    except LossAggregationError as error:  # of a step, not of the command line
        if error.__cause__ is not None:  # a data set's
            traceback.print_exception(error.__cause__)
        say(str(error))
        return 1
    if on_cpu:
        _leave_together()
    return 0


def _leave_together() -> None:
    """End gloo in step: its threads abort now and then if a rank ends before the others."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
