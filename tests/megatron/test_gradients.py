"""On real Megatron-Core every layout of the table trains the reference's gradient.

The layouts of a group that have one number of ranks are proven in one launch of
``megatron_lossagg.verify``. The data with every degenerate sequence is its ``step_data.py``, the
reference ``reference_loss.py``. Hooked: the framework's side is in ``train_step.py``, a loss_func
that returns a masked sum as Megatron-LM's does; tensor-parallel ranks but the first read no data.
"""

import functools

import pytest
from conftest import proven, result_of
from layouts import GRADIENTS

from megatron_lossagg.contract.scaling import LOSS_SCALINGS


@functools.cache
def launch_of(group, world_size):
    """Return the function that proves a group's layouts of so many ranks."""
    layouts = [one for one in GRADIENTS[group].layouts if one.world_size == world_size]
    return functools.partial(proven, layouts, GRADIENTS[group].cases)


ROWS = [
    pytest.param(
        group,
        layout,
        case,
        id=f"{group}-{layout}-{case}",
        marks=[
            pytest.mark.early(launch_of(group, layout.world_size)),
            pytest.mark.skipif(bool(of.missing), reason=of.missing),
        ],
    )
    for group, of in GRADIENTS.items()
    for layout in of.layouts
    for case in of.cases
    if not (layout.hooked and case.second)  # the hook trains one term
]


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize(("group", "layout", "case"), ROWS)
def test_the_gradient_is_that_of_the_configured_loss(group, layout, case, loss_scaling):
    verdicts = result_of(launch_of(group, layout.world_size))
    verdict = verdicts[str(layout), str(case), loss_scaling]
    # Stock Megatron-FSDP keeps gradients in float32 or less.
    bound = layout.tolerance if layout.megatron_fsdp == "off" else 5e-6
    assert verdict["gradient_error"] < bound, verdict["explanation"]
    if not (layout.hooked and len(set(layout.m_of_ranks)) > 1):  # reported values assume one M
        assert verdict["loss_error"] < bound, verdict["explanation"]
        assert verdict["weight_sum_error"] < 1e-6  # computed in float32
