"""The sequences of ``megatron_lossagg.verify.sequences`` as the dicts that the reference takes, and
which of their tokens a context-parallel rank holds.
"""

from itertools import pairwise
from types import SimpleNamespace

from megatron_lossagg.verify import sequences as verification

VOCABULARY = verification.VOCABULARY
NUM_SEQUENCES = len(verification.LENGTHS)


def make_sequences():
    """Make fourteen uneven sequences with every degenerate case; ``tokens`` has one more than
    labels.
    """
    return [
        {
            "tokens": [*sequence.tokens, sequence.labels[-1]],
            "coefficient": sequence.coefficient,
            "counted": sequence.counted,
            "trained": sequence.trained,
            "sample": sequence.sample,
            "prompt": sequence.prompt,
        }
        for sequence in verification.make_sequences()
    ]


def assign(sequences, dp, microbatches):
    """Assign sequences to ``(rank, microbatch)``; returns one key per sequence, in the order of
    sequences.
    """
    assert len(microbatches) == dp
    counted = [SimpleNamespace(counted=sequence["counted"]) for sequence in sequences]
    return verification.assign_sequences(counted, microbatches).keys


def zigzag(offsets, cp_size, cp_rank):
    """List the token positions of a context-parallel rank; shares no code with the package."""
    positions = []
    for begin, end in pairwise(offsets):
        chunk = (end - begin) // (2 * cp_size)
        for which in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions += range(begin + which * chunk, begin + (which + 1) * chunk)
    return positions
