"""open-instruct: ``step`` of ``grpo_fast.py``'s trainer, and ``finetune.py``'s ``main``.

A small Llama of Transformers' in torch's DistributedDataParallel: Accelerate's own of
``finetune.py``; in place of DeepSpeed's engine, which averages over ranks as it does, of
``grpo_fast.py``. Not run: Ray, vLLM, what loads models and data, an optimizer, sequence
parallelism, which is DeepSpeed's. The model's mean over labels is torch's cross entropy; it is
taken apart into token losses where it is called.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megatron_lossagg.integrations._shared import replaced
from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import DIVISOR, IGNORED, Drawn, Driver, word_tokenizer
from megatron_lossagg.verify.drivers.imports import defaults
from megatron_lossagg.verify.drivers.runs import NotRunError
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.step_data import VOCABULARY
from megatron_lossagg.weigh.weighing import Weighing

_BATCH = 2
"""Sequences of a microbatch."""
_GRPO = "grpo_fast.py --loss_denominator "
_FINETUNE = "finetune.py"


class FrameworkDriver(Driver):
    """open-instruct's loops around a small Llama."""

    function = "open_instruct.grpo_fast.PolicyTrainerRayProcess.step"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        f"{_GRPO}token": Aggregation("token_mean"),
        f"{_GRPO}{DIVISOR:g}": Aggregation("token_sum", divisor=DIVISOR),
        _FINETUNE: Aggregation("token_mean"),
    }
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {"loss": ("pg", 1.0)}

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        if parallelism.cp > 1:
            raise NotRunError(
                f"got --cp {parallelism.cp} with open-instruct, expected --cp 1: its sequence "
                "parallelism is DeepSpeed's, which needs GPUs"
            )
        import open_instruct.finetune as finetune
        import open_instruct.grpo_fast as grpo_fast

        self.finetune: Any = finetune
        self.grpo_fast: Any = grpo_fast

    def start(self) -> None:
        """Build no model of Megatron's."""

    def listen(self, report: Any) -> ScriptWeighing:
        """Weigh each step by itself, of a model of its own: there is no schedule."""
        self.report = report
        return ScriptWeighing(1, 1, stop=False, report=report)

    @classmethod
    def trains(cls, aggregation: Aggregation) -> bool:
        """Raise :class:`NotRunError`: there is no integration."""
        raise NotRunError(
            f"got {aggregation.mode} for open-instruct, which has no integration: "
            "examples/open_instruct.py trains it under DDP"
        )

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Run a step of one of its two scripts."""
        if isinstance(trained, Aggregation):
            self.trains(trained)
            return {}
        self.step = _Step()
        if trained == _FINETUNE:
            with suppress(_StepIsOver):
                self._finetune()
        else:
            self._grpo(trained.removeprefix(_GRPO))
        for term, weighed in self.step.weighing.terms().items():
            if torch.distributed.get_rank() == 0:
                self.report(weighed, 1, term)
        return {}

    def _grpo(self, loss_denominator: str) -> None:
        """Run a step of ``grpo_fast.py``, one packed row of two sequences a microbatch."""
        mine, module = self.mine(), self.grpo_fast
        packs = [mine[at : at + _BATCH] for at in range(0, len(mine), _BATCH)]
        process = trainer_process(module, self.step, len(packs), loss_denominator)
        process.dataloader = iter([{"batch": collated(packs), "metrics": {}}])
        masked_mean = module.masked_mean

        @functools.wraps(masked_mean)
        def heard(values: Tensor, mask: Tensor, *given: Any, **more: Any) -> Any:
            if values.requires_grad:
                lengths = [len(one.tokens) for one in packs[self.step.microbatches]]
                lengths[0] -= 1  # the first token of a row has no loss
                values = self.step.losses(values, mask, lengths=lengths)
            return masked_mean(values, mask, *given, **more)

        with replaced(module, masked_mean=heard):
            process.step()

    def _finetune(self) -> None:
        """Run ``finetune.py`` to its first step of the optimizer."""
        module, step = self.finetune, self.step
        folder = tempfile.mkdtemp()
        args = module.FlatArguments(
            model_name_or_path="small",
            dataset_mixer_list=["drawn", "1.0"],
            output_dir=folder,
            per_device_train_batch_size=_BATCH,
            gradient_accumulation_steps=len(self.drawn) // _BATCH // self.parallelism.dp,
            num_train_epochs=1,
            push_to_hub=False,
            try_launch_beaker_eval_jobs=False,
            with_tracking=False,
            seed=3,
        )

        class Accelerator(module.Accelerator):  # type: ignore[misc, name-defined]
            """Accelerate's, whose model is weighed."""

            def prepare(self, *given: Any, **more: Any) -> Any:
                """Prepare, and begin to listen."""
                made = super().prepare(*given, **more)
                step.begin(made[0])
                return made

        tokenizer = SimpleNamespace(
            tokenizer=word_tokenizer(),
            tokenizer_name_or_path="small",
            tokenizer_revision=None,
            trust_remote_code=False,
        )
        config = SimpleNamespace(from_pretrained=lambda *_, **__: None)
        model = SimpleNamespace(from_pretrained=lambda *_, **__: small_llama())
        names: dict[str, Any] = {
            "Accelerator": Accelerator,
            "AutoConfig": config,
            "AutoModelForCausalLM": model,
            "get_cached_dataset_tulu": lambda **_: _Rows(self.drawn),
            "deepspeed": SimpleNamespace(zero=SimpleNamespace(GatheredParameters=_nothing)),
            "snapshot_download": lambda *_, **__: None,
            "visualize_token": lambda *_: None,
            "pprint": lambda *_: None,
        }
        os.environ["ACCELERATE_USE_CPU"] = "true"
        with replaced(module, **names), step.cross_entropy(), step.ends_at_the_optimizer():
            module.main(args, tokenizer)


def _nothing(*_: Any, **__: Any) -> Any:
    return nullcontext()


class _StepIsOver(Exception):  # noqa: N818  nothing failed
    """The optimizer is about to take its first step."""


class _Step:
    """One step that is weighed, of a model in torch's DistributedDataParallel."""

    def __init__(self) -> None:
        self.microbatches = 0

    def begin(self, model: Any) -> None:
        """Listen from now on."""
        self.weighing = Weighing(model)
        self.weighing.__enter__()

    def end(self) -> None:
        """Listen no more."""
        self.weighing.__exit__(None, None, None)

    def losses(self, losses: Tensor, mask: Tensor, **more: Any) -> Tensor:
        """Hear a microbatch."""
        self.microbatches += 1
        return self.weighing.losses(losses, mask, **more)

    @contextmanager
    def cross_entropy(self) -> Iterator[None]:
        """Hear the token losses of torch's cross entropy, whose mean is their sum over labels."""
        functional, stock = torch.nn.functional, torch.nn.functional.cross_entropy

        def heard(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
            if more.pop("reduction") != "mean" or more.pop("ignore_index") != IGNORED or more:
                raise NotRunError(f"got a cross entropy with {more}, expected a mean over labels")
            losses = stock(logits, labels, ignore_index=IGNORED, reduction="none")
            is_label = labels != IGNORED
            shape = (_BATCH, -1)
            losses = self.losses(losses.view(shape), is_label.view(shape))
            return losses[is_label.view(shape)].mean()

        with replaced(functional, cross_entropy=heard):
            yield

    @contextmanager
    def ends_at_the_optimizer(self) -> Iterator[None]:
        """End the step, and the loop, where the optimizer would change weights."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def over(*_: Any) -> None:
            self.end()
            raise _StepIsOver

        handle = register_optimizer_step_pre_hook(over)
        try:
            yield
        finally:
            handle.remove()


class _Engine:
    """DeepSpeed's engine as ``grpo_fast.py`` calls it; gradients are DDP's mean over ranks."""

    def __init__(self, step: _Step) -> None:
        self._step, self._model = step, DistributedDataParallel(small_llama())
        step.begin(self._model)

    def __call__(self, **given: Any) -> Any:
        """Run the model."""
        return self._model(**given, use_cache=False)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Take the mean over ranks in each backward pass: of sums it is the same."""

    def backward(self, loss: Tensor) -> None:
        """Add gradients; this script's DeepSpeed does not divide by the accumulation's steps."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """End the step; change no weight."""
        self._step.end()

    def get_global_grad_norm(self) -> float:
        """Return any number."""
        return 1.0


class _Rows(torch.utils.data.Dataset[Any]):
    """The drawn sequences as ``finetune.py``'s data set."""

    def __init__(self, drawn: Sequence[Drawn]) -> None:
        self._drawn = drawn

    def __len__(self) -> int:
        return len(self._drawn)

    def __getitem__(self, number: int) -> dict[str, Any]:
        one = self._drawn[number]
        return {"input_ids": one.tokens.tolist(), "labels": one.labels.tolist()}

    def shuffle(self, seed: int) -> _Rows:
        """Return it as it is; the loader shuffles."""
        return self

    def set_format(self, **_: Any) -> None:
        """Do nothing."""


def small_llama() -> Any:
    """Build Transformers' Llama, small, alike on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attn_implementation="eager",
        )
    )


def trainer_process(module: Any, step: _Step, samples: int, loss_denominator: str) -> Any:
    """Return ``grpo_fast.py``'s trainer of a rank, without its reference policy."""
    import torch.distributed as dist
    from open_instruct.utils import MetricsTracker

    kind = module.PolicyTrainerRayProcess
    kind = getattr(getattr(kind, "__ray_metadata__", None), "modified_class", kind)
    process = object.__new__(kind)
    args = defaults(
        module.grpo_utils.GRPOExperimentConfig,
        loss_denominator=loss_denominator,
        load_ref_policy=False,
        world_size=dist.get_world_size(),
    )
    vars(process).update(
        args=args,
        splitter=None,
        device=torch.device("cpu"),
        num_mini_batches=args.num_mini_batches,
        model=_Engine(step),
        pad_token_id=VOCABULARY,
        streaming_config=SimpleNamespace(temperature=1.0),
        rank=dist.get_rank(),
        local_metrics=MetricsTracker(max_metrics=512, device="cpu"),
        scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
    )
    return process


def collated(packs: Sequence[Sequence[Drawn]]) -> Any:
    """Return the batch of ``grpo_fast.py``: a row for each pack."""
    from open_instruct.data_types import CollatedBatchData

    def rows(of: Any) -> list[Tensor]:
        return [torch.cat([torch.as_tensor(of(one)) for one in pack])[None] for pack in packs]

    def of_response(name: str) -> Any:
        def padded(one: Drawn) -> Tensor:
            value = torch.as_tensor(getattr(one, name)).float()
            return torch.cat([torch.zeros(len(one.tokens) - len(value)), value])

        return padded

    return CollatedBatchData(
        query_responses=rows(lambda one: one.tokens),
        attention_masks=rows(lambda one: torch.ones(len(one.tokens), dtype=torch.long)),
        position_ids=rows(lambda one: torch.arange(len(one.tokens))),
        advantages=rows(of_response("advantages")),
        response_masks=[row.bool() for row in rows(of_response("mask"))],
        vllm_logprobs=rows(of_response("old_log_probs")),
    )
