"""The rows of ``megatron_lossagg.verify.rows`` as the dicts that the oracle takes."""

from types import SimpleNamespace

from megatron_lossagg.verify import rows as verification

VOCABULARY = verification.VOCABULARY
NUM_ROWS = len(verification.LENGTHS)


def make_rows():
    """Make fourteen uneven rows with every degenerate case; ``tokens`` has one more than labels."""
    return [
        {
            "tokens": [*row.tokens, row.labels[-1]],
            "coefficient": row.coefficient,
            "counted": row.counted,
            "trained": row.trained,
            "sample": row.sample,
            "prompt": row.prompt,
        }
        for row in verification.make_rows()
    ]


def assign(rows, dp, microbatches):
    """Assign rows to ``(rank, microbatch)``; returns one key per row, in the order of rows."""
    assert len(microbatches) == dp
    counted = [SimpleNamespace(counted=row["counted"]) for row in rows]
    return verification.assign_rows(counted, microbatches).keys
