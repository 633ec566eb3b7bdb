"""Runs the example of :class:`LossAggregator` on one rank, on a tiny GPT in Megatron's DDP."""

import doctest
import inspect

import tiny_gpt
import torch

from megatron_lossagg import LossAggregator


def main():
    tiny_gpt.start()
    model = tiny_gpt.wrapped(tiny_gpt.config_of())
    given = {"LossAggregator": LossAggregator, "model": model, "torch": torch}
    parsed = doctest.DocTestParser().get_doctest(
        inspect.getdoc(LossAggregator), given, "LossAggregator", None, 0
    )
    failed, attempted = doctest.DocTestRunner().run(parsed)
    assert attempted
    assert not failed
    print("ran its example")


if __name__ == "__main__":
    main()
