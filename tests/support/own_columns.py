"""Weights functions that read columns of the caller's, as docs/own-loop.md has them."""

import numpy as np


def per_turn(counts):
    """Divide by the turns of the step: each sequence, a rollout, has some."""
    return 1 / counts.columns["turns"].sum()


def mean_of_teachers(counts):
    """Average over teachers the token mean of each."""
    _, teacher = np.unique(counts.columns["teacher"], return_inverse=True)
    tokens = np.bincount(teacher, counts.n_s)  # of each teacher
    return 1 / (np.count_nonzero(tokens) * tokens[teacher])


def per_row(counts):
    """Average over rows the sums of their tokens, each times its turns."""
    return counts.columns["turns"] / counts.R
