"""The sequences of ``megatron_lossagg.verify.sequences`` as the dicts that the reference takes, and
which of their tokens a context-parallel rank holds.
"""

from types import SimpleNamespace

from megatron_lossagg.verify import sequences as verification
from megatron_lossagg.verify.sequences import zigzag  # noqa: F401  shares no code with the package

VOCABULARY = verification.VOCABULARY


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
