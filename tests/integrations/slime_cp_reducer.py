"""A pytest plugin for slime's own CP test: in each rank it spawns, our reducer for slime's.

``LOSSAGG_DIVISOR`` is the divisor. slime's test reduces by the mean of each rollout; its rollouts
have eight tokens each, so that a constant of 8 is the same loss.
"""

import os

import torch.multiprocessing

_spawn = torch.multiprocessing.spawn


def with_our_reducer(rank, worker, *arguments):
    """Run slime's worker with ``constant_<L>`` where it asks for slime's reducer."""
    from slime.backends.megatron_utils import cp_utils

    from megatron_lossagg.integrations import slime

    factory = getattr(slime, f"constant_{os.environ['LOSSAGG_DIVISOR']}")

    def get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, rollout_mask_sums):
        return factory(total_lengths, response_lengths, loss_masks, False)

    cp_utils.get_sum_of_sample_mean = get_sum_of_sample_mean
    worker(rank, *arguments)


def pytest_configure():
    """Rebind ``torch.multiprocessing.spawn``, which slime's tests call."""

    def spawn(worker, args=(), **more):
        return _spawn(with_our_reducer, args=(worker, *args), **more)

    torch.multiprocessing.spawn = spawn
