"""The sequences of ``megatron_lossagg.verify.step_data`` as the dicts that the reference takes."""

from types import SimpleNamespace

from megatron_lossagg.verify import step_data as verification


def make_sequences():
    """Make fourteen uneven sequences with every degenerate case."""
    return [
        {
            "counted": sequence.counted,
            "trained": sequence.trained,
            "sample": sequence.sample,
            "prompt": sequence.prompt,
            "group": sequence.group,
        }
        for sequence in verification.make_sequences()
    ]


def assign(sequences, microbatches):
    """Assign sequences to ``(rank, microbatch)``; returns one key per sequence, in their order.

    ``microbatches``: M of each rank.
    """
    counted = [SimpleNamespace(counted=sequence["counted"]) for sequence in sequences]
    return verification.assign_sequences(counted, microbatches).keys
