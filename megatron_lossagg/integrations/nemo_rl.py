"""token_mean, sample_mean, constant and sums in an unmodified NeMo-RL, in your own ``run_grpo.py``.

``setup`` returns the loss function, ``grpo_train`` takes it; between them::

    loss_fn = aggregated(loss_fn, Aggregation("constant", divisor=40960))

So do ``sft_train`` (negative log-likelihood), ``distillation_train`` (one KL per token) and
``ppo_train``, which takes a value loss too. The single controller's loss function is
``actor_args.loss_fn``; pass ``split_steps=True``.

NeMo-RL divides by its own counts in the loss function, so that partial losses add up::

    loss = sum_s w_s sum_t m_t x_t

The wrapped loss function is called once per sequence, as NeMo-RL's own wrapper for packed
sequences does. Each sequence's loss is multiplied by its count and by w_s. Metrics keep their
normalizers. Afterwards NeMo-RL divides by CP and multiplies by M / CP, Megatron multiplies by
CP / M, DDP sums, and finalize divides by nothing. Every context-parallel rank has whole sequences.
NeMo-RL itself scales MoE and MTP losses, by 1 / N; nothing here touches them.

The single controller's split steps pass 1 for both counts and multiply the gradient by 1 / N or
1 / B when the step is finished, whichever ``loss_type`` says. Here it says what the mode divides
by, and each sequence's loss is multiplied by w_s N or w_s B, which need no count of the step.

A sequence whose ``sample_mask`` is 0 is in none of NeMo-RL's counts, and in none of ours; give
``samples_per_step`` to count such sequences too. A mask that is not 0 or 1 is refused. Sources:
NeMo-RL 7ea279ab ``ClippedPGLossFn``, ``NLLLossFn``, ``MseValueLossFn``, ``DistillationLossFn``,
``SequencePackingLossWrapper``, ``process_global_batch``, ``finish_train_step``, ``masked_mean``,
``AllGatherCPTensor``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations._shared import announce, not_a_mask
from megatron_lossagg.integrations.weigh_rl import Reduction, Where, weigh_if_asked
from megatron_lossagg.loop.step import say_counted, say_empty
from megatron_lossagg.reduction.aggregation import Aggregation, require_mask_count
from megatron_lossagg.reduction.integers import is_integer
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.table import StepTotals
from megatron_lossagg.weigh.listen import tell

_MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "token_sum")
_OF_A_SPLIT_STEP = {
    "token_mean": ("TOKEN_LEVEL", "TOKENS"),
    "sample_mean": ("SEQUENCE_LEVEL", "SEQUENCES"),
    "constant": ("SEQUENCE_LEVEL", "SEQUENCES"),
    "sample_sum": ("SEQUENCE_LEVEL", "SEQUENCES"),
}
"""Modes that divide by N or B, which split steps know in the end: NeMo-RL's names of the two."""
_VALUE_LOSS = "MseValueLossFn"
_OF_WHOLE_STEPS = (_VALUE_LOSS, "DistillationLossFn")
"""Losses that the single controller does not train."""
_LOSSES = ("ClippedPGLossFn", "NLLLossFn", *_OF_WHOLE_STEPS)
_OF_THE_BATCH = ("prompt_mean", "length_power")
"""Modes that need more of the step than NeMo-RL's counts: the trainer plans them."""
_PATCH = "docs/integrations/patches/nemo-rl-prompt-mean.patch"
_EPSILON = 1e-8
"""What NeMo-RL's ``masked_mean`` adds to a divisor."""
_LIKE_THE_LOSS = ("loss", "kl_penalty")
"""Metrics that NeMo-RL aggregates like the gradient."""
_EXTREMA = ("_min", "_max")

HEARD = Where(
    "nemo_rl.models.megatron.train",
    [Reduction("nemo_rl.algorithms.loss.loss_functions", "masked_mean", "values", None)],
    sums_gradients=True,
    has_names=False,
    is_by_call=True,
)
"""The function by which its terms are weighed."""


def aggregated(
    loss_fn: Any,
    aggregation: Aggregation | None,
    *,
    samples_per_step: int | None = None,
    weights_in_data: bool = False,
    split_steps: bool = False,
    policy: Mapping[str, Any] | None = None,
) -> Any:
    """Wrap NeMo-RL's loss of a policy, of SFT, of values or of distillation for its trainers.

    ``None`` keeps NeMo-RL's own weights, which ``LOSSAGG_WEIGH=1`` shows.
    ``split_steps``: the single controller trains, which no argument of the loss tells before its
    first call. ``policy``: ``master_config.policy``, to warn of
    losses in it that stay NeMo-RL's. ``weights_in_data``: the patch of
    ``docs/integrations/patches`` is applied, so that the trainer calls
    :meth:`AggregatedLoss.weights_of`; prompt_mean and length_power need it, whose prompts and
    lengths of the step NeMo-RL passes no loss function.
    ``samples_per_step``: B, if sequences with ``sample_mask`` 0 are to count as well:
    ``policy.train_global_batch_size``. Raises :class:`AggregationError` for a mode or an option of
    the loss that cannot be aggregated here.
    """
    if aggregation is None:
        return PassedLoss(loss_fn)
    require_mask_count(aggregation, "NeMo-RL")
    _check_mode(aggregation, samples_per_step, weights_in_data)
    _check_loss(loss_fn, weights_in_data)
    if split_steps:
        _check_split_steps(loss_fn, aggregation, samples_per_step, weights_in_data)
    if aggregation.mode != "token_mean":
        _warn_of_other_losses(policy or {})
    return AggregatedLoss(loss_fn, aggregation, samples_per_step, weights_in_data, split_steps)


def _check_mode(
    aggregation: Aggregation, samples_per_step: int | None, weights_in_data: bool
) -> None:
    if aggregation.mode not in _MODES and not (
        weights_in_data and aggregation.mode in _OF_THE_BATCH
    ):
        raise AggregationError(
            f"got {aggregation}, and NeMo-RL gives a loss function no prompts, no lengths of other "
            f"samples and no microbatches: choose one of {', '.join(_MODES)}; for "
            f"{' and '.join(_OF_THE_BATCH)} apply {_PATCH} and pass weights_in_data=True"
        )
    if samples_per_step is not None and not (
        aggregation.count_empty and is_integer(samples_per_step, lowest=1)
    ):
        raise AggregationError(
            f"got samples_per_step {samples_per_step!r} with {aggregation}, expected an integer "
            "from 1, and empty samples counted: drop samples_per_step or count_empty=False"
        )


def _check_loss(loss_fn: Any, weights_in_data: bool) -> None:
    if not _is_one_of(loss_fn, *_LOSSES):
        raise AggregationError(
            f"got a loss function {type(loss_fn).__name__}, expected NeMo-RL's "
            f"{', '.join(_LOSSES)} or a subclass: wrap what setup() returns"
        )
    if weights_in_data and not _is_one_of(loss_fn, "ClippedPGLossFn"):
        raise AggregationError(
            f"got weights_in_data=True with {type(loss_fn).__name__}, but {_PATCH} is of GRPO's "
            "trainer: drop it"
        )
    if getattr(loss_fn, "positive_example_nll_weight", 0):
        raise AggregationError(
            "positive_example_nll_weight adds a mean over each microbatch's correct samples, which "
            "no weights of the step can be: set loss_fn.positive_example_nll_weight to 0"
        )


def _warn_of_other_losses(policy: Mapping[str, Any]) -> None:
    layers = {"MTP": ("megatron_cfg", "mtp_num_layers"), "draft": ("draft", "enabled")}
    kept = [loss for loss, (part, name) in layers.items() if (policy.get(part) or {}).get(name)]
    if kept:
        warnings.warn(
            f"the {' and '.join(kept)} loss stays NeMo-RL's mean over the step's tokens, whatever "
            "the aggregation",
            RuntimeWarning,
            stacklevel=3,
        )


def _is_one_of(loss_fn: Any, *names: str) -> bool:
    return any(kind.__name__ in names for kind in type(loss_fn).__mro__)


def _check_split_steps(
    loss_fn: Any, aggregation: Aggregation, samples_per_step: int | None, weights_in_data: bool
) -> None:
    if aggregation.mode not in _OF_A_SPLIT_STEP or _is_one_of(loss_fn, *_OF_WHOLE_STEPS):
        raise AggregationError(
            f"got split_steps=True with {aggregation} and {type(loss_fn).__name__}, but a split "
            "step divides policy losses by the tokens or the samples that it has trained: choose "
            f"one of {', '.join(_OF_A_SPLIT_STEP)}, or train with grpo_train"
        )
    if samples_per_step is not None or weights_in_data:
        raise AggregationError(
            "got split_steps=True with samples_per_step or weights_in_data, but a split step "
            "divides by the samples that it has trained: drop them, or train with grpo_train"
        )
    if aggregation.mode != "token_mean":
        warnings.warn(
            f"under {aggregation.mode} a split step divides the losses that a model adds, MoE, MTP "
            "and draft, by the step's samples, while grpo_train divides them by its tokens: lower "
            "their coefficients, or train with grpo_train",
            RuntimeWarning,
            stacklevel=3,
        )


class PassedLoss:
    """A loss function that the trainer passes to its workers, as it is.

    A worker is asked to weigh by its environment, and listens before the loss function is called:
    where it is unpickled.
    """

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        weigh_if_asked("nemo-rl")

    def __getattr__(self, name: str) -> Any:
        """Return what NeMo-RL asks of a loss before it calls it: the wrapped loss's."""
        if name == "loss_fn" or name.startswith("__"):  # not set yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.loss_fn, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss function's value and metrics."""
        return self.loss_fn(*args, **kwargs)


@dataclass(eq=False)
class AggregatedLoss(PassedLoss):
    """A NeMo-RL ``LossFunction``: another one's losses of each sequence under our weights."""

    loss_fn: Any
    aggregation: Aggregation
    samples_per_step: int | None = None
    weights_in_data: bool = False
    split_steps: bool = False

    def __post_init__(self) -> None:
        """Say by what NeMo-RL is to divide a split step's gradient and metrics."""
        if self.split_steps:
            level, normalizer = _OF_A_SPLIT_STEP[self.aggregation.mode]
            own = self.loss_fn.metric_normalizations
            follow = {name: type(own[name])[normalizer] for name in _LIKE_THE_LOSS if name in own}
            self.loss_type = type(self.loss_fn.loss_type)[level]
            self.metric_normalizations = {**own, **follow}

    def __call__(
        self,
        *next_token_logprobs: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **arguments: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return this microbatch's partial loss and its metrics.

        ``next_token_logprobs``: ``[b, s - 1]``, whole sequences, or in ``arguments`` a value loss's
        ``logits`` ``[b, s]``, or log-probabilities of a teacher's k tokens, ``[b, s - 1, k]``; the
        fields of ``data`` have b sequences. ``global_valid_seqs``,
        ``global_valid_toks``: counts of the step, B without the sequences whose ``sample_mask`` is
        0, and N; 1 and 1 of a split step. No collective; host syncs for masks and counts,
        and those of the wrapped loss per sequence. Raises :class:`PlanError` on this rank only for
        a mask that is not 0 or 1.
        """
        announce("NeMo-RL", self.aggregation)
        is_of_values = _is_one_of(self.loss_fn, _VALUE_LOSS)
        n_b, sample_mask = _counts_of(data, is_of_values=is_of_values)
        if self.weights_in_data:
            if "loss_weights" not in data:
                raise ContractError(
                    f"weights_in_data=True, and the batch has no loss_weights: apply {_PATCH} to "
                    "NeMo-RL"
                )
            weight_b = data["loss_weights"].tolist()
        else:
            weight_b = self._weights(n_b, sample_mask, global_valid_seqs, global_valid_toks)
        losses: list[Tensor] = []
        metrics: dict[str, Any] = {}
        tokens = n_b.tolist()
        divisor_b = self._divisors(n_b, global_valid_seqs, global_valid_toks).tolist()
        for sequence, (weight, divisor) in enumerate(zip(weight_b, divisor_b, strict=True)):
            sequence_loss, of_sequence = self.loss_fn(
                *(one[sequence : sequence + 1] for one in next_token_logprobs),
                data=_sequence_of(data, sequence, len(n_b)),
                global_valid_seqs=global_valid_seqs,
                global_valid_toks=global_valid_toks,
                **_sequence_of(arguments, sequence, len(n_b)),
            )
            factor = weight * divisor
            losses.append(sequence_loss * factor)
            for name in of_sequence.keys() & _LIKE_THE_LOSS:
                of_sequence[name] = float(of_sequence[name] * factor)
            if any(tokens) and not tokens[sequence]:  # 0 is the extremum of no value at all
                of_sequence = {k: v for k, v in of_sequence.items() if not k.endswith(_EXTREMA)}
            _add(metrics, of_sequence)
        if not losses:  # no sequence: 0, with a gradient
            losses = [next(iter((*next_token_logprobs, *arguments.values()))).sum()]
        return torch.stack(losses).sum(), metrics

    def weights_of(self, data: Any, *, sequences_per_step: int, samples_per_prompt: int) -> Tensor:
        """Plan all steps of a batch in the trainer; returns w_s, float64 ``[sequences]``.

        ``data``: the whole batch, each prompt's samples together, each ``sequences_per_step``
        sequences one optimizer step. Sequences whose ``sample_mask`` is 0 are in no count. No
        collective. Raises :class:`PlanError` for a mask that is not 0 or 1 and, under
        ``prompt_mean``, for a batch whose prompts are not whole in their step.
        """
        n_S, sample_mask = _counts_of(data)
        # waits before the step: counts
        n_S, is_sequence_S = n_S.to("cpu", torch.int64), (sample_mask != 0).cpu()
        if self.aggregation.mode == "prompt_mean":
            _check_prompts(len(n_S), sequences_per_step, samples_per_prompt)
        weight_S = torch.zeros(len(n_S), dtype=torch.float64)
        for start in range(0, len(n_S), sequences_per_step):
            sequences = torch.arange(start, min(start + sequences_per_step, len(n_S)))
            sequences = sequences[is_sequence_S[sequences]]
            counts = Sequences(active_tokens=n_S[sequences], prompt=sequences // samples_per_prompt)
            weight_S[sequences] = say_counted(plan_step(self.aggregation, counts)).weights
        return weight_S

    def _weights(
        self, n_b: Tensor, sample_mask: Tensor, valid_seqs: Tensor, valid_toks: Tensor
    ) -> list[float]:
        """Plan one microbatch from NeMo-RL's counts of the step; w_s, 0 where sample_mask is."""
        samples = _count("global_valid_seqs", valid_seqs)
        tokens = _count("global_valid_toks", valid_toks)
        is_sequence_b = (sample_mask != 0).cpu()  # waits before the step
        if self.split_steps:
            if (samples, tokens) != (1, 1):
                raise ContractError(
                    f"split_steps=True, and NeMo-RL passes a step's counts, {samples} and "
                    f"{tokens}: drop it, or train with the single controller"
                )
            samples, tokens = int(is_sequence_b.sum()), int(n_b.sum())
            if not tokens:
                return [0.0] * len(n_b)
        if self.samples_per_step is not None:
            if samples > self.samples_per_step:
                raise PlanError(
                    f"NeMo-RL counts {samples} samples in the step, and samples_per_step is "
                    f"{self.samples_per_step}: give policy.train_global_batch_size"
                )
            samples = self.samples_per_step
        lengths = n_b.to("cpu", torch.int64)[is_sequence_b]
        masked = int((lengths == 0).sum())
        if masked and not self.aggregation.count_empty:
            raise PlanError(
                f"{masked} sequences have sample_mask 1 and no active tokens: NeMo-RL counts them, "
                f"and {self.aggregation} does not. Set their sample_mask to 0 (loss_multiplier), "
                "or count empty samples"
            )
        say_empty(self.aggregation, masked, "their loss_multiplier 0")
        weight_b = torch.zeros(len(n_b), dtype=torch.float64)
        try:
            plan = plan_step(
                self.aggregation,
                Sequences(active_tokens=lengths),
                totals=StepTotals(active_tokens=tokens, samples=samples, active_samples=samples),
            )
        except PlanError as error:
            raise ContractError(
                f"{error}. NeMo-RL's split training steps pass 1 for the step's counts and divide "
                "after the loss: pass split_steps=True, or train with grpo_train's own steps"
            ) from error
        tell(plan, None, torch.where(is_sequence_b, is_sequence_b.cumsum(0) - 1, -1))
        weight_b[is_sequence_b] = (plan if self.split_steps else say_counted(plan)).weights
        if self.split_steps:  # of the microbatch so far; NeMo-RL divides by the step's count
            level, _ = _OF_A_SPLIT_STEP[self.aggregation.mode]
            weight_b *= tokens if level == "TOKEN_LEVEL" else samples
        weights: list[float] = weight_b.tolist()
        return weights

    def _divisors(self, n_b: Tensor, valid_seqs: Tensor, valid_toks: Tensor) -> Tensor:
        """What the wrapped loss has divided each sequence's sum by."""
        if self.loss_fn.loss_type.value == "token_level":
            return (valid_toks + _EPSILON).expand(len(n_b))
        return (n_b + _EPSILON) * (valid_seqs + _EPSILON)


def _counts_of(data: Any, *, is_of_values: bool = False) -> tuple[Tensor, Tensor]:
    """Count each sequence's active tokens, 0 where ``sample_mask`` is; a host sync per mask.

    NeMo-RL counts from the second token on, and a value loss trains the first one's value too.
    """
    token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
    if is_of_values and bool((data["token_mask"][:, 0] * sample_mask).any()):
        raise PlanError(
            "got a token_mask that is 1 at a sequence's first token, which the value loss trains "
            "and NeMo-RL does not count: set token_loss_mask to 0 there"
        )
    remedies = {"token_mask": "token_loss_mask", "sample_mask": "loss_multiplier"}
    for (name, source), mask in zip(remedies.items(), (token_mask, sample_mask), strict=True):
        if bool(((mask != 0) & (mask != 1)).any()):
            change = f"make {source} 0 or 1, and scale advantages to weigh a sample"
            raise not_a_mask(name, change)
    return (token_mask * sample_mask[:, None]).sum(-1), sample_mask


def _count(name: str, value: Tensor) -> int:
    """Read one of NeMo-RL's counts of the step; one host sync."""
    count = float(value)
    if count != int(count):
        raise PlanError(
            f"got {name} {count:g}, expected an integer, the sum of 0/1 masks: make "
            "loss_multiplier of each sample 0 or 1"
        )
    return int(count)


def _check_prompts(num_sequences: int, sequences_per_step: int, samples_per_prompt: int) -> None:
    """Refuse a batch in which a prompt is cut short, or continues in the next optimizer step."""
    cut = num_sequences % samples_per_prompt
    if cut or (num_sequences > sequences_per_step and sequences_per_step % samples_per_prompt):
        raise PlanError(
            f"got {num_sequences} sequences in optimizer steps of {sequences_per_step} with "
            f"{samples_per_prompt} samples per prompt, expected whole prompts in each step: make "
            "policy.train_global_batch_size a multiple of grpo.num_generations_per_prompt"
        )


def _sequence_of(data: Any, sequence: int, num_sequences: int) -> Any:
    if num_sequences == 1:
        return data
    if hasattr(data, "slice"):
        return data.slice(sequence, sequence + 1)
    return {
        name: value[sequence : sequence + 1] if isinstance(value, Tensor) and value.dim() else value
        for name, value in data.items()
    }


def _add(metrics: dict[str, Any], of_sequence: dict[str, Any]) -> None:
    """Combine a sequence's metrics: extrema by name, as NeMo-RL does; all others are sums."""
    for name, value in of_sequence.items():
        if name not in metrics:
            metrics[name] = value
        elif name.endswith("_min"):
            metrics[name] = min(metrics[name], value)
        elif name.endswith("_max"):
            metrics[name] = max(metrics[name], value)
        else:
            metrics[name] = metrics[name] + value
