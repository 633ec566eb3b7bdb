"""Run examples/drgrpo/train.py with one fault that no flag can cause; a launched worker.

``python drive_example.py FAULT -- FLAGS``; ``flags_are_read -- FILE`` runs no step;
``runs_are_refused -- FILE`` runs one list of flags after the other.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "drgrpo"))

import train


def another_divisor_on_rank_1():
    if os.environ["RANK"] == "1":
        sys.argv += ["--loss-aggregation-divisor", "1000"]


def loss_scaling_flipped_after_wrapping():
    build = train.build_model

    def build_and_flip(*arguments, **options):
        chunk = build(*arguments, **options)
        chunk.config.calculate_per_token_loss = not chunk.config.calculate_per_token_loss
        return chunk

    train.build_model = build_and_flip


def sequences_left_out():
    pack = train.pack
    train.pack = lambda sequences, numbers, *more: pack(sequences[1:], list(numbers)[1:], *more)


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


def flags_are_read():
    """Print, for each list of flags in a file, what the example refuses them with."""
    _, file = sys.argv
    refused = {}
    for name, flags in json.loads(Path(file).read_text()).items():
        args = train.parse_args(["--output", "runs", *flags])
        try:
            train.aggregation_from_args(args)
        except train.LossAggregationError as error:
            refused[name] = str(error)
    print(json.dumps(refused))
    sys.exit()


def runs_are_refused():
    """Run the example for each list of flags in a file, and print what this rank raised."""
    _, file = sys.argv
    runs = json.loads(Path(file).read_text())
    first = train.parse_args(next(iter(runs.values())))
    train.start_processes(train.processes_of(first), first.seed)
    for name, flags in runs.items():
        try:
            train.train(train.parse_args(flags))
        except Exception as error:
            print("REFUSED", json.dumps([name, f"{type(error).__name__}: {error}"]), flush=True)
    train.stop_processes()
    sys.exit()


# Reducer factories that a path can name.


def not_a_scalar(context):
    return lambda x: x


def no_callable(context):
    return None


NOTHING = None

if __name__ == "__main__":
    fault, _, *flags = sys.argv[1:]
    sys.argv = ["train.py", *flags]
    globals()[fault]()
    train.main()
