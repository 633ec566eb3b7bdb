"""Through the schedule hook, a host's loop that knows nothing of us trains the configured loss.

The host's side is in ``megatron_lossagg.verify.prove``: a loss_func that returns a masked sum,
as Megatron-LM's does; tensor-parallel ranks but the first read no data.
"""

import pytest
from test_gradients import OTHERS, SPLITS

from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.parallelism import Parallelism

CASES = [case for case in CASES if case.second is None]
NAMES = [str(case) for case in CASES]
REGIMES = ("average", "per-token")
LAYOUTS = {
    **{
        f"{name}-M{m}": {**sizes, "microbatches": m}
        for name, sizes in SPLITS.items()
        for m in (1, 3, 4)
    },
    **OTHERS,
    "uneven": {"dp": 2, "microbatches": (3, 5)},
}


@pytest.fixture(scope="module")
def verdicts(proven):
    layouts = [Parallelism(**sizes, hooked=True) for sizes in LAYOUTS.values()]
    return proven(layouts, CASES)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hooked_host_trains_and_reports_the_configured_loss(verdicts, name, case, regime):
    layout = Parallelism(**LAYOUTS[name], hooked=True)
    verdict = verdicts[str(layout), case, regime]
    bound = layout.tolerance
    assert verdict["gradient_error"] < bound, verdict["explanation"]
    assert verdict["loss_error"] is None or verdict["loss_error"] < bound, verdict["explanation"]
