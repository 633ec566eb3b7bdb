"""One optimizer step with every degenerate row, and its deals to ranks and microbatches.

Rows are plain dicts as ``oracle.py`` takes them, with ``tokens`` and per-token
``coefficient`` beside the masks, without ``x``.
"""

import random

VOCABULARY = 32
NUM_ROWS = 14


def make_rows(seed=7):
    """Uneven rows with holes; what is special about a row is said beside it."""
    rng = random.Random(seed)
    lengths = [9, 4, 17, 1, 12, 3, 8, 25, 6, 7, 2, 11, 5, 10]
    assert len(lengths) == NUM_ROWS
    #  sample 2 is cut into rows 2 and 3, sample 9 into rows 9 and 13 (far apart);
    #  prompts 0 and 1 are dealt over ranks and microbatches
    sample = [0, 1, 2, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 9]
    prompt_of_sample = {0: 0, 1: 1, 2: 0, 4: 1, 5: 2, 6: 0, 7: 1, 8: 2, 9: 3, 10: 3, 11: 0, 12: 1}
    rows = []
    for index, length in enumerate(lengths):
        counted = [int(rng.random() < 0.8) for _ in range(length)]
        counted[rng.randrange(length)] = 1
        if index in (4, 6):  # fully masked: one alone in its sample, in a live prompt
            counted = [0] * length
        if index in (5, 8):  # a prompt without any active token
            counted = [0] * length
        trained = [m if rng.random() < 0.8 else 0 for m in counted]  # rejection narrows
        if index == 11:  # counted, but nothing left to train
            trained = [0] * length
        rows.append(
            {
                "tokens": [rng.randrange(VOCABULARY) for _ in range(length + 1)],
                "coefficient": [rng.uniform(-1.5, 1.5) for _ in range(length)],
                "counted": counted,
                "trained": trained,
                "sample": sample[index] + 100,
                "prompt": prompt_of_sample[sample[index]] - 2,
            }
        )
    return rows


def deal(rows, dp, microbatches):
    """Assign rows to ``(rank, microbatch)``; returns one key a row, in the order of rows.

    ``microbatches``: M of each rank. With 3 microbatches and more than one rank, the last
    rank gets only rows without an active token. Otherwise rows go round robin. A rank's
    rows are dealt to its microbatches unevenly; a microbatch may stay without rows.
    """
    idle = [index for index, row in enumerate(rows) if not any(row["counted"])]
    keys = [None] * len(rows)
    for rank in range(dp):
        if microbatches == [3] * dp and dp > 1:
            live = [index for index in range(len(rows)) if index not in idle]
            mine = idle if rank == dp - 1 else live[rank :: dp - 1]
        else:
            mine = list(range(rank, len(rows), dp))
        for position, index in enumerate(mine):
            keys[index] = (rank, position * position % microbatches[rank])
    return keys
