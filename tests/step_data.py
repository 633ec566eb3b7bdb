"""The rows of ``megatron_lossagg.proof.rows`` as the dicts that the oracle takes."""

from types import SimpleNamespace

from megatron_lossagg.proof import rows as proof

VOCABULARY = proof.VOCABULARY
NUM_ROWS = len(proof.LENGTHS)


def make_rows():
    """Fourteen uneven rows with every degenerate case; ``tokens`` has one more than labels."""
    return [
        {
            "tokens": [*row.tokens, row.labels[-1]],
            "coefficient": row.coefficient,
            "counted": row.counted,
            "trained": row.trained,
            "sample": row.sample,
            "prompt": row.prompt,
        }
        for row in proof.make_rows()
    ]


def deal(rows, dp, microbatches):
    """Assign rows to ``(rank, microbatch)``; returns one key a row, in the order of rows."""
    assert len(microbatches) == dp
    counted = [SimpleNamespace(counted=row["counted"]) for row in rows]
    return proof.deal(counted, microbatches).keys
