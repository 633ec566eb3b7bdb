"""ms-swift: the step of its Megatron trainer for GRPO, from encoded completions.

Not run: rollouts, rewards, and the advantages and log-probabilities that it computes before a step.
Its loss has the policy's and KL's as one term.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import CLIP, DIVISOR, DUAL_CLIP, KL, Drawn, column
from megatron_lossagg.verify.drivers.ms_swift import SwiftDriver, encoded, template
from megatron_lossagg.weigh.weighing import LOSS

_SIZE = 2
"""Completions of a microbatch."""


class FrameworkDriver(SwiftDriver):
    """``megatron rlhf --rlhf_type grpo``."""

    function = "swift.megatron.trainers.grpo_trainer.MegatronGRPOTrainer.train_step"
    trainer_at = "swift.megatron.trainers.grpo_trainer", "MegatronGRPOTrainer"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "loss_type=grpo": Aggregation("sample_mean"),
        "loss_type=bnpo": Aggregation("token_mean"),
        "loss_type=dapo": Aggregation("token_mean"),
        "loss_type=dr_grpo": Aggregation("constant", divisor=DIVISOR),
        "loss_type=cispo": Aggregation("token_mean"),
        "loss_type=sapo": Aggregation("sample_mean"),
    }
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {LOSS: ("pg", 1.0)}
    lacks = frozenset()

    def logged(self, name: str) -> Mapping[str, float]:
        """Return the terms of its loss."""
        return {"pg": 1.0, "kl": KL}

    def install(self, aggregation: Aggregation) -> None:
        """Install what a plugin calls."""
        from megatron_lossagg.integrations import ms_swift_grpo

        ms_swift_grpo.install(aggregation)

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen in its loss, which the integration calls by another name."""
        from megatron_lossagg.integrations import weigh_rl

        return weigh_rl.install(
            "ms-swift", steps=sys.maxsize, report=lambda step, number, _: report(step, number, LOSS)
        )

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Train the completions in microbatches of equal size."""
        own = self.mine()
        size = _SIZE if len(own) % _SIZE == 0 else 1
        trainer = self.trainer(
            per_token=False,
            rlhf_type="grpo",
            micro_batch_size=size,
            num_microbatches=len(own) // size,
            global_batch_size=len(self.drawn),
            loss_type=trained.partition("=")[2] if isinstance(trained, str) else "grpo",
            beta=KL,
            epsilon=CLIP,
            delta=DUAL_CLIP,
            num_generations=2,
            steps_per_generation=1,
            truncation_strategy=None,
            per_device_generation_batch_size=len(own),
            report_to=[],
        )
        trainer._init_grpo_params()
        vars(trainer).update(
            temperature=1.0,
            max_completion_length=DIVISOR,
            disable_rollout_importance_sampling=True,
            _has_teacher=False,
            _step=1,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _flush_log_completions=lambda: None,
            _replace_data_iterator=lambda iterator: iterator,
        )
        return {"loss": self.stepped(trained, trainer, self._batches(trainer, own, size))}

    def _batches(self, trainer: Any, own: Sequence[Drawn], size: int) -> Iterator[Any]:
        """Collate completions as it does, and give them what it computes before a step."""
        from megatron_lossagg.integrations.ms_swift_grpo import _PROMPT

        module: Any = importlib.import_module(self.trainer_at[0])
        collator = template(trainer.args, packing=False)
        tokens = float(sum(sum(one.mask) for one in self.drawn))
        for start in range(0, len(own), size):
            rows, samples = own[start : start + size], []
            for one in rows:
                samples.append(module.GRPOSample(messages=[], encoded=encoded(one)))
                setattr(samples[-1], _PROMPT, one.prompt)
            inputs, batch = module.collate_to_grpo_micro_batch(
                samples,
                collator,
                device=torch.device("cpu"),
                padding_to=module.get_padding_to(trainer.args),
            )
            width = batch.completion_mask.shape[1]
            starts = (width - batch.seq_lengths[: len(rows)]).tolist()  # sequences end rows
            ends = [start + len(one.tokens) - 1 for start, one in zip(starts, rows, strict=True)]
            batch.advantages = column([one.advantages for one in rows], ends, width)
            batch.old_per_token_logps = column([one.old_log_probs for one in rows], ends, width)
            batch.ref_per_token_logps = column([one.ref_log_probs for one in rows], ends, width)
            batch.num_items_in_batch = torch.tensor(tokens)
            yield {**inputs, "grpo_batch": batch}
