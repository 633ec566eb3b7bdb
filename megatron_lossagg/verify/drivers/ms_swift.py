"""ms-swift: ``train_step`` and the log of its Megatron trainer for SFT, on packed conversations.

Not run: the trainer's constructor, which loads a model, a tokenizer, its optimizer.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from megatron_lossagg.integrations._shared import replaced
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import Drawn, HookedDriver, Unchanging
from megatron_lossagg.verify.drivers.imports import defaults
from megatron_lossagg.verify.parallelism import Parallelism

_PER_MICROBATCH = "calculate_per_token_loss=false"


class SwiftDriver(HookedDriver):
    """One of ms-swift's trainers around a small GPT."""

    schedule = "swift.megatron.trainers.base"
    trainer_at: ClassVar[tuple[str, str]]
    """Module and name of the trainer."""

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        has_engine()
        module, name = self.trainer_at
        from megatron.core.models.common.embeddings import rope_utils

        own = {"_apply_rotary_pos_emb_thd": rope_utils._apply_rotary_pos_emb_thd}
        with replaced(rope_utils, **own):  # mcore-bridge's is for models of its own
            self.kind = getattr(importlib.import_module(module), name)

    def trainer(self, *, per_token: bool, **given: Any) -> Any:
        """Make the trainer without its constructor, with what that sets."""
        chunk = self.chunks[per_token]
        made = object.__new__(self.kind)
        vars(made).update(
            args=arguments(
                data_parallel_size=self.parallelism.dp,
                context_parallel_size=self.parallelism.cp,
                calculate_per_token_loss=per_token,
                **given,
            ),
            config=chunk.config,
            wrapped_models=[chunk],
            unwrapped_models=[chunk.module],
            optimizer=Unchanging(),
            opt_param_scheduler=Unchanging(),
            enable_routing_replay=False,
            state=SimpleNamespace(iteration=0),
        )
        return made

    def stepped(self, trained: str | Aggregation, trainer: Any, batches: Iterator[Any]) -> float:
        """Run a step; return the loss that the trainer logs."""
        with self.trained_by(trained):
            metrics, *_ = trainer.train_step(batches)
            logs: dict[str, Any] = {}
            trainer._aggregated_metrics(metrics, logs)
            trainer._log_callback(logs, logs.pop("n_steps"))
        return float(logs["loss"])


class FrameworkDriver(SwiftDriver):
    """``megatron sft``."""

    function = "swift.megatron.trainers.trainer.MegatronTrainer.train_step"
    trainer_at = "swift.megatron.trainers.trainer", "MegatronTrainer"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "the default": Aggregation("token_mean"),
        _PER_MICROBATCH: Aggregation("token_mean"),  # which its log has
    }

    def install(self, aggregation: Aggregation) -> None:
        """Install what a plugin calls."""
        from megatron_lossagg.integrations import ms_swift

        ms_swift.install(aggregation)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Train packs, which its collator makes."""
        packs = self.microbatches()
        trainer = self.trainer(
            per_token=trained == "the default",
            micro_batch_size=1,
            num_microbatches=len(packs),
            global_batch_size=len(packs) * self.parallelism.dp,
            packing=True,
        )
        from swift.megatron.utils import get_padding_to

        collator, width = template(trainer.args, packing=True), get_padding_to(trainer.args)
        rows = ([[*map(encoded, pack)]] for pack in packs)
        batches = (collator.data_collator(row, padding_to=width) for row in rows)
        return {"loss": self.stepped(trained, trainer, batches)}


def has_engine() -> None:
    """Let mcore-bridge find Transformer Engine's modules, of which nothing is made.

    Megatron-Core must have seen that there is none.
    """
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    for name, value in [*vars(engine).items()]:
        if value is None and name.startswith("TE"):
            setattr(engine, name, type(name, (), {}))
    hub: Any = importlib.import_module("modelscope.hub.utils.utils")
    hub.get_cache_dir = tempfile.gettempdir


def encoded(one: Drawn) -> dict[str, Any]:
    """Encode a sequence as ms-swift's templates do."""
    tokens = one.tokens.tolist()
    return {"input_ids": tokens, "labels": one.labels.tolist(), "length": len(tokens)}


def template(args: Any, *, packing: bool) -> Any:
    """Return ms-swift's template without a tokenizer: its collator."""
    from swift.template.base import Template

    class Collator(Template):  # type: ignore[misc]
        """The part of it that collates for Megatron."""

        is_training, use_megatron, task_type, mode = True, True, "causal_lm", "train"
        padding_side, remove_unused_columns, max_length = "right", True, None
        tokenizer = SimpleNamespace(pad_token_id=0)

    made = object.__new__(Collator)
    made.padding_free, made.packing = args.padding_free, packing
    made.sequence_parallel_size = args.context_parallel_size
    return made


def arguments(**given: Any) -> Any:
    """Return the defaults of ms-swift's arguments without their checks, and what is given."""
    from swift.megatron.arguments.megatron_args import MegatronArguments

    ours = {
        "padding_free": True,
        "task_type": "causal_lm",
        "seq_length": 64,
        "is_multimodal": False,
        "megatron_model_meta": SimpleNamespace(is_multimodal=False),
    }
    return SimpleNamespace(**{**vars(defaults(MegatronArguments)), **ours, **given})
