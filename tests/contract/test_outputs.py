"""What stock Megatron would train for its own loss_func's sum and count, as a report."""

import pytest
import torch

from megatron_lossagg.contract.outputs import stock_report
from megatron_lossagg.contract.scaling import Scaling


@pytest.mark.parametrize(
    ("loss_scaling", "num_tokens", "pair"),
    [
        ("average", 0, [6 / 4, 1 / 4]),  # stock divides by no less than 1
        ("average", 1, [6 / 4, 1 / 4]),
        ("average", 4, [1.5 / 4, 1 / 4]),
        ("per_token", 0, [6, 0]),
        ("per_token", 4, [6, 4]),
    ],
)
def test_stocks_report_is_a_mean_or_a_sum_with_its_count(loss_scaling, num_tokens, pair):
    scaling = Scaling(loss_scaling=loss_scaling, num_microbatches=2, dp_cp_size=2, active_tokens=24)
    found = stock_report(torch.tensor(6.0), torch.tensor(num_tokens, dtype=torch.int32), scaling)
    assert found["lossagg/shadow/stock"].tolist() == pair


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float16])
def test_stocks_loss_of_few_bytes_or_of_integers_keeps_a_count_that_is_no_integer(dtype):
    scaling = Scaling(loss_scaling="per_token", num_microbatches=1, dp_cp_size=1, active_tokens=3)
    found = stock_report(torch.tensor(7, dtype=dtype), torch.tensor(2.5), scaling)
    assert found["lossagg/shadow/stock"].tolist() == [7, 2.5]
