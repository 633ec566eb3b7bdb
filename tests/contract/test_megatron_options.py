"""The table of Megatron's options: what it refuses, what it says, and whether it is true."""

import ast
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import TESTS
from framework_folders import PATH
from frameworks import checkout_of, lacks
from option_releases import missing_or_early, table
from ranks import rows_of

from megatron_lossagg.contract.megatron_options import OPTIONS, check_options
from megatron_lossagg.errors import ContractError

CHECKOUTS = {"Megatron-LM": "0.16", "Megatron-LM-main": "main", "Megatron-LM-dev": "dev"}
WORDS = {"context", "cp", "packed", "packing", "thd", "loss", "scale", "gtp", "shards", "ctx"}
"""In a field's name, that it may change who holds a token or how a loss is scaled."""
HARMLESS = {
    "max_seqlen_per_dp_cp_rank",  # how long a pack of the scheduler is, which is counted later
    "min_dynamic_context_parallel_size",  # of dynamic CP
    "tensor_parallel_num_weight_shards",  # sets gtp_weight_remat_size
    "expert_tensor_parallel_num_weight_shards",
    "gtp_remat_opt_in_modules",
    "account_for_loss_in_pipeline_split",  # how many layers a stage has
    "softmax_scale",
    "mup_attn_scale_power",
    "dsa_indexer_use_sparse_loss",
    "_cpu_offloading_context",
}
"""Fields of options that the table refuses already, and those that only sound like it."""


REFUSED_BY_ITS_CLASS = {"Megatron-FSDP", "torch FSDP2", "MimoModel"}
REFUSED_BY_ITS_LOSS = {"modelopt_enabled", "logits_load_dir"}
VERDICTS = ("supported", "not affected", "**refused**: ")


def test_no_option_is_twice_in_the_table_of_the_page_and_each_has_a_verdict():
    rows = table()
    names = [name for row in rows for name in row.since]
    assert len(names) == len(set(names))
    assert all(row.since and row.verdict.startswith(VERDICTS) for row in rows)


def test_the_page_refuses_what_the_code_refuses_and_says_when_and_why():
    rows = {tuple(row.since): row for row in table()}
    for option in OPTIONS:
        row = rows[option.names]
        assert row.holder == option.holder
        refused, *_ = row.verdict.split("; ")
        assert refused == f"**refused**: {option.when}"
        assert row.why == option.why
    refused = {name for row in rows.values() if "refused**" in row.verdict for name in row.since}
    by_code = {name for option in OPTIONS for name in option.names}
    assert refused == by_code | REFUSED_BY_ITS_CLASS | REFUSED_BY_ITS_LOSS


@pytest.mark.parametrize(
    ("given", "cp_size", "is_refused"),
    [
        ({"dataloader_inter_document_masking": True, "sft": False}, 2, True),
        ({"dataloader_inter_document_masking": True, "sft": False}, 1, False),
        ({"dataloader_inter_document_masking": True, "sft": True}, 2, False),
        ({"sft": False}, 2, False),
    ],
)
def test_documents_split_as_one_are_refused_by_what_the_script_was_called_with(
    given, cp_size, is_refused
):
    if not is_refused:
        check_options("script arguments", SimpleNamespace(**given), cp_size=cp_size)
        return
    with pytest.raises(ContractError, match=r"lie unevenly.*--context-parallel-size 1"):
        check_options("script arguments", SimpleNamespace(**given), cp_size=cp_size)


def worker_of(framework):
    """Run ``options_worker.py`` on a checkout's own Megatron-Core."""
    if reason := lacks(framework):
        pytest.skip(reason)
    checkout = checkout_of(framework)
    paths = [checkout, *PATH]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(TESTS / "contract" / "options_worker.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = rows_of(done.stdout)
    assert str(checkout) in found["file"]
    return found


@pytest.fixture(scope="module")
def own_classes(launches):
    """What each checkout's own classes have, and what is refused of them."""
    return {checkout: worker_of(checkout) for checkout in CHECKOUTS}


@pytest.mark.parametrize(
    ("checkout", "options"),
    {
        "Megatron-LM": {"hybrid_context_parallel"},
        "Megatron-LM-main": {
            "hybrid_context_parallel",
            "gtp_weight_remat_size",
            "expert_gtp_weight_remat_size",
        },
        "Megatron-LM-dev": {
            "hybrid_context_parallel",
            "dynamic_context_parallel",
            "sequence_packing_scheduler",
            "cp_partition_mode",
        },
    }.items(),
)
def test_a_checkouts_own_config_class_is_refused_by_each_option_and_by_no_default(
    own_classes, checkout, options
):
    found = own_classes[checkout]
    assert found["by default"] is None
    assert set(found["refused"]) == options
    for name, message in found["refused"].items():
        assert message.startswith(f"{name} is ")


@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_a_checkout_has_the_options_that_the_table_says_it_has(own_classes, checkout):
    fields = own_classes[checkout]["fields"]
    assert not missing_or_early(fields, CHECKOUTS[checkout])


def test_every_field_that_sounds_like_it_is_in_the_table(own_classes):
    named = {name for row in table() for name in row.since}
    for found in own_classes.values():
        sounding = {name for name in found["fields"] if WORDS & set(name.split("_"))}
        assert sounding <= named | HARMLESS


def test_the_contiguous_layout_has_the_tokens_of_megatrons_own_split(own_classes):
    contiguous = own_classes["Megatron-LM-dev"]["contiguous"]
    assert contiguous["layout"] == [[one, one] for one in contiguous["own"]]


def test_the_options_are_read_without_megatron_and_torch():
    tree = ast.parse(
        (TESTS.parent / "megatron_lossagg" / "contract" / "megatron_options.py").read_text()
    )
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {"torch", "megatron"} & modules
