"""This package next to stock Megatron-Core: losses that it adds, what it slices, its own loss.

Each launch is ``stock_worker.py`` on layouts of ``layouts.py``. Side losses: at equal layout and
loss scaling stock's loss_func and this package's leave the same bits in every gradient buffer, or
stock's times the sum of the mode's weights where they follow the mode. Slices: Megatron-Core's own
for unpacked sequences; Transformer Engine's for packed ones where it and CUDA are available.
"""

import pytest
import torch
from conftest import RELEASE, early, job_of, launched
from layouts import FOLLOWED, SIDE, SIDE_LOSS_SCALINGS, SLICED
from ranks import rows_of

from megatron_lossagg import Layout
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.verify.parallelism import Parallelism

BOTH = pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
IN_STOCK = pytest.mark.parametrize("loss_scaling", SIDE_LOSS_SCALINGS)


def found_beside(what, layouts):
    """Return what every rank found, by layout and by the worker's own key."""
    processes = layouts[0].world_size
    out = launched("megatron/stock_worker.py", what, job_of(layouts), processes=processes)
    return {(layout, *key): of_ranks for layout, key, of_ranks in rows_of(out)}


@early
def side():
    return found_beside("side", SIDE)


@IN_STOCK
@pytest.mark.parametrize("layout", SIDE, ids=str)
def test_side_losses_come_out_bit_for_bit_as_without_this_package(side, layout, loss_scaling):
    for found in side[str(layout), loss_scaling, False]:
        assert found["there"]
        assert found["stock_twice"]
        assert found["token_mean"]
        assert found["sample_mean"]


@IN_STOCK
@pytest.mark.parametrize("layout", SIDE, ids=str)
def test_rejected_tokens_do_not_scale_side_losses(side, layout, loss_scaling):
    for found in side[str(layout), loss_scaling, True]:
        assert found["there"]
        assert found["token_mean"]
        assert found["sample_mean"]


@pytest.mark.parametrize(
    ("layout", "loss_scaling"),
    [(one, s) for one in SIDE for s in SIDE_LOSS_SCALINGS if s == "per_token" or one.cp == 1],
    ids=str,
)
def test_main_and_side_losses_add_up_as_in_stock_where_stock_has_the_mode(
    side, layout, loss_scaling
):
    """token_mean per token; microbatch_token_mean in the average loss scaling at CP 1."""
    for found in side[str(layout), loss_scaling, False]:
        assert found["main"] > 1e-3
        assert found["whole"] < layout.tolerance


MODES = ["constant", "sample_mean", "token_mean"]
HOWS = ["", ", loss scale", ", own scale"]
IN_0_19 = pytest.mark.skipif(RELEASE < (0, 19), reason="needs megatron-core 0.19")


@early
def followed():
    return found_beside("follow", FOLLOWED)


@IN_0_19
@BOTH
@pytest.mark.parametrize("layout", FOLLOWED, ids=str)
def test_a_side_loss_is_stocks_times_the_sum_of_weights(followed, layout, loss_scaling):
    """Also with a loss scale, and with scale functions of the user's own."""
    for found in followed[str(layout), loss_scaling]:
        assert found["there"]
        assert found["left"]
        assert found["wanted"]["constant"] > 1.1
        assert found["wanted"]["sample_mean"] < 0.9
        for mode in MODES:
            for how in HOWS:
                assert found[f"{mode}{how}"] < 1e-6, f"{mode}{how}"


@IN_0_19
@BOTH
@pytest.mark.parametrize("layout", FOLLOWED, ids=str)
def test_a_scaled_mode_scales_the_whole_gradient_with_side_losses(followed, layout, loss_scaling):
    for found in followed[str(layout), loss_scaling]:
        assert found["main"] > 1e-3
        assert found["whole"] < 1e-6


def notes_at(cp_size):
    kinds = ({"moe": True}, {"mtp": True})
    found = found_beside("notes", [Parallelism(cp=cp_size, float32=True, **kind) for kind in kinds])
    return {(loss, scaling): of_ranks[0] for (_, loss, scaling), of_ranks in found.items()}


@early
def at_cp_1():
    return notes_at(1)


@early
def at_cp_2():
    return notes_at(2)


@BOTH
@pytest.mark.parametrize("loss", ["aux", "sequence aux", "z", "MTP"])
def test_the_note_is_there_exactly_where_cp_changes_the_gradient(
    at_cp_1, at_cp_2, loss, loss_scaling
):
    """The line at the start says of which side losses the gradient depends on CP, no other."""
    one, two = at_cp_1[loss, loss_scaling], at_cp_2[loss, loss_scaling]
    print(f"{loss}, {loss_scaling}: CP 1 {one['norm']:.7f}, CP 2 {two['norm']:.7f}; {one['note']}")
    assert one["norm"] > 1e-4
    assert one["note"] == two["note"]
    depends = two["norm"] != pytest.approx(one["norm"], rel=1e-5, abs=0)
    assert depends == bool(one["note"])


@early
def parity():
    return found_beside("parity", [Parallelism(dp=2, cp=2)])


def test_stock_megatron_is_untouched_and_equals_token_mean_per_token(parity):
    for (_, loss_scaling), of_ranks in parity.items():
        for found in of_ranks:
            loss, again, ours = found["loss"]
            assert found["untouched"]
            assert loss == again
            assert "(DP 2, CP 2)" in found["describes"]
            if loss_scaling == "per_token":
                assert ours == pytest.approx(loss, rel=1e-12, abs=0)
                assert found["token_mean"] < 1e-12


@BOTH
def test_a_loss_scale_multiplies_the_gradient_exactly_and_not_the_report(parity, loss_scaling):
    for found in parity["DP 2 x CP 2, M 3", loss_scaling]:
        assert found["exactly"]
        assert found["scaled"] == found["unscaled"]


@early
def slices():
    return found_beside("slices", SLICED)


@pytest.mark.parametrize("layout", SLICED, ids=str)
def test_megatron_slices_an_unpacked_batch_like_bshd_zigzag(slices, layout):
    """Tokens, a mask and a field with a dimension more; the group given, and by default."""
    comparisons = [of_ranks for key, of_ranks in slices.items() if key[0] == str(layout)]
    assert len(comparisons) in (3, 6)  # later releases have no default
    for of_ranks in comparisons:
        assert all(all(found.values()) for found in of_ranks), of_ranks


# Offsets in units of 2 CP tokens: one sequence, uneven sequences, an empty sequence between two,
# many sequences.
OFFSETS = ((0, 1), (0, 3, 4, 9), (0, 2, 2, 5), tuple(range(0, 120, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_transformer_engine_slices_packed_sequences_like_thd_zigzag(cp_size, offsets):
    if not torch.cuda.is_available():
        pytest.skip("Transformer Engine slices packed sequences with a CUDA kernel")
    pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    import transformer_engine_torch

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda") * 2 * cp_size
    for cp_rank in range(cp_size):
        theirs = transformer_engine_torch.thd_get_partitioned_indices(
            cu_seqlens, int(cu_seqlens[-1]), cp_size, cp_rank
        )
        ours = Layout.thd_zigzag(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank)
        assert theirs.tolist() == ours.positions.tolist()
