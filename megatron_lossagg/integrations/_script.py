"""A script of Megatron-LM in this process: ``lossagg run``, and a rank of its verification.

``sys.argv`` and ``sys.path`` are set by the caller, as python would set them for the script.
"""

from __future__ import annotations

import atexit
import runpy
import sys
import traceback
from pathlib import Path

from megatron_lossagg.errors import ContractError, LossAggregationError, say
from megatron_lossagg.reduction.aggregation import Aggregation, Options


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
