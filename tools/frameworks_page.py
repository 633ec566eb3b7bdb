"""Print a row of docs/reference/what-frameworks-train.md for each setting that was weighed.

``python -m tools.frameworks_page FILE ...``: files of ``lossagg weigh --framework NAME --json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_NEAR = 1e-5


def rows(run: dict[str, Any]) -> list[str]:
    """Return the rows of a run: setting, what its name promises, what each term trains."""
    made = []
    for step in run["steps"]:
        name = f"`{step['trained']}`" + (" of ours" if step["is_ours"] else "")
        cells = [
            f"{term}: {trained(of, step['wanted'])}"
            for term, of in step["terms"].items()
            if of["coefficient"] is not None
        ]
        made.append(f"| {name} | {step['wanted']} | {'; '.join(cells)} |")
    return made


def trained(term: dict[str, Any], wanted: str) -> str:
    """Say what a term trains, next to what is wanted of it."""
    if term["error"] is not None and term["error"] < _NEAR:
        return wanted
    low, high = term["relative"] or (float("nan"), float("nan"))
    if high - low < _NEAR * abs(high):
        return f"**{high:.4g} times {wanted}**"
    weighed = term["weighed"]
    if weighed["factor"] is not None:
        factor = weighed["factor"] / term["coefficient"]
        times = "" if abs(factor - 1) < _NEAR else f"{factor:.4g} times "
        return f"**{times}{weighed['nearest']}**"
    return f"**{low:.3g} to {high:.3g} times its weights**; {'; '.join(weighed['causes'])}"


if __name__ == "__main__":
    for file in sys.argv[1:]:
        run = json.loads(Path(file).read_text())
        print(f"\n{run['framework']}, DP {run['dp']} x CP {run['cp']}\n", *rows(run), sep="\n")
