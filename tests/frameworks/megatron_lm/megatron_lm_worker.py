"""One run of an unmodified Megatron-LM script, watched as ``lossagg verify --framework`` does.

``megatron_lm_worker.py FILE [--wanted MODE] SCRIPT ...``: ``--wanted``: on one process, also MODE
of each step and evaluation by the reference. ``--plain``: only the script, by ``runpy``, without
``lossagg run``. ``--weigh JSON``: by ``lossagg weigh`` instead, with its report in a file.
``KILL_AFTER=n``: every rank kills itself in step n + 1. ``WITHOUT=name``: one stand-in of
``megatron_lossagg.cpu.training`` is taken away.
"""

import functools
import json
import os
import pkgutil
import runpy
import signal
import sys
from pathlib import Path

from megatron_lm_watch import compute_too, watch
from ranks import leave

from megatron_lossagg.cli.main import main
from megatron_lossagg.cpu import stand_ins
from megatron_lossagg.cpu.training import install_training

KILL_AFTER = int(os.environ.get("KILL_AFTER", "-1"))


def run(file, arguments):
    install_training()
    if name := os.environ.get("WITHOUT"):
        owner, _, attribute = name.rpartition(".")
        setattr(pkgutil.resolve_name(owner), attribute, stand_ins._originals[name])
    import torch.distributed as dist
    from megatron.training import training

    def write(event):
        if dist.get_rank() == dist.get_world_size() - 1:
            with Path(file).open("a") as out:
                out.write(json.dumps(event) + "\n")

    watch(training, write)
    watched = training.train_step

    @functools.wraps(watched)
    def train_step(*args, **kwargs):
        if training.get_args().curr_iteration == KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return watched(*args, **kwargs)

    training.train_step = train_step
    if arguments[0] == "--plain":
        sys.argv, sys.path[0] = arguments[1:], str(Path(arguments[1]).parent)
        runpy.run_path(arguments[1], run_name="__main__")
        dist.barrier()
        leave()
        return 0
    if arguments[0] == "--wanted":
        compute_too(training, write, {"mode": arguments[1]})
        del arguments[:2]
    if arguments[0] == "--weigh":
        return main(["weigh", "--json", arguments[1], "--cpu", *arguments[2:]])
    return main(["run", "--cpu", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
