"""Run examples/drgrpo/train.py with one fault that no flag can cause; a launched worker.

``python drive_example.py FAULT -- FLAGS``; ``runs_are_refused -- FILE`` runs one list of flags
after the other.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from ranks import print_row

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "drgrpo"))

import train


def rank_1_dies():
    step = train.rl_step

    def die_on_rank_1(run, rollouts):
        if os.environ["RANK"] == "1":
            print(f"rank 1 dies at {time.time()}", flush=True)
            os.kill(os.getpid(), 9)
        return step(run, rollouts)

    train.rl_step = die_on_rank_1


def all_ranks_killed():
    """Kill every rank by SIGKILL right after all have passed step KILL_AFTER of the run."""
    write, seen = train.MetricsLog.write, []

    def write_and_die(log, phase, *arguments):
        write(log, phase, *arguments)
        seen.extend([phase] * (phase != "start"))
        if len(seen) == int(os.environ["KILL_AFTER"]):
            dist.barrier()  # the first rank to die ends the others: rank 0 has written
            os.kill(os.getpid(), 9)

    train.MetricsLog.write = write_and_die


def another_divisor_on_rank_1(flags):
    if os.environ["RANK"] == "1":
        flags += ["--loss-aggregation-divisor", "1000"]
    return nullcontext()


def loss_scaling_flipped_after_wrapping(flags):
    build = train.build_model

    def build_and_flip(*arguments, **options):
        chunk = build(*arguments, **options)
        chunk.config.calculate_per_token_loss = not chunk.config.calculate_per_token_loss
        return chunk

    return mock.patch.object(train, "build_model", build_and_flip)


def sequences_left_out(flags):
    pack = train.pack
    return mock.patch.object(
        train, "pack", lambda sequences, numbers, *more: pack(sequences[1:], numbers[1:], *more)
    )


def runs_are_refused():
    """Run the example for each list of flags in a file, and print what this rank raised.

    A run that has the name of a fault above is run with it.
    """
    _, file = sys.argv
    runs = json.loads(Path(file).read_text())
    first = train.parse_args(next(iter(runs.values())))
    train.start_processes(train.processes_of(first), first.seed)
    for name, flags in runs.items():
        try:
            with globals().get(name, lambda flags: nullcontext())(flags):
                train.train(train.parse_args(flags))
        except Exception as error:
            print_row([name, f"{type(error).__name__}: {error}"], of_first=False)
    train.stop_processes()
    sys.exit()


# A reducer factory that a path can name.


def not_a_scalar(context):
    return lambda x: x


if __name__ == "__main__":
    fault, _, *flags = sys.argv[1:]
    sys.argv = ["train.py", *flags]
    globals()[fault]()
    train.main()
