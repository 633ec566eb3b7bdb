"""ROLL: ``train_step`` of its Megatron strategy, for RLVR and SFT, and mcore_adapter's trainer.

Both are around a small GPT whose logits are bfloat16 in RLVR: with float32 logits ROLL computes
log-probabilities in place, and entropy of what is left. Not run: Ray, what loads a model, an
optimizer, pinned memory.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.drawn import Drawn
from megatron_lossagg.verify.drivers.driver import ENTROPY, KL, Driver
from megatron_lossagg.verify.parallelism import Parallelism

_STRATEGY = "roll.distributed.strategy.megatron_strategy"
_WORKER = "roll.pipeline.rlvr.actor_worker"
_TRAINER = "mcore_adapter.trainer.trainer"
_WIDTH, _BATCH = 24, 2
"""Of a padded sequence; sequences of a microbatch."""
_MODE, _SFT, _MCA = "loss_agg_mode: ", "the SFT pipeline", "mcore_adapter"
_PER_TOKEN, _PACKED = f"{_MCA}, calculate_per_token_loss", ", use_sequence_packing"
_POLICY: Mapping[str, tuple[str, float]] = {
    "weighted_pg_loss": ("pg", 1.0),
    "kl_loss": ("kl", KL),
    "entropy_loss": ("entropy", -ENTROPY),
}
_LANGUAGE: Mapping[str, tuple[str, float]] = {"loss": ("nll", 1.0)}


class FrameworkDriver(Driver):
    """ROLL's strategy, or mcore_adapter's trainer, around a small GPT."""

    function = f"{_STRATEGY}.MegatronTrainStrategy.train_step"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        f"{_MODE}seq-mean-token-mean": Aggregation("sample_mean"),
        f"{_MODE}token-mean": Aggregation("token_mean"),
        f"{_MODE}seq-mean-token-sum": Aggregation("sample_sum"),
        f"{_MODE}seq-mean-token-sum-norm": Aggregation("constant", divisor=_WIDTH - 1),
        f"{_MODE}seq-mean-token-sum-norm{_PACKED}": Aggregation("constant", divisor=_WIDTH - 1),
        _SFT: Aggregation("token_mean"),
        _MCA: Aggregation("token_mean"),
        _PER_TOKEN: Aggregation("token_mean"),
    }
    terms: ClassVar[Mapping[str, tuple[str, float]]] = _LANGUAGE
    lacks = frozenset(("prompt_mean",))

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
        os.environ.setdefault("ROLL_LOG_DIR", tempfile.mkdtemp())  # made when it is imported
        roll = find_spec("roll")
        for package in () if roll is None else roll.submodule_search_locations or ():
            sys.path.append(str(Path(package).parent / "mcore_adapter" / "src"))
        self.strategy = importlib.import_module(_STRATEGY)
        self.worker = importlib.import_module(_WORKER)
        self.sft = importlib.import_module("roll.pipeline.sft.sft_worker")
        self.trainer = importlib.import_module(_TRAINER)
        factory: Any = importlib.import_module("mcore_adapter.models.model_factory")
        factory.torch = _Pinless()
        self.of_factory = factory

    def start(self) -> None:
        """Build a model for each loss scaling."""
        self.chunks = {one: self.wrapped(per_token=one) for one in (False, True)}
        for chunk in self.chunks.values():
            cut = self.of_factory.PretrainedModel.get_batch_on_this_cp_rank
            chunk.module.get_batch_on_this_cp_rank = types.MethodType(cut, chunk.module)
            chunk.module.main_input_name = "input_ids"
            chunk.module.register_forward_hook(_in_bfloat16, with_kwargs=True)

    def listen(self, report: Any) -> None:
        """Weigh each step anew: settings are trained by different loops."""
        from megatron_lossagg.integrations import weigh_rl

        self.report = report
        row = weigh_rl.Reduction(_WORKER, "agg_loss", "loss_mat", "loss_mask")
        where = weigh_rl.Where(_STRATEGY, [row], sums_gradients=False)
        self.of_policy = weigh_rl._Weighing(where, sys.maxsize, report=report)
        self.worker.agg_loss = self._without_constants(self.worker.agg_loss)
        weigh_rl._listens(self.of_policy, row)

    def _without_constants(self, agg_loss: Any) -> Any:
        """Return it for losses of which the response's have a gradient.

        The others are constants to ROLL too, whose log-probabilities are multiplied by this mask.
        """

        @functools.wraps(agg_loss)
        def aggregated(loss_mat: Tensor, *given: Any, **more: Any) -> Any:
            return agg_loss(torch.where(self.responses, loss_mat, loss_mat.detach()), *given, **more)

        return aggregated

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Train this rank's sequences in microbatches of two."""
        from megatron_lossagg.integrations.weigh_script import ScriptWeighing

        is_policy = isinstance(trained, str) and trained.startswith(_MODE)
        self.terms = _POLICY if is_policy else _LANGUAGE  # type: ignore[misc]
        language = ScriptWeighing(1, 1, stop=False, report=self.report)
        if isinstance(trained, Aggregation) or trained.startswith(_MCA):
            return self._trainer_step(trained, language)
        if trained == _SFT:
            return self._strategy_step(self.sft.SFTWorker, "", language)
        mode = trained.removeprefix(_MODE)
        self.of_policy._before = {}  # of another setting
        self.of_policy.where = self.of_policy.where._replace(is_by_call=mode.endswith(_PACKED))
        return self._strategy_step(self.worker.ActorWorker, mode, self.of_policy)

    def _strategy_step(self, kind: Any, mode: str, weighing: Any) -> Mapping[str, float]:
        """Run ROLL's strategy with a worker's loss function."""
        from megatron.core import parallel_state
        from roll.distributed.scheduler.protocol import DataProto

        chunk = self.chunks[False]
        worker = worker_of(kind, mode.removesuffix(_PACKED))
        strategy = strategy_of(self.strategy, chunk, is_packed=mode.endswith(_PACKED))
        worker.strategy, strategy.worker_config = strategy, worker.worker_config
        strategy.model = self._models(chunk, [chunk])
        strategy.forward_backward_func = weighing.wrap(self.strategy.get_forward_backward_func())
        columns, keys = policy_columns(self.drawn), ["response_mask", "final_response_mask"]
        if kind is self.sft.SFTWorker:
            columns, keys = language_columns(self.drawn), ["labels"]
        told = {"loss_mask_keys": keys, "is_offload_optimizer_states_in_train_step": False}
        data = DataProto.from_dict(columns, meta_info=told)
        part = data.chunk(self.parallelism.dp)[parallel_state.get_data_parallel_rank()]

        def loss_func(microbatch: Any, output: Tensor) -> Any:
            if "response_mask" in microbatch.batch:
                self.responses = microbatch.batch["response_mask"][:, 1:].bool()
            return worker.loss_func(microbatch, output)

        chunk.zero_grad_buffer()
        strategy.train_step(part, loss_func)
        return {}

    def _trainer_step(self, trained: str | Aggregation, weighing: Any) -> Mapping[str, float]:
        """Run a step of mcore_adapter's trainer, and its log."""
        from megatron.core import parallel_state

        from megatron_lossagg.integrations import mcore_adapter
        from megatron_lossagg.integrations._refusals import replaced

        chunk = self.chunks[trained == _PER_TOKEN]
        dp_rank, dp = parallel_state.get_data_parallel_rank(), self.parallelism.dp
        rows = {name: one.chunk(dp)[dp_rank] for name, one in language_columns(self.drawn).items()}
        parts = zip(*(one.split(_BATCH) for one in rows.values()), strict=True)
        batches = [dict(zip(rows, part, strict=True)) for part in parts]
        stock, kind = self.trainer.get_forward_backward_func, self.trainer.McaTrainer
        trainer = trainer_of(kind, chunk, per_token=trained == _PER_TOKEN)
        trainer.model = self._models(chunk, [chunk.module])
        with (
            replaced(self.trainer, get_forward_backward_func=lambda: weighing.wrap(stock())),
            replaced(kind, metrics_keys=kind.metrics_keys),
        ):
            if isinstance(trained, Aggregation):
                mcore_adapter.install(trained)
            trainer.forward_backward_func = self.trainer.get_forward_backward_func()
        loss, *_ = trainer.training_step([chunk], iter(batches), _WIDTH)
        # As the log: a mean over data-parallel ranks, or of both sums.
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return {"loss": float(loss[0] / loss[1] if loss.dim() else loss / dp)}

    def _models(self, chunk: Any, models: list[Any]) -> Any:
        """Return mcore_adapter's list of a model's chunks."""
        made = object.__new__(self.of_factory.VirtualModels)
        made.models, made.config = models, chunk.config
        return made


class _Pinless:
    """torch, whose tensors are not pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *given: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        """Make a tensor."""
        return torch.tensor(*given, **more)


class _Nothing:
    """An optimizer, a scheduler: changes no weight."""

    def step(self) -> tuple[bool, float, int]:
        """Do nothing, well."""
        return True, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _in_bfloat16(model: Any, args: Any, given: Mapping[str, Any], output: Tensor) -> Tensor:
    """Return logits as a bfloat16 model does; losses as they are."""
    return output.bfloat16() if given.get("labels") is None else output


def defaults(kind: Any, **given: Any) -> Any:
    """Return a configuration of ROLL's with its own defaults, but for what is given."""
    made = object.__new__(kind)
    for one in fields(kind):
        if one.default is not MISSING or one.default_factory is not MISSING:
            default = one.default_factory() if one.default is MISSING else one.default
            setattr(made, one.name, given.get(one.name, default))
    return made


def worker_of(kind: Any, mode: str) -> Any:
    """Return a worker of ROLL's with its loss function."""
    from roll.configs.worker_config import WorkerConfig
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    worker = object.__new__(kind)
    worker._logprobs_cache = {}
    worker.pipeline_config = defaults(
        RLVRConfig, loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=KL, entropy_loss_coef=ENTROPY
    )
    worker.worker_config = defaults(
        WorkerConfig,
        training_args=SimpleNamespace(per_device_train_batch_size=_BATCH),
        strategy_args=SimpleNamespace(strategy_config={}),
        logits_in_fp32=True,  # of entropy
    )
    worker.worker_config.name = "actor_train"
    return worker


def strategy_of(module: Any, chunk: Any, *, is_packed: bool) -> Any:
    """Return ROLL's strategy around a wrapped model."""
    from megatron.core import parallel_state

    sizes = {"tp_size": 1, "cp_size": parallel_state.get_context_parallel_world_size()}
    strategy = object.__new__(module.MegatronTrainStrategy)
    vars(strategy).update(
        models_unwrapped=[chunk.module],
        enable_router_replay=False,
        use_sequence_packing=is_packed,
        worker=SimpleNamespace(rank_info=SimpleNamespace(**sizes)),
        is_multimodal=False,
        seq_length=_WIDTH,
        optimizer=_Nothing(),
        scheduler=_Nothing(),
        megatron_train_args=SimpleNamespace(
            cross_entropy_loss_fusion=False,
            gradient_accumulation_steps=12
            // _BATCH
            // parallel_state.get_data_parallel_world_size(),
        ),
    )
    return strategy


def trainer_of(kind: Any, chunk: Any, *, per_token: bool) -> Any:
    """Return mcore_adapter's trainer around a wrapped model."""
    from megatron.core import parallel_state

    trainer = object.__new__(kind)
    vars(trainer).update(
        args=SimpleNamespace(
            gradient_accumulation_steps=12
            // _BATCH
            // parallel_state.get_data_parallel_world_size(),
            per_device_train_batch_size=_BATCH,
            device=torch.device("cpu"),
            calculate_per_token_loss=per_token,
            sequence_packing=False,
        ),
        model_impl="transformer_engine",  # whose causal attention takes no mask
        optimizer=_Nothing(),
        lr_scheduler=_Nothing(),
        state=SimpleNamespace(global_step=0),
    )
    return trainer


def _column(drawn: Sequence[Drawn], of: str, *, shift: int) -> Tensor:
    """Put each response token's value where the token is, or ``shift`` before it."""
    made = torch.zeros(len(drawn), _WIDTH)
    for row, one in zip(made, drawn, strict=True):
        end = len(one.tokens) - shift
        value = torch.as_tensor(getattr(one, of)).float()
        row[end - len(value) : end] = value
    return made


def _tokens(drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    tokens = torch.zeros(len(drawn), _WIDTH, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, here, one in zip(tokens, mask, drawn, strict=True):
        row[: len(one.tokens)], here[: len(one.tokens)] = one.tokens, 1
    return {"input_ids": tokens, "attention_mask": mask}


def policy_columns(drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    """Return the columns of ROLL's RLVR batch; those of losses begin at the second token."""
    mask = _column(drawn, "mask", shift=0).long()
    of_losses = {
        name: _column(drawn, field, shift=1)[:, :-1]
        for name, field in (
            ("old_log_probs", "old_log_probs"),
            ("ref_log_probs", "ref_log_probs"),
            ("advantages", "advantages"),
        )
    }
    masks = {"response_mask": mask, "final_response_mask": mask[:, 1:].clone()}
    return {**_tokens(drawn), **masks, **of_losses}


def language_columns(drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    """Return the columns of an SFT batch; labels are moved to the logit that predicts them."""
    labels = torch.full((len(drawn), _WIDTH), -100)
    for row, one in zip(labels, drawn, strict=True):
        for place, is_in in enumerate(one.mask, len(one.tokens) - len(one.mask)):
            row[place - 1] = one.tokens[place] if is_in else -100
    return {**_tokens(drawn), "labels": labels}
