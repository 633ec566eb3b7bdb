"""Without a group, or in a group of one, a process exchanges with itself; see plan_worker.py."""

import numpy as np
import pytest
import torch.distributed as dist
from ranks import begin

from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.reduction.exchange import Exchange, together


@pytest.fixture(params=["no group", "a group of one"])
def exchange(request, tmp_path):
    if request.param == "no group":
        yield Exchange(None)
        return
    begin(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Exchange(dist.group.WORLD)
    dist.destroy_process_group()


def test_alone_a_process_gets_back_what_it_sends(exchange):
    own = np.array([3, -1, 2**62])
    columns = [np.array([1, 2]), np.array([3, 4])]
    assert (exchange.size, exchange.rank) == (1, 0)
    assert exchange.integers(own).tolist() == [own.tolist()]
    gathered = exchange.ragged(columns, np.array([2]))
    assert [column.tolist() for column in gathered] == [[1, 2], [3, 4]]
    assert exchange.packed(b"a fault") == [b"a fault"]


def test_alone_a_process_raises_its_own_error_and_names_nobody(exchange):
    with together(exchange.group, "do it") as told:
        told.own = own = lambda: "what cannot be pickled"
    assert told.of_ranks == [own]
    with (
        pytest.raises(ContractError, match=r"^got 1$"),
        together(exchange.group, "do it", named="stage {}"),
    ):
        raise ContractError("got 1")
    with (
        pytest.raises(PlanError, match=r"^KeyError\('a'\)$") as caught,
        together(exchange.group, "do it", raises=PlanError),
    ):
        raise KeyError("a")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_rank_is_named_by_its_group():
    assert Exchange(None).name() == "rank 0 of the data-parallel group"
    assert Exchange(None).name(3) == "rank 3 of the data-parallel group"
    assert Exchange(None).ranks is None
