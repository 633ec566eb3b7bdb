"""The line at the start says of which side losses the gradient depends on CP, and of no other."""

import pytest
from conftest import early, launched
from ranks import rows_of


def norms(cp_size):
    out = launched("megatron/side_loss_worker.py", cp_size, processes=cp_size)
    found = rows_of(out)
    return {(one["loss"], one["per_token"]): one for one in found}


@early
def at_cp_1():
    return norms(1)


@early
def at_cp_2():
    return norms(2)


@pytest.mark.parametrize("per_token", [False, True], ids=["average", "per_token"])
@pytest.mark.parametrize("loss", ["aux", "sequence aux", "z", "MTP"])
def test_the_note_is_there_exactly_where_cp_changes_the_gradient(at_cp_1, at_cp_2, loss, per_token):
    one, two = at_cp_1[loss, per_token], at_cp_2[loss, per_token]
    print(f"{loss}, {per_token=}: CP 1 {one['norm']:.7f}, CP 2 {two['norm']:.7f}; {one['note']}")
    assert one["norm"] > 1e-4
    assert one["note"] == two["note"]
    depends = two["norm"] != pytest.approx(one["norm"], rel=1e-5, abs=0)
    assert depends == bool(one["note"])
