"""ROLL: ``train_step`` of its Megatron strategy, of RLVR and SFT; and mcore_adapter's trainer.

A model of RLVR returns bfloat16 logits: of float32 ones ROLL computes log-probabilities in place,
and entropy of what is left. Not run: Ray, what loads a model, an optimizer, pinned memory.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lossagg.integrations import weigh_rl
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import (
    ENTROPY,
    IGNORED,
    KL,
    Drawn,
    HookedDriver,
    Unchanging,
)
from megatron_lossagg.verify.drivers.imports import defaults
from megatron_lossagg.verify.drivers.llama_factory import trainer_of, use_cpu
from megatron_lossagg.verify.parallelism import Parallelism

_STRATEGY = "roll.distributed.strategy.megatron_strategy"
_POLICY, _SFT = "roll.pipeline.rlvr.actor_worker", "roll.pipeline.sft.sft_worker"
_WIDTH, _BATCH = 24, 2
"""Of a padded sequence; sequences of a microbatch."""
_TEXTS = ("input_ids", "attention_mask", "labels")
"""The columns of SFT."""
_MODE, _PACKED, _OF_SFT = "loss_agg_mode: ", ", use_sequence_packing", "the SFT pipeline"
_TRAINER = "mcore_adapter's trainer"
_PER_TOKEN = f"{_TRAINER}, calculate_per_token_loss"


class FrameworkDriver(HookedDriver):
    """ROLL's strategy, or mcore_adapter's trainer, around a small GPT."""

    function = f"{_STRATEGY}.MegatronTrainStrategy.train_step"
    schedule = "mcore_adapter.trainer.trainer"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        f"{_MODE}seq-mean-token-mean": Aggregation("sample_mean"),
        f"{_MODE}token-mean": Aggregation("token_mean"),
        f"{_MODE}seq-mean-token-sum": Aggregation("sample_sum"),
        f"{_MODE}seq-mean-token-sum-norm": Aggregation("constant", divisor=_WIDTH - 1),
        f"{_MODE}seq-mean-token-sum-norm{_PACKED}": Aggregation("constant", divisor=_WIDTH - 1),
        _OF_SFT: Aggregation("token_mean"),
        _TRAINER: Aggregation("token_mean"),
        _PER_TOKEN: Aggregation("token_mean"),
    }
    of_policy: ClassVar[Mapping[str, tuple[str, float]]] = {
        "weighted_pg_loss": ("pg", 1.0),
        "kl_loss": ("kl", KL),
        "entropy_loss": ("entropy", -ENTROPY),
    }
    """The terms of RLVR."""

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
        os.environ.setdefault("ROLL_LOG_DIR", tempfile.mkdtemp())  # made when it is imported
        roll = find_spec("roll")
        for package in () if roll is None else roll.submodule_search_locations or ():
            sys.path.append(str(Path(package).parent / "mcore_adapter" / "src"))
        modules: list[Any] = [
            importlib.import_module(name) for name in (_STRATEGY, _POLICY, _SFT, self.schedule)
        ]
        self.strategy, self.policy, self.sft, self.trainer = modules
        use_cpu()

    def start(self) -> None:
        """Build a model for each loss scaling, and one of bfloat16 logits."""
        super().start()
        self.policy_chunk = self.wrapped(per_token=False)
        self.policy_chunk.module.register_forward_hook(lambda model, args, out: out.bfloat16())

    def listen(self, report: Any) -> Any:
        """Listen to what the model returns, and in RLVR's ``agg_loss``."""
        row = weigh_rl.Reduction(_POLICY, "agg_loss", "loss_mat", "loss_mask")
        where = weigh_rl.Where(_STRATEGY, [row], sums_gradients=False)
        self.weighing_policy = weigh_rl._Weighing(where, sys.maxsize, report=report)
        self.policy.agg_loss = self._without_constants(self.policy.agg_loss)
        weigh_rl._listens(self.weighing_policy, row)
        self.weighing = super().listen(report)
        return self.weighing

    def _without_constants(self, agg_loss: Any) -> Any:
        """Return it for losses of which only those of a response have a gradient.

        The others are constants to ROLL too: it multiplies log-probabilities by this mask.
        """

        @functools.wraps(agg_loss)
        def aggregated(loss_mat: Tensor, *given: Any, **more: Any) -> Any:
            losses = torch.where(self.is_response, loss_mat, loss_mat.detach())
            return agg_loss(losses, *given, **more)

        return aggregated

    def install(self, aggregation: Aggregation) -> None:
        """Install mcore_adapter's hook."""
        from megatron_lossagg.integrations import mcore_adapter

        mcore_adapter.install(aggregation)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Train this rank's sequences in microbatches of two."""
        of_language = type(self).terms
        self.terms = of_language  # type: ignore[misc]
        if isinstance(trained, Aggregation) or trained.startswith(_TRAINER):
            return self._trainer_step(trained)
        if trained == _OF_SFT:
            worker = worker_of(self.sft.SFTWorker)
            self._strategy_step(worker, self.chunks[False], self.weighing, is_packed=False)
            return {}
        self.terms = self.of_policy  # type: ignore[misc]
        is_packed = trained.endswith(_PACKED)
        mode = trained.removeprefix(_MODE).removesuffix(_PACKED)
        self.weighing_policy.forget()
        self.weighing_policy.where = self.weighing_policy.where._replace(is_by_call=is_packed)
        worker = worker_of(self.policy.ActorWorker, loss_agg_mode=mode)
        self._strategy_step(worker, self.policy_chunk, self.weighing_policy, is_packed=is_packed)
        return {}

    def _strategy_step(self, worker: Any, chunk: Any, weighing: Any, *, is_packed: bool) -> None:
        """Run ROLL's strategy with a worker's loss function."""
        from megatron.core import parallel_state
        from roll.distributed.scheduler.protocol import DataProto

        rank, dp = parallel_state.get_data_parallel_rank(), self.parallelism.dp
        made = columns(self.drawn)
        names = {*_TEXTS} if worker.is_language else {*made} - {"labels"}
        part = {name: column.chunk(dp)[rank] for name, column in made.items() if name in names}
        keys = ["labels"] if worker.is_language else ["response_mask", "final_response_mask"]
        told = {"loss_mask_keys": keys, "is_offload_optimizer_states_in_train_step": False}
        m = len(part["input_ids"]) // _BATCH
        strategy = strategy_of(self.strategy, chunk, num_microbatches=m, is_packed=is_packed)
        strategy.forward_backward_func = weighing.wrap(self.strategy.get_forward_backward_func())
        strategy.worker_config, worker.strategy = worker.worker_config, strategy

        def loss_func(microbatch: Any, output: Tensor) -> Any:
            if not worker.is_language:
                self.is_response = microbatch.batch["response_mask"][:, 1:].bool()
            return worker.loss_func(microbatch, output)

        chunk.zero_grad_buffer()
        strategy.train_step(DataProto.from_dict(part, meta_info=told), loss_func)

    def _trainer_step(self, trained: str | Aggregation) -> Mapping[str, float]:
        """Run a step of mcore_adapter's trainer, and its log."""
        mine = self.mine()
        batches = []
        for at in range(0, len(mine), _BATCH):
            made = columns(mine[at : at + _BATCH])
            batches.append({name: made[name] for name in _TEXTS})
        per_token = trained == _PER_TOKEN
        with self.trained_by(trained):
            trainer = trainer_of(
                self.trainer.McaTrainer,
                self.chunks[per_token],
                batches=batches,
                calculate_per_token_loss=per_token,
            )
            _, metrics, *_ = trainer.training_step(trainer.models_wrapped, iter(batches), _WIDTH)
        return {"loss": float(trainer.gather_metrics(metrics)["loss"])}


class _Unmoved(Unchanging):
    """An optimizer whose states stay where they are."""

    def reload_states(self, **_: Any) -> None:
        """Do nothing."""


def worker_of(kind: Any, **given: Any) -> Any:
    """Return a worker of ROLL's with its loss function, and its configuration's defaults."""
    from roll.configs.worker_config import WorkerConfig
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    worker = object.__new__(kind)
    worker._logprobs_cache, worker.is_language = {}, not given
    worker.pipeline_config = defaults(
        RLVRConfig, use_kl_loss=True, kl_loss_coef=KL, entropy_loss_coef=ENTROPY, **given
    )
    worker.worker_config = defaults(
        WorkerConfig,
        name="actor_train",
        training_args=SimpleNamespace(per_device_train_batch_size=_BATCH),
        strategy_args=SimpleNamespace(strategy_config={}),
        logits_in_fp32=True,  # of entropy
    )
    return worker


def strategy_of(module: Any, chunk: Any, *, num_microbatches: int, is_packed: bool) -> Any:
    """Return ROLL's strategy around a wrapped model."""
    from mcore_adapter.models import model_factory
    from megatron.core import parallel_state

    cut = model_factory.PretrainedModel.get_batch_on_this_cp_rank
    chunk.module.get_batch_on_this_cp_rank = types.MethodType(cut, chunk.module)
    models = object.__new__(model_factory.VirtualModels)
    models.models, models.config = [chunk], chunk.config
    sizes = {"tp_size": 1, "cp_size": parallel_state.get_context_parallel_world_size()}
    strategy = object.__new__(module.MegatronTrainStrategy)
    vars(strategy).update(
        model=models,
        models_unwrapped=[chunk.module],
        enable_router_replay=False,
        use_sequence_packing=is_packed,
        worker=SimpleNamespace(rank_info=SimpleNamespace(**sizes)),
        is_multimodal=False,
        seq_length=_WIDTH,
        optimizer=_Unmoved(),
        scheduler=Unchanging(),
        megatron_train_args=SimpleNamespace(
            cross_entropy_loss_fusion=False, gradient_accumulation_steps=num_microbatches
        ),
    )
    return strategy


def columns(drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    """Return the columns of ROLL's batch; those of log-probabilities begin at the second token.

    Labels are moved to the logit that predicts them, as its collator does for Megatron.
    """
    tokens = torch.zeros(len(drawn), _WIDTH, dtype=torch.long)
    is_token = torch.zeros_like(tokens)
    for row, here, one in zip(tokens, is_token, drawn, strict=True):
        row[: len(one.tokens)], here[: len(one.tokens)] = one.tokens, 1
    mask = _of_responses(drawn, "mask").long()
    labels = tokens.where(mask == 1, IGNORED).roll(-1, 1)
    masks = {"response_mask": mask, "final_response_mask": mask[:, 1:].clone()}
    names = ("old_log_probs", "ref_log_probs", "advantages")
    values = {name: _of_responses(drawn, name)[:, 1:].contiguous() for name in names}
    texts = {"input_ids": tokens, "attention_mask": is_token, "labels": labels}
    return {**texts, **masks, **values}


def _of_responses(drawn: Sequence[Drawn], name: str) -> Tensor:
    """Put the value of each response token where the token is."""
    made = torch.zeros(len(drawn), _WIDTH)
    for row, one in zip(made, drawn, strict=True):
        values = torch.as_tensor(getattr(one, name)).float()
        row[len(one.tokens) - len(values) : len(one.tokens)] = values
    return made
