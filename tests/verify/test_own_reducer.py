"""A reducer of one's own against itself on one process: what adds up passes, a mean does not."""

import json
from pathlib import Path

import pytest
import torch
from conftest import fork_server
from custom_reducer import custom

from megatron_lossagg import Aggregation
from megatron_lossagg.cli.main import main
from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.cases import Case, expected
from megatron_lossagg.verify.causes import Facts
from megatron_lossagg.verify.own_reducer import loss_of_parts, not_additive
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import Reference
from megatron_lossagg.verify.step_data import assign_sequences, make_sequences

ROOT = Path(__file__).parents[2]
LAYOUTS = [
    Parallelism(dp=2, cp=2),
    Parallelism(dp=4, microbatches=3),
    Parallelism(dp=2, cp=2, microbatches=(1, 4)),
    Parallelism(cp=4, cp_partition="contiguous"),
    Parallelism(dp=2, cp=2, packing="bshd"),
    Parallelism(cp=2, packing="gathered", microbatches=5),
]


def facts_of(layout):
    """Draw each token's loss: no model is needed to add losses up."""
    _, copies, padded = layout.reference
    sequences = make_sequences(copies)
    num = sum(-(-len(sequence) // padded) * padded for sequence in sequences) + padded
    losses_Y = torch.rand(num, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference = Reference(
        sequences=sequences,
        padded=padded,
        losses_Y=losses_Y,
        gradients_YP=torch.zeros(num, 0, dtype=torch.float64),
        parameters={},
    )
    return Facts(
        reference=reference,
        assignment=assign_sequences(sequences, layout.m_of_ranks),
        parallelism=layout,
        loss_scaling="average",
    )


def token_mean(context):
    return lambda losses: losses.sum() / context.plan.totals.active_tokens


def prompt_mean(context):
    weights = context.plan.under("prompt_mean").weights
    segments = torch.from_numpy(context.layout.local_lengths)
    of_token = torch.tensor([weights[s] if s >= 0 else 0 for s in context.sequences])
    return lambda losses: (losses * of_token.repeat_interleave(segments)).sum()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("factory", [token_mean, prompt_mean], ids=lambda f: f.__name__)
def test_a_sum_is_on_one_process_and_in_parts_what_loops_over_tokens_give(layout, factory):
    facts = facts_of(layout)
    own = expected(Case(aggregation=custom(factory)), facts.reference, facts.assignment)
    by_hand = Case(aggregation=Aggregation(factory.__name__))
    wanted = expected(by_hand, facts.reference, facts.assignment)
    assert own.loss == pytest.approx(wanted.loss, rel=1e-13)
    torch.testing.assert_close(own.slope_Y, wanted.slope_Y, rtol=1e-13, atol=0)
    assert own.weight_sum is own.weight_expected is None
    y_Y = facts.reference.losses_Y.clone().requires_grad_()
    loss_of_parts(custom(factory), facts, y_Y).backward()
    torch.testing.assert_close(y_Y.grad, wanted.slope_Y, rtol=1e-12, atol=0)
    assert not_additive(custom(factory), facts, own.loss, 1e-12) == ""


@pytest.mark.parametrize(
    ("reduce", "found"),
    [
        (lambda mask, losses: losses.mean(), "its partial losses add up to "),
        (lambda mask, losses: losses.sum() / mask.sum(), "and their partial loss is nan"),
        (lambda mask, losses: losses.sum() / mask.sum().clamp(min=1), "partial losses add up to "),
        (lambda mask, losses: losses.sum().square(), "its partial losses add up to "),
        (lambda mask, losses: losses.sum() + 1e-6, "its partial losses add up to "),
    ],
    ids=["mean", "mean over the mask", "clamped", "of a square", "off by little"],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_no_sum_is_named_with_both_numbers(layout, reduce, found):
    facts = facts_of(layout)
    aggregation = custom(lambda context: lambda losses: reduce(context.mask, losses))
    wanted = expected(Case(aggregation=aggregation), facts.reference, facts.assignment)
    why = not_additive(aggregation, facts, wanted.loss, 1e-12)
    assert why.startswith(f"{aggregation.reducer_path} does not return a sum: ")
    assert f"{wanted.loss:.6g}; split as in this layout, " in why
    assert found in why


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (lambda losses: losses.detach().sum(), "does not depend on the losses"),
        (lambda losses: losses[0, 0, 0], r"raised IndexError\("),
        (lambda losses: losses, "return a 0-dim"),
    ],
)
def test_a_reducer_that_trains_nothing_or_raises_is_named(reduce, message):
    facts = facts_of(LAYOUTS[0])
    with pytest.raises(ProofError, match=rf"custom_reducer:\w+ .*{message}"):
        expected(
            Case(aggregation=custom(lambda context: reduce)), facts.reference, facts.assignment
        )


@pytest.mark.launches
@pytest.mark.parametrize(("name", "passes"), [("focal", True), ("mean", False)])
def test_the_reducers_of_the_example_are_told_apart_by_their_gradients(
    name, passes, tmp_path, monkeypatch, capsys
):
    """On Megatron's schedules; the command and its words are those of docs/own-loop.md."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("megatron_lossagg.verify.job.launch", fork_server().launch)
    path = f"examples.own_reducer:{name}"
    report = tmp_path / "report.json"
    flags = ["--cp", "2", "--loss-scaling", "average", "--loss-aggregation-reducer-path", path]
    assert main(["verify", *flags, "--json", str(report)]) == int(not passes)
    (verdict,) = json.loads(report.read_text())["verdicts"]
    assert (verdict["case"], verdict["passed"]) == (path, passes)
    out = " ".join(capsys.readouterr().out.split())
    assert (f"{path} does not return a sum: " in out) is not passes
    if passes:
        assert verdict["gradient_error"] < 1e-12
        assert verdict["weight_sum_error"] is None
    else:
        assert verdict["causes"] == ["not_additive"]
        assert verdict["gradient_error"] > 0.1


COMPILED = """
import pathlib, torch

def backend(graph, inputs):
    pathlib.Path({folder!r}, "compiled").touch()
    return graph.forward

@torch.compile(backend=backend)
def total(losses, tokens):
    return losses.sum() / tokens

def factory(context):
    return lambda losses: total(losses, context.plan.totals.active_tokens)
"""


@pytest.mark.launches
def test_a_reducer_that_its_user_compiles_is_compiled(tmp_path, monkeypatch):
    """Else another function would be verified than the one that trains."""
    (tmp_path / "compiled_reducer.py").write_text(COMPILED.format(folder=str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("megatron_lossagg.verify.job.launch", fork_server().launch)
    flags = ["--loss-scaling", "average", "--loss-aggregation-reducer-path"]
    assert main(["verify", "--dp", "1", *flags, "compiled_reducer:factory"]) == 0
    assert (tmp_path / "compiled").exists()


def test_a_frameworks_functions_are_not_compared_with_a_reducer_of_ones_own(monkeypatch, capsys):
    monkeypatch.setattr("megatron_lossagg.cli.verify.check_installed", lambda name: None)
    flags = ["--framework", "megatron-lm", "--loss-aggregation-reducer-path", "math:fsum"]
    assert main(["verify", *flags]) == 2
    assert "got math:fsum with --framework megatron-lm" in capsys.readouterr().err
