"""``check_loss``: a loss function of one's own on every split, and what it is named."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import fork_server
from frameworks import checkout_of, needs
from own_losses import gspo, gspo_of_parts, pretrain_gpt, sequences, seventh, sum_over_7

from megatron_lossagg import check_loss
from megatron_lossagg.cli.main import main
from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.own_loss import SPLITS, LossCase, LossCheck, trained

M3, DP2, CP2, BSHD, ALL, ALL_BSHD = SPLITS


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    monkeypatch.setattr("megatron_lossagg.verify.job.launch", fork_server().launch)


def checked(name, batch=None, *, loss_scaling="average", splits=SPLITS):
    return check_loss(f"own_losses:{name}", batch, loss_scaling=loss_scaling, splits=splits)


@pytest.mark.launches
def test_stock_is_named_a_mean_per_microbatch_in_one_scaling_and_passes_in_the_other():
    check = check_loss(pretrain_gpt, loss_scaling=("average", "per_token"))
    assert check.references == {"average": "token_mean", "per_token": "token_mean"}
    average, per_token = check.cases[:6], check.cases[6:]
    of_rank = "a mean of one token mean per microbatch and context-parallel rank"
    causes = [case.causes[0] if case.causes else "" for case in average]
    of_microbatch = "a mean of one token mean per microbatch"
    assert causes == [of_microbatch, of_microbatch, of_rank, "", of_rank, causes[-1]]
    assert causes[-1].startswith(of_rank)
    assert [case.passed for case in average] == [False, False, False, True, False, False]
    assert average[0].trains == "microbatch_token_mean"
    assert all(case.passed and case.measured == "1" for case in per_token)
    assert not check.passed
    assert str(check).startswith("FAIL: own_losses:pretrain_gpt trains what one process")
    only = "It is right with --calculate-per-token-loss only (--loss-scaling per_token)"
    assert str(check).splitlines()[1] == only
    assert max(map(len, str(check).splitlines())) <= 80


@pytest.mark.launches
def test_the_weights_are_those_of_a_loop_over_tokens():
    """Tokens of a microbatch of n weigh 1 / (M n), not 1 / N; the first has two sequences."""
    batch = sequences(4)
    n_s = [sum(1 for m in sequence["loss_mask"] if m) for sequence in batch]
    relative = [sum(n_s) / (3 * n) for n in (n_s[0] + n_s[3], n_s[1], n_s[2])]
    (case,) = checked("pretrain_gpt", batch, splits=[M3]).cases
    assert (case.smallest, case.largest) == pytest.approx((min(relative), max(relative)), rel=1e-5)


@pytest.mark.launches
def test_a_count_of_one_rank_in_place_of_all_is_found():
    """Ranks have different numbers of sequences."""
    check = checked("samples_of_a_rank", sequences(7), splits=[DP2, CP2])
    of_dp, of_cp = check.cases
    assert not of_dp.passed
    assert of_cp.passed


@pytest.mark.launches
def test_a_gradient_that_is_not_finite_is_no_pass():
    check = checked("nan_on_one_rank", splits=[M3, CP2])
    assert [case.passed for case in check.cases] == [True, False]
    assert check.cases[1].measured.startswith("not finite")


@pytest.mark.launches
def test_a_bool_column_stays_one():
    check = checked("of_selected", "own_losses:bool_masks", loss_scaling="per_token", splits=[M3])
    assert check.passed, str(check)


@pytest.mark.launches
@needs("Megatron-LM")
def test_megatron_lms_own_loss_func_is_named_as_its_formula_is(monkeypatch):
    monkeypatch.syspath_prepend(checkout_of("Megatron-LM"))
    check = check_loss("stock_loss:loss_func", loss_scaling=("average", "per_token"))
    assert check.references == {"average": "token_mean", "per_token": "token_mean"}, str(check)
    average, per_token = check.cases[:6], check.cases[6:]
    assert all(case.passed for case in per_token)
    assert average[0].causes == ["a mean of one token mean per microbatch"]
    assert [case.passed for case in average] == [split == BSHD for split in SPLITS]


@pytest.mark.launches
def test_a_right_global_mean_passes_and_a_seventh_of_it_is_named():
    right, wrong = checked("global_mean"), check_loss(seventh, loss_scaling="average")
    assert right.passed, str(right)
    assert right.references == {"average": "token_mean"}
    assert wrong.passed, str(wrong)
    assert wrong.references == {"average": "0.142857 = 1/7 times token_mean"}


@pytest.mark.launches
def test_a_loss_that_is_not_linear_in_the_drawn_outputs_is_called_no_mode():
    check = checked("mean_of_squares", splits=[M3])
    assert check.passed, str(check)
    assert check.references == {"average": ""}


@pytest.mark.launches
def test_a_sum_that_knows_no_sizes_is_off_by_them():
    check = check_loss(sum_over_7, loss_scaling="average")
    assert check.references == {"average": "0.142857 = 1/7 times token_sum"}
    assert [[*case.equals] for case in check.cases][:4] == [["1/M"], ["1/DP"], ["1/CP"], []]
    assert check.cases[4].factor == pytest.approx(1 / 12)
    assert check.cases[4].equals[0] == "1/(M DP CP)"
    assert check.cases[0].measured == "0.333333 = 1/3 = 1/M"


@pytest.mark.launches
def test_a_mean_of_sample_means_is_named():
    (m3, dp2) = checked("mean_of_samples", splits=[M3, DP2]).cases
    assert [*m3.causes] == ["a mean of one sample mean per microbatch"]
    assert [*dp2.causes] == [*m3.causes]  # eight sequences on one rank, four on the other


@pytest.mark.launches
def test_a_policy_loss_is_no_mode_and_its_cause_is_found():
    check = checked("policy", sequences(), loss_scaling=("average", "per_token"))
    assert check.references == {"average": "", "per_token": ""}
    average, per_token = check.cases[:6], check.cases[6:]
    assert all(case.passed for case in per_token)
    assert [*average[0].causes] == ["a mean of one token mean per microbatch"]


@pytest.mark.launches
def test_a_loss_may_communicate_and_is_wrong_where_it_should_have():
    right = check_loss(gspo, "own_losses:sequences", loss_scaling="per_token")
    assert right.passed, str(right)
    wrong = check_loss(gspo_of_parts, sequences(), loss_scaling="per_token")
    assert [case.passed for case in wrong.cases] == ["cp" not in split for split in SPLITS]
    assert "no known cause" in wrong.cases[2].measured


@pytest.mark.launches
def test_a_loss_that_trains_other_tokens_is_no_pass():
    check = checked("of_padding", sequences(), splits=[M3])
    assert not check.passed
    assert "trains on one process in one microbatch padding" in check.failure
    nothing = checked("of_nothing", sequences(), splits=[M3])
    assert (nothing.passed, [*nothing.cases]) == (False, [])
    assert "trains on one process in one microbatch nothing" in nothing.failure
    nan = checked("nan_at_a_token", splits=[M3])
    assert "trains on one process in one microbatch padding, NaN or inf" in nan.failure
    (m3, cp2) = checked("padding_at_cp", splits=[M3, CP2], loss_scaling="per_token").cases
    assert (m3.passed, cp2.passed) == (True, False)
    assert cp2.measured == "not finite, or of tokens that one process does not train"


@pytest.mark.launches
def test_what_a_loss_function_raises_is_the_failure(capsys):
    check = checked("raises", splits=[M3])
    assert (check.passed, [*check.cases]) == (False, [])
    assert str(check).startswith("FAIL: own_losses:raises was not measured\n")
    assert "no sequence has 'rewards': give it as a column of batch (--batch)" in str(check)


@pytest.mark.launches
def test_the_command_prints_the_report_and_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent)
    flags = ["--loss-func", "own_losses:pretrain_gpt", "--microbatches", "3"]
    report = tmp_path / "report.json"
    assert main(["verify", *flags, "--json", str(report)]) == 1
    assert "PASS" not in (out := capsys.readouterr().out)
    assert "trains in 1 of 2 cases" in " ".join(out.split())
    (average, per_token) = json.loads(report.read_text())["cases"]
    assert (average["passed"], per_token["passed"]) == (False, True)
    assert main(["verify", *flags, "--loss-scaling", "per_token"]) == 0


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], {}),
        (["--cp", "2", "--packing", "bshd"], {"splits": [{"cp": 2, "packing": "bshd"}]}),
        (["--loss-scaling", "average"], {"loss_scaling": "average"}),
        (["--timeout", "7"], {"timeout": 7.0}),
    ],
    ids=str,
)
def test_the_command_checks_every_split_in_both_loss_scalings_by_default(
    flags, wanted, monkeypatch
):
    given = []

    def check(path, batch, **options):
        given.append(options)
        return LossCheck(loss_func=path, references={}, cases=[case("average", True)])

    monkeypatch.setattr("megatron_lossagg.cli.verify_loss.check_loss", check)
    assert main(["verify", "--loss-func", "a:b", *flags]) == 0
    every = {"splits": SPLITS, "loss_scaling": ("average", "per_token"), "timeout": 300.0}
    assert given == [{**every, **wanted}]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--loss-func", "a:b", "--tp", "2"], "got --tp with --loss-func"),
        (["--loss-func", "a:b", "--loss-aggregation", "token_mean"], "got --loss-aggregation"),
        (["--batch", "a:b"], "got --batch without --loss-func"),
    ],
)
def test_options_of_a_model_or_a_mode_are_refused(flags, words, capsys):
    assert main(["verify", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss_func": lambda microbatch, output: None}, "expected a function of a module"),
        ({"batch": sequences(5)}, "got 5 sequences, expected at least 7"),
        ({"batch": [{"loss_mask": [1.0]}] * 6 + [{"mask": [1.0]}]}, "in sequence 6"),
        ({"batch": [{"loss_mask": [1.0], "reward": [1.0, 2.0]}] * 7}, "['reward']"),
        ({"batch": [{"loss_mask": [1.0], "step": 1}] * 7}, "got the column 'step'"),
        ({"batch": iter(sequences(7))}, "expected at least 7"),
        ({"splits": [{"tp": 2}]}, "got the split {'tp': 2}, expected cp, cp_partition, dp"),
        ({"splits": [{"microbatches": (2, 3)}]}, "with one number of microbatches"),
        ({"splits": [{"packing": "gathered"}]}, "got the packing 'gathered'"),
        ({"splits": []}, "got no splits"),
        ({"loss_scaling": "per-token"}, "loss_scaling: got 'per-token', expected one of"),
        ({"loss_scaling": None}, "loss_scaling: got None"),
        ({"loss_func": "no_such_module:loss"}, "loss_func 'no_such_module:loss' raised ModuleNot"),
        ({"loss_func": "own_losses:gpso"}, "did you mean 'gspo'"),
        ({"loss_func": "own_losses"}, "which is not callable"),
        ({"batch": "own_losses:sequnces"}, "did you mean 'sequences'"),
        ({"batch": "gc:enable"}, "batch: got None, expected at least 7"),
        ({"batch": "own_losses:gspo"}, "batch 'own_losses:gspo' raised TypeError"),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_starts(arguments, words, monkeypatch):
    monkeypatch.delattr("megatron_lossagg.verify.job.launch")
    with pytest.raises(ProofError, match=words.replace("[", r"\[")):
        check_loss(**{"loss_func": gspo, "loss_scaling": "average", **arguments})


def case(loss_scaling, passed):
    """Return a case; what it measured is of no interest."""
    return LossCase(
        split="DP 2",
        loss_scaling=loss_scaling,
        smallest=1.0,
        largest=1.0,
        factor=1.0,
        equals=[],
        causes=[],
        trains="",
        passed=passed,
    )


@pytest.mark.parametrize(
    ("average", "per_token", "said"),
    [
        (True, False, "right without --calculate-per-token-loss only (--loss-scaling average)"),
        (False, True, "right with --calculate-per-token-loss only (--loss-scaling per_token)"),
        (False, False, ""),
        (True, True, ""),
    ],
)
def test_a_loss_that_is_right_in_one_loss_scaling_is_said_to_be_for_it(average, per_token, said):
    cases = [case("average", True), case("average", average), case("per_token", per_token)]
    text = str(LossCheck(loss_func="a:b", references={}, cases=cases))
    assert said in text
    assert ("only" in text) == bool(said)
    early = LossCheck(loss_func="a:b", references={}, cases=cases, failure="A rank failed")
    assert "only" not in str(early)
    assert not early.passed
    assert "only" not in str(LossCheck(loss_func="a:b", references={}, cases=cases[:2]))


def documented(language):
    """Return the blocks of a language in docs/verify.md's section on a loss of one's own."""
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    section = page.partition("## Your own loss")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.mark.launches
def test_the_documented_test_shows_the_table_of_a_wrong_loss(pytester, monkeypatch):
    """As pytest prints it, which cuts an object that is no string."""
    loss, test = documented("python")
    wrong = loss.replace("return loss,", "return loss / num_tokens.clamp(min=1),")
    assert wrong != loss
    pytester.makepyfile(my_losses=wrong, test_my_loss=test)
    pytester.syspathinsert()
    monkeypatch.setenv("COLUMNS", "80")
    done = pytester.runpytest_inprocess("test_my_loss.py")
    done.assert_outcomes(failed=1)
    printed, _, _ = done.stdout.str().partition("assert False")
    table = [line.removeprefix("E").strip() for line in printed.splitlines() if line[:1] == "E"]
    whole = " ".join(table)
    assert "FAIL: my_losses:loss_func trains what one process trains in " in whole
    for split in ("DP 1, M 3", "DP 2, M 1", "CP 2, M 1", "DP 1, M 1, bshd", "DP 2 x CP 2, M 3"):
        (row, *_) = [line for line in table if re.match(rf"{split}  ", line)]
        assert re.search(r"  [\d.]", row)
    assert "..." not in whole


@pytest.mark.parametrize("batch", [None, "needs_cuda:batch"])
def test_a_module_that_wants_cuda_when_it_is_imported_is_left_to_the_ranks(
    tmp_path, monkeypatch, batch
):
    """They have stand-ins for it."""
    (tmp_path / "needs_cuda.py").write_text("raise RuntimeError('Found no NVIDIA driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    jobs = []

    def launched(job, take, **options):
        jobs.append(job)
        return subprocess.CompletedProcess([], 1, "", "[rank0]: ended")

    monkeypatch.setattr("megatron_lossagg.verify.own_loss.launched", launched)
    check = check_loss("needs_cuda:loss_func", batch, loss_scaling="average")
    assert check.failure == "A rank failed\n[rank0]: ended"
    assert [(job.path, job.batch) for job in jobs] == [("needs_cuda:loss_func", batch)]


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ({"token_mean": 1 / 7}, "0.142857 = 1/7 times token_mean"),
        ({"token_mean": 7.0}, "7 times token_mean"),
        ({"token_mean": 7.0004}, "7.0004 times token_mean"),
        ({"token_mean": 1 / 1000.4}, "0.0009996 times token_mean"),
        ({"token_mean": 0.7, "sample_mean": 1 / 3}, "0.333333 = 1/3 times sample_mean"),
        ({"token_mean": 2.0, "sample_mean": 1.0}, "sample_mean"),
        ({"token_mean": float("nan")}, "nan times token_mean"),
        ({}, ""),
    ],
    ids=str,
)
def test_a_factor_is_written_as_a_quotient_only_if_it_is_one(factors, says):
    assert trained(factors) == says


def test_no_case_is_no_pass():
    assert not LossCheck(loss_func="a:b", references={}, cases=[]).passed
