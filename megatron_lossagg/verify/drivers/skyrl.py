"""SkyRL: its trainer's advantages, the split over ranks, and its Megatron worker's step.

KL and entropy are means of each microbatch, whatever ``loss_reduction`` says. Not run: Ray (each
rank runs the trainer, and takes its own part), models that Megatron-Bridge loads.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from megatron_lossagg.integrations._shared import WEIGH, replaced
from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import DIVISOR, ENTROPY, KL, Drawn, Driver, column
from megatron_lossagg.verify.drivers.imports import packed_seq_params
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.step_data import VOCABULARY

_SKYRL = "skyrl.backends.skyrl_train"
_OF_BRIDGE = "finalize_model_grads_with_expert_adapter_sync"


class FrameworkDriver(Driver):
    """SkyRL's trainer and worker around a small GPT."""

    function = (
        f"{_SKYRL}.workers.megatron.megatron_model_wrapper."
        "MegatronModelWrapper.forward_backward_mini_batch"
    )
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "token_mean": Aggregation("token_mean"),
        "sequence_mean": Aggregation("sample_mean"),
        "prompt_mean": Aggregation("prompt_mean"),
        "seq_mean_token_sum_norm": Aggregation("constant", divisor=DIVISOR),
    }
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {
        "loss": ("pg", 1.0),
        "kl_loss": ("kl", KL),
        "entropy": ("entropy", -ENTROPY),
    }
    follow = frozenset(("pg",))

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        if parallelism.cp > 1:  # then sequences are packed, and entropy is not weighed
            self.terms = {name: of for name, of in self.terms.items() if name != "entropy"}  # type: ignore[misc]
        os.environ[WEIGH] = "1"  # the trainer leaves its weights in the batch
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
        use_cpu()

    def prepare(self, trained: str | Aggregation) -> tuple[Any, Any]:
        """Stage each rank's sequences as the trainer does."""
        import skyrl.backends.skyrl_train.distributed.dispatch as dispatch
        from skyrl.train.trainer import RayPPOTrainer

        from megatron_lossagg.integrations.skyrl import aggregated

        is_packed = self.parallelism.cp > 1
        cfg = config(len(self.drawn) // self.parallelism.dp, is_packed=is_packed)
        cfg.algorithm.max_seq_len = DIVISOR
        if isinstance(trained, str):
            cfg.algorithm.loss_reduction = trained
        trainer = object.__new__(
            aggregated(RayPPOTrainer, None if isinstance(trained, str) else trained)
        )
        trainer.cfg = SimpleNamespace(trainer=cfg)
        batch = batch_of(self.drawn)
        boundaries = batch.metadata["policy_mini_batch_boundaries"]
        prompts = batch.metadata["policy_prompt_boundaries"]
        batch = trainer._normalize_advantages(batch, boundaries, prompts)
        (chunks,) = dispatch.MeshDispatch.stage_chunks(self.parallelism.dp, batch, boundaries)
        return cfg, chunks

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen in what reduces losses."""
        from megatron_lossagg.integrations import weigh_rl

        return weigh_rl.install("skyrl", steps=sys.maxsize, report=report)

    def train(self, trained: str | Aggregation, prepared: tuple[Any, Any]) -> Mapping[str, float]:
        """Run the worker's part of a step."""
        from megatron.core import parallel_state

        cfg, chunks = prepared
        worker = worker_of(cfg, self.chunk)
        self.chunk.zero_grad_buffer()
        with replaced(torch, randint=in_vocabulary(torch.randint)):
            output = worker.forward_backward(chunks[parallel_state.get_data_parallel_rank()])
        if hasattr(worker.model, "run_pending_grad_sync"):  # 0.3.0 reduces in the schedule
            worker.model.run_pending_grad_sync()
        return {"loss": float(output.metrics["policy_loss"])}


def use_cpu() -> None:
    """Let SkyRL be imported without Megatron-Bridge and Ray, and with an older Megatron-Core."""
    # SkyRL 0.4.0 patches Bridge's adapters for LoRA when it is imported: as if it had.
    adapters: Any = importlib.import_module("megatron.bridge.peft.utils")
    adapters.ParallelLinearAdapter = SimpleNamespace(_skyrl_shared_expert_lora_tp_patch=True)
    from megatron.core.distributed import finalize_model_grads

    utils: Any = importlib.import_module(f"{_SKYRL}.distributed.megatron.megatron_utils")
    utils.PackedSeqParams = packed_seq_params()
    # SkyRL asks whether the model is one of Bridge's, where it can be imported.
    sys.modules["megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model"] = None  # type: ignore[assignment]
    dispatch: Any = importlib.import_module(f"{_SKYRL}.distributed.dispatch")
    dispatch.ray.put = lambda chunk: chunk
    wrapper = importlib.import_module(f"{_SKYRL}.workers.megatron.megatron_model_wrapper")
    if hasattr(wrapper, _OF_BRIDGE):  # Megatron-Core's, and LoRA of experts
        setattr(wrapper, _OF_BRIDGE, finalize_model_grads)


def in_vocabulary(randint: Any) -> Any:
    """Draw the tokens of a padding microbatch, which SkyRL takes below 100, from the model's."""
    return lambda low, high, *size, **given: randint(low, min(high, VOCABULARY), *size, **given)


def prompt_boundaries(prompts: Sequence[Any]) -> list[tuple[int, int]]:
    """Write contiguous prompts as SkyRL's pairs of first sequence and end."""
    bounds, start = [], 0
    for _, sequences in groupby(prompts):
        end = start + len(list(sequences))
        bounds.append((start, end))
        start = end
    return bounds


def batch_of(drawn: Sequence[Drawn]) -> Any:
    """Return the trainer's batch of one mini-batch."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    prompts = [one.tokens[: -len(one.mask)].tolist() for one in drawn]
    responses = [one.tokens[-len(one.mask) :].tolist() for one in drawn]
    masks = [one.mask for one in drawn]
    rewards = [[0.0] * len(mask) for mask in masks]
    first = next(iter(inspect.signature(convert_prompts_responses_to_batch_tensors).parameters))
    padding: Any = SimpleNamespace(pad_token_id=0) if first == "tokenizer" else 0  # until 0.3.0
    converted = convert_prompts_responses_to_batch_tensors(
        padding, prompts, responses, rewards, masks
    )
    sequences, attention_mask, response_mask, _, loss_mask, *_ = converted
    width, names = loss_mask.shape[1], ("advantages", "old_log_probs", "ref_log_probs")
    columns = {
        name: column([getattr(one, name) for one in drawn], [width] * len(drawn), width)
        for name in names
    }
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "advantages": columns["advantages"],
            "action_log_probs": columns["old_log_probs"],
            "base_action_log_probs": columns["ref_log_probs"],
        }
    )
    uids = [f"p{one.prompt}" for one in drawn]
    batch.metadata = {
        "uids": uids,
        "response_length": width,
        "policy_mini_batch_boundaries": [(0, len(uids))],
        "policy_prompt_boundaries": prompt_boundaries(uids),
    }
    return batch


def config(of_rank: int, *, is_packed: bool) -> Any:
    """Return SkyRL's own configuration: its defaults but for what is set here."""
    from skyrl.train.config import TrainerConfig

    cfg = TrainerConfig()
    cfg.algorithm.policy_loss_type, cfg.algorithm.temperature = "dual_clip", 1.0
    cfg.algorithm.use_kl_loss, cfg.algorithm.kl_loss_coef = True, KL
    cfg.algorithm.use_entropy_loss, cfg.algorithm.entropy_loss_coef = not is_packed, ENTROPY
    cfg.micro_train_batch_size_per_gpu = max(of_rank // 3, 1)
    cfg.remove_microbatch_padding = is_packed
    cfg.max_tokens_per_microbatch = -1
    return cfg


def worker_of(cfg: Any, chunk: Any) -> Any:
    """Return SkyRL's policy worker around a wrapped model."""
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker

    worker = object.__new__(megatron_worker.MegatronPolicyWorkerBase)
    worker.cfg, worker.actor_module, worker.optimizer = cfg, [chunk], None
    worker.strategy = object.__new__(MegatronStrategy)
    worker.enable_router_replay = worker.empty_cuda_cache = False
    worker.enable_sample_support_replay = False  # of 0.4.0
    worker.model = megatron_worker.MegatronModelWrapper(
        cfg, [chunk], policy_loss_fn=PolicyLossRegistry.get(cfg.algorithm.policy_loss_type)
    )
    return worker
