"""Recorded rollouts: a file of them, and what is read of it."""

import argparse
import json

from megatron_lossagg.cli.rollouts import add_reading_arguments, read_rollouts


def read(*paths, flags=()):
    parser = argparse.ArgumentParser()
    add_reading_arguments(parser)
    return read_rollouts(paths, parser.parse_args(flags))


def json_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def columns(step):
    """Return the numbers of a step: active tokens, prompts, and samples that are not sequences."""
    return [
        step["active_tokens"].tolist(),
        step["prompt"].tolist() if "prompt" in step else None,
        None if step["sample"].is_unique else step["sample"].tolist(),
    ]
