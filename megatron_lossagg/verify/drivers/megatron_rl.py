"""Megatron-LM: ``train_rl.py``, from rollouts through ``train_step``.

Its ``prepare_data_for_update`` and ``forward_step`` run. Not run: the engine that makes rollouts.
Old and reference log-probabilities and advantages are the drawn ones. The policy's loss and KL are
one term.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

from megatron_lossagg.cpu import training as cpu_training
from megatron_lossagg.integrations.megatron_rl import _SPLITS, RLIntegration
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import CLIP, KL, Drawn, HookedDriver, column
from megatron_lossagg.verify.drivers.imports import without_nvtx
from megatron_lossagg.verify.drivers.megatron_lm import (
    EOD,
    PAD,
    PER_TOKEN,
    begin,
    ended,
    train_step,
)
from megatron_lossagg.verify.drivers.runs import NotRunError
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.step_data import VOCABULARY
from megatron_lossagg.weigh.weighing import LOSS

_PACKED = "--rl-use-sequence-packing"
"""Without it a microbatch is one rollout, on the CPU: its rotary positions take no batch."""


class FrameworkDriver(HookedDriver):
    """A step of the script around a small GPT."""

    function = "megatron.training.training.train_step"
    schedule = "megatron.training.training"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "the default": Aggregation("token_mean"),  # which its log has
        PER_TOKEN: Aggregation("token_mean"),
        _PACKED: Aggregation("token_mean"),
        f"{_PACKED} {PER_TOKEN}": Aggregation("token_mean"),
    }
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {LOSS: ("pg", 1.0)}
    lacks = frozenset()
    dual_clip = None
    sample = "sample"

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, [of_one_advantage(ended(one)) for one in drawn])
        cpu_training._triton_while_importing()  # its imports ask for it again
        without_nvtx()
        self.script: Any = import_module("train_rl")
        self.utils: Any = import_module("megatron.rl.rl_utils")
        if parallelism.cp > 1 and not hasattr(self.utils, _SPLITS):
            raise NotRunError(
                "train_rl.py gives every context-parallel rank all tokens up to core_v0.19: pass "
                "--cp 1, or use a later Megatron-LM"
            )
        self.args = begin(
            parallelism,
            micro_batch_size=1,
            rl_sequence_packing_max_sequences_per_bin=4,
            rl_sequence_packing_algo="fifo",
            global_batch_size=len(drawn),
            grpo_prompts_per_step=1,
            grpo_group_size=len(drawn),
            grpo_clamp_eps_lower=CLIP,
            grpo_clamp_eps_upper=CLIP,
            grpo_kl_beta=KL,
            grpo_entropy_term_weight=0.0,
            curr_iteration=0,
        )
        tokenizer = SimpleNamespace(
            pad=PAD, eod=EOD, bos=None, vocab_size=VOCABULARY, library="null-text",
            detokenize=lambda tokens: " ".join(map(str, tokens)),
        )  # fmt: skip
        vars(import_module("megatron.training.global_vars"))["_GLOBAL_TOKENIZER"] = tokenizer

    def start(self) -> None:
        """Build the models, which are called as in Megatron's ``Float16Module``."""
        super().start()
        for chunk in self.chunks.values():
            forward = chunk.module.forward
            chunk.module.forward = lambda *args, forward=forward, fp32_output=True, **kwargs: (
                forward(*args, **kwargs)
            )

    def logged(self, name: str) -> Mapping[str, float]:
        """Return the terms of its loss."""
        return {"pg": 1.0, "kl": KL}

    def install(self, aggregation: Aggregation) -> None:
        """Install the hook of ``lossagg run``."""
        from megatron_lossagg.integrations import megatron_lm

        megatron_lm.install(aggregation, integration=RLIntegration())

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Prepare the rollouts and run ``train_step``, as the loop does."""
        own = trained if isinstance(trained, str) else ""
        chunk, self.args.rl_use_sequence_packing = self.chunks[PER_TOKEN in own], _PACKED in own
        with self.trained_by(trained) as get_schedule:
            batches = [*self._batches(chunk)]
            return train_step(self.script.forward_step, iter(batches), chunk, get_schedule())

    def _batches(self, chunk: Any) -> Iterator[Any]:
        """Prepare the rollouts of all ranks, and give each batch what was drawn."""
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import (
            get_num_microbatches,
            reconfigure_num_microbatches_calculator,
        )
        from megatron.training import get_tokenizer

        given: dict[str, Any] = {"request_ledger": {}}
        known = inspect.signature(self.utils.prepare_data_for_update).parameters
        prepared = self.utils.prepare_data_for_update(
            model=[chunk],
            ref_state_dict=chunk.state_dict(),
            rollouts=[
                [self._rollout([*turns]) for _, turns in groupby(group, lambda one: one.sample)]
                for _, group in groupby(self.drawn, lambda one: one.prompt)
            ],
            tokenizer=get_tokenizer(),
            sequence_packing=self.args.rl_use_sequence_packing,
            is_correction=False,
            **{name: value for name, value in given.items() if name in known},
        )
        iterator = prepared[0] if isinstance(prepared, tuple) else prepared
        if self.args.rl_use_sequence_packing:  # its batches are numbers of bins
            yield from (next(iterator) for _ in range(get_num_microbatches()))
            return
        dp, rank = self.parallelism.dp, parallel_state.get_data_parallel_rank()
        samples = [*dict.fromkeys(one.sample for one in self.drawn)]
        size = len(samples) // dp
        own = [one for one in self.drawn if one.sample in samples[rank * size :][:size]]
        # Its own number counts rollouts, and leaves turns for the next step.
        reconfigure_num_microbatches_calculator(0, None, len(own) * dp, 1, dp)
        for one in own:
            batch, ends = next(iterator), [len(one.tokens) - 1]
            batch[1] = one.advantages[:1].float()
            batch[2] = column([one.old_log_probs], ends, batch[2].shape[1])
            batch[5] = column([one.ref_log_probs], ends, batch[5].shape[1])
            yield batch

    def _rollout(self, turns: Sequence[Drawn]) -> Any:
        """Return a rollout."""
        try:
            rollout = import_module("megatron.rl.agent.api").TokenRollout
        except (ImportError, AttributeError):  # after 0.19
            rollout = import_module("megatron.rl.types.rollout").TokenRollout
        masks = [one.token_mask.bool().tolist() for one in turns]
        takes = inspect.signature(self.utils.prepare_trajectories).parameters
        logprobs = [None if "rollouts" in takes else [0.0] * sum(mask) for mask in masks]
        turns_of_ids = [one.tokens.tolist() for one in turns]
        return made(rollout, turns_of_ids, masks, logprobs, float(turns[0].advantages[0]))


def made(
    rollout: Any,
    turns: Sequence[list[int]],
    masks: Sequence[list[bool]],
    logprobs: Sequence[list[float] | None],
    reward: float,
) -> Any:
    """Return a rollout of Megatron-LM's class; later releases ask for epochs too."""
    return rollout.model_construct(
        trajectory=turns,
        reward=reward,
        generation_mask=masks,
        logprobs=logprobs,
        env_id="drawn",
        completion_ids=[],
        rollout_status="ok",
        failure_reason=None,
        generation_cap=None,
        policy_epoch=[[(0, 0)] for _ in turns],
        kv_cache_epoch=[[(0, 0)] for _ in turns],
        num_evictions=[0 for _ in turns],
    )


def of_one_advantage(one: Drawn) -> Drawn:
    """Give all tokens of a sequence the first one's advantage."""
    return replace(one, advantages=one.advantages[:1].expand_as(one.advantages))
