"""SkyRL's own trainer and Megatron worker on a CPU, from a checkout with or without our patch.

Real: the trainer's ``_normalize_advantages`` in our subclass, ``MeshDispatch.stage_chunks``, the
policy worker's ``forward_backward`` with its microbatches and metrics,
``MegatronModelWrapper.forward_backward_mini_batch`` with its ``loss_func``, packing,
log-probabilities, entropy, the gather over context parallelism, the deferred gradient sync, and
Megatron-Core's schedule, DDP and finalize. Not real: Ray (each rank runs the trainer, and takes its
own chunk), the model (a tiny GPT instead of one that is loaded), the optimizer, and
``torch.compile`` (eager).

For SFT (the term ``nll``): ``SFTTrainer`` in our subclass with its own collators, training loader
and ``train_step``.

``skyrl_worker.py REFERENCE CHECKOUT CP TP PP BOUND CASE ...``; a case is
``aggregation/terms/batching/M``, batching one of packed, padded, tokens (which finds M itself),
and bins for SFT's own packing. In place of an aggregation ``stock token_mean`` and SkyRL's other
``loss_reduction``.
It prints the largest relative error of a gradient; metrics are checked to BOUND. Every step but of
bins is weighed: the policy loss, SFT's, and without a patch KL and, of padded sequences, entropy.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from framework_folders import INSTALLED

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
os.environ["LOSSAGG_WEIGH"] = "1"
REFERENCE, CHECKOUT, *SIZES, BOUND = sys.argv[1:7]
CASES, BOUND = sys.argv[7:], float(BOUND)
CP, TP, PP = map(int, SIZES)
DP = int(os.environ["WORLD_SIZE"]) // (CP * TP * PP)
sys.path.insert(0, CHECKOUT)
sys.path.append(str(INSTALLED))

import stand_ins  # noqa: E402
import tiny_gpt  # noqa: E402  before the frameworks: it lets Megatron-Core run on a CPU
from ranks import leave  # noqa: E402

from megatron_lossagg.verify.drivers import imports  # noqa: E402
from megatron_lossagg.verify.drivers import skyrl as skyrl_driver  # noqa: E402

stand_ins.install(stand_ins.of("skyrl"))
imports.older_python()
skyrl_driver.use_cpu()

import framework_step  # noqa: E402
import pytest  # noqa: E402
import skyrl_functions as frameworks  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from skyrl.backends.skyrl_train.distributed import dispatch  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.skyrl_train.workers.megatron import (  # noqa: E402
    megatron_model_wrapper,
    megatron_worker,
)
from skyrl.train.config import TrainerConfig  # noqa: E402
from skyrl.train.config.sft_config import SFTConfig  # noqa: E402
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

from megatron_lossagg.errors import ContractError  # noqa: E402
from megatron_lossagg.integrations import weigh_rl  # noqa: E402
from megatron_lossagg.integrations.skyrl import SCALE, aggregated  # noqa: E402
from megatron_lossagg.verify.drivers.skyrl import (  # noqa: E402
    prompt_boundaries,
    worker_of,
)
from megatron_lossagg.weigh import listen as told  # noqa: E402

MegatronModelWrapper = megatron_model_wrapper.MegatronModelWrapper
assert megatron_worker.__file__.startswith(CHECKOUT)
torch.randint = skyrl_driver.in_vocabulary(torch.randint)
SAMPLES = sorted(framework_step.samples(), key=lambda sequence: sequence["uid"])
"""The trainer has the whole step, a prompt's sequences together."""


def right_aligned(values, width):
    """Stack per-token values as SkyRL does: responses end where the sequence ends."""
    made = torch.zeros(len(values), width, dtype=torch.float64)
    for sequence, value in zip(made, values, strict=True):
        sequence[width - len(value) :] = value
    return made


def batch_of_the_step():
    """Return the trainer's batch of one mini-batch."""
    prompts = [sequence["tokens"][: -sequence["response"]] for sequence in SAMPLES]
    responses = [sequence["tokens"][-sequence["response"] :] for sequence in SAMPLES]
    masks = [sequence["mask"] for sequence in SAMPLES]
    rewards = [[0.0] * len(mask) for mask in masks]
    converted = convert_prompts_responses_to_batch_tensors(0, prompts, responses, rewards, masks)
    sequences, attention_mask, response_mask, _, loss_mask, *_ = converted
    width = loss_mask.shape[1]
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "advantages": right_aligned([sequence["advantage"] for sequence in SAMPLES], width),
            "action_log_probs": right_aligned([sequence["old"] for sequence in SAMPLES], width),
            "base_action_log_probs": right_aligned(
                [sequence["ref"] for sequence in SAMPLES], width
            ),
        }
    )
    uids = [sequence["uid"] for sequence in SAMPLES]
    batch.metadata = {
        "uids": uids,
        "response_length": width,
        "policy_mini_batch_boundaries": [(0, len(uids))],
        "policy_prompt_boundaries": prompt_boundaries(uids),
    }
    return batch


def config_of(terms, batching, num_microbatches):
    """Return SkyRL's own configuration: its defaults but for what is set here."""
    cfg = TrainerConfig()
    cfg.algorithm.policy_loss_type, cfg.algorithm.temperature = "dual_clip", 1.0
    cfg.algorithm.use_kl_loss, cfg.algorithm.kl_loss_coef = "kl" in terms, framework_step.KL
    cfg.algorithm.use_entropy_loss = "entropy" in terms
    cfg.algorithm.entropy_loss_coef = framework_step.ENTROPY
    sequences = -(-len(SAMPLES) // DP)
    cfg.micro_train_batch_size_per_gpu = -(-sequences // max(num_microbatches, 1))
    cfg.remove_microbatch_padding = batching != "padded"
    cfg.max_tokens_per_microbatch = 40 if batching == "tokens" else -1
    cfg.vocab_entropy_chunk_size = 4  # so that entropy is computed in several chunks
    return cfg


def staged(cfg, case):
    """Return each rank's sequences as SkyRL's trainer, in our subclass, stages them."""
    aggregation = framework_step.CASES.get(case)
    cfg.algorithm.loss_reduction, cfg.algorithm.max_seq_len = case.split()[-1], frameworks.DIVISOR
    kind = aggregated(RayPPOTrainer, aggregation, carry_weights=aggregation is not None)
    trainer = object.__new__(kind)
    trainer.cfg = SimpleNamespace(trainer=cfg)
    batch = batch_of_the_step()
    boundaries = batch.metadata["policy_mini_batch_boundaries"]
    prompts = batch.metadata["policy_prompt_boundaries"]
    batch = trainer._normalize_advantages(batch, boundaries, prompts)
    (chunks,) = dispatch.MeshDispatch.stage_chunks(DP, batch, boundaries)
    return chunks


def sft_batch(case, batching, num_microbatches):
    """Return SkyRL's SFT trainer, in our subclass, and the batch of its training loader."""
    cfg = SFTConfig(strategy="megatron", sampler="sequential", max_length=40)
    cfg.placement.num_gpus_per_node = DP * CP * TP * PP
    cfg.megatron_config.tensor_model_parallel_size = TP
    cfg.megatron_config.pipeline_model_parallel_size = PP
    cfg.megatron_config.context_parallel_size = CP
    cfg.use_sequence_packing = batching == "bins"
    step = DP * max(num_microbatches, 1)
    cfg.batch_size = (-(-len(SAMPLES) // step) + 1) * step  # the last rows are padding
    examples = [
        {
            "input_ids": sequence["tokens"],
            "attention_mask": [1] * len(sequence["tokens"]),
            "num_actions": sequence["response"],
            "loss_mask": sequence["mask"],
        }
        for sequence in SAMPLES
    ]
    trainer, batch = frameworks.sft_batch(framework_step.CASES[case], cfg, examples)
    trainer.cfg = SimpleNamespace(trainer=TrainerConfig())
    assert len(batch["sequences"]) == cfg.batch_size or cfg.use_sequence_packing
    return trainer, batch


class Dispatch:
    """In place of SkyRL's dispatch to Ray actors: this rank's worker and its part of the batch."""

    def __init__(self, worker):
        self.worker = worker

    def forward_backward(self, model, batch, **given):
        boundaries = [(0, len(batch["sequences"]))]
        (chunks,) = dispatch.MeshDispatch.stage_chunks(DP, batch, boundaries)
        return self.worker.forward_backward(
            chunks[parallel_state.get_data_parallel_rank()], **given
        )

    def optim_step(self, model):
        self.worker.model.run_pending_grad_sync()


def train_sft(chunk, cfg, prepared):
    """Run a step of SkyRL's SFT trainer; returns its metrics."""
    trainer, batch = prepared
    chunk.zero_grad_buffer()
    trainer.dispatch = Dispatch(worker_of(cfg, chunk))
    return trainer.train_step(batch, 0)


def train(chunk, cfg, chunks):
    """Run the worker's part of a step; returns its metrics."""
    worker = worker_of(cfg, chunk)
    chunk.zero_grad_buffer()
    output = worker.forward_backward(chunks[parallel_state.get_data_parallel_rank()])
    worker.model.run_pending_grad_sync()
    return output.metrics


def check_metrics(metrics, saved, case):
    """KL and entropy as SkyRL logs them are the step's, under the weights."""
    pg, kl, entropy = (saved[case, terms][0] for terms in ("pg", "pg kl", "pg kl entropy"))
    wanted = {
        "policy_loss": pg,
        "policy_kl": (kl - pg) / framework_step.KL,
        "policy_entropy": (kl - entropy) / framework_step.ENTROPY,
    }
    for name, want in wanted.items():
        assert abs(metrics[name] - want) <= BOUND * abs(want), (name, metrics[name], want)


def reference_of(cfg, case):
    """Return the aggregation of a case, and for SkyRL's own its microbatches: the trainer's."""
    if case in framework_step.CASES:
        return framework_step.CASES[case], {}
    size = cfg.micro_train_batch_size_per_gpu
    places = {sequence["number"]: (0, n // size) for n, sequence in enumerate(SAMPLES)}
    return frameworks.ALIASES[case.removeprefix("stock ")], {
        "places": places,
        "microbatches": [len(SAMPLES) // size],
    }


def check_weighed(weighed, cfg, case, terms, chunks, *, is_patched):
    """The policy loss and SFT's have the mode's weights, KL and entropy are means."""
    aggregation, of_microbatches = reference_of(cfg, case)
    found = framework_step.weights(aggregation, by="number", **of_microbatches)
    numbered = {sequence["number"]: sum(sequence["mask"]) for sequence in SAMPLES}
    wanted = [(numbered[number], weight) for number, weight in found.items()]
    framework_step.assert_weighed(weighed["loss"], wanted, tolerance=max(BOUND, 1e-10))
    if terms != "nll" and "microbatch" not in aggregation.mode:
        is_ours = case in framework_step.CASES
        framework_step.assert_named(weighed["loss"], aggregation, is_ours=is_ours)
    assert not weighed["loss"].unknown  # measured where SkyRL reduces, after the schedule
    if is_patched or cfg.max_tokens_per_microbatch > 0 or "kl" not in terms:
        return
    kl, entropy = [], []
    for chunk in chunks:
        size = cfg.micro_train_batch_size_per_gpu
        for rows in chunk["loss_mask"].split(size):
            number = len(chunk["loss_mask"]) / size * DP  # of means
            counts = [n for n in rows.sum(-1).int().tolist() if n]
            kl += [(n, framework_step.KL / number / len(rows) / n) for n in counts]
            entropy += [(n, -framework_step.ENTROPY / number / sum(counts)) for n in counts]
    framework_step.assert_weighed(weighed["kl_loss"], kl)
    if "entropy" in terms and not cfg.remove_microbatch_padding:  # packed, it has no losses
        framework_step.assert_weighed(weighed["entropy"], entropy)


def main():
    saved, sequences = framework_step.expected_cases(REFERENCE), torch.load(REFERENCE)
    prepared = []  # the trainer is a process of its own, without a process group
    for named in CASES:
        case, terms, batching, num_microbatches = named.split("/")
        cfg = config_of(terms, batching, int(num_microbatches))
        if terms == "nll":
            made = sft_batch(case, batching, int(num_microbatches))
            cfg.micro_train_batch_size_per_gpu = (
                1
                if batching == "bins"
                else made[0].sft_cfg.batch_size // DP // int(num_microbatches)
            )
        else:
            made = staged(cfg, case)
        if case not in framework_step.CASES:
            aggregation, given = reference_of(cfg, case)
            saved[case, terms] = framework_step.expected(
                sequences, {terms: aggregation}, by="number", **given
            )
        prepared.append((named, case, terms, cfg, made))
    tiny_gpt.start(cp=CP, tp=TP, pp=PP)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    weighed, stock = {}, MegatronModelWrapper.forward_backward_mini_batch
    weigh_rl.install("skyrl", steps=1000, report=lambda step, _, term: weighed.update({term: step}))
    carrying = MegatronModelWrapper.forward_backward_mini_batch
    is_patched = "loss_weights" in Path(megatron_worker.__file__).read_text()
    for named, case, terms, cfg, made in prepared:
        is_packed = named.endswith("bins/0")  # rows of several sequences are refused
        MegatronModelWrapper.forward_backward_mini_batch = stock if is_packed else carrying
        told.own[:] = [framework_step.CASES[case]] if case in framework_step.CASES else []
        metrics = (train_sft if terms == "nll" else train)(chunk, cfg, made)
        error = torch.tensor(framework_step.worst_error(chunk, saved[case, terms][1]))
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            padding = metrics.get("num_padding_microbatches", 0)
            print(f"{named}: {error:.1e}, {padding} padding microbatches per rank", flush=True)
        if not is_packed and dist.get_rank() == 0:
            check_weighed(weighed, cfg, case, terms, made, is_patched=is_patched)
        if terms == "nll":
            want = saved[case, terms][0]
            assert abs(metrics["loss"] - want) <= BOUND * abs(want), (metrics["loss"], want)
        if is_patched and terms == "pg kl entropy":
            check_metrics(metrics, saved, case)
    MegatronModelWrapper.forward_backward_mini_batch = carrying
    if is_packed:
        with pytest.raises(ContractError, match="got rows of several sequences"):
            train_sft(chunk, cfg, made)
    elif terms != "nll":
        for batch in made:
            del batch[SCALE]
        with pytest.raises(ContractError, match="got a batch without what SkyRL's trainer"):
            train(chunk, cfg, made)


if __name__ == "__main__":
    main()
    leave()
