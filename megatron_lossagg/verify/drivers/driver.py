"""What a driver is: a framework's own step on the drawn batch, weighed, and its reference.

The batch of all drivers: twelve sequences, the losses of their tokens, and the modes. Samples split
into several sequences, fully masked ones, and a prompt with no active tokens.

The model is a small GPT in Megatron-Core's DistributedDataParallel, on gloo. Each sequence's losses
by the reference are computed from the unsplit model in float64, its weight by loops over tokens
(``reference_loss.py``). What a framework trains is read at its losses: nothing of it is replaced.

:class:`HookedDriver`: of a framework that looks up Megatron's schedule, and trains a loss per
token. Weighing wraps the schedule and hears the losses that the model returns; a mode of ours is
trained by the framework's integration, which wraps the schedule too.
"""

from __future__ import annotations

import math
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lossagg.integrations._shared import HOOK, replaced
from megatron_lossagg.integrations.weigh_script import ScriptWeighing, rebind_schedule
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import MASK_CASES, reference_options
from megatron_lossagg.verify.drivers.runs import FrameworkError
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.step_data import VOCABULARY
from megatron_lossagg.weigh.weighing import LOSS

_SAMPLES, _PER_PROMPT, _SPLIT, _MASKED = 8, 2, (1, 6), (2, 4, 5)
"""Samples 4 and 5 are all of prompt 2."""
IGNORED = -100
"""The label of a token without a loss, as torch's cross entropy has it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """One sequence: a prompt and a response, whose tokens have losses."""

    tokens: Tensor
    mask: list[int]
    """Of the response."""
    sample: int
    prompt: int
    advantages: Tensor
    """Float64, as both log-probabilities, of the response."""
    old_log_probs: Tensor
    ref_log_probs: Tensor

    @property
    def token_mask(self) -> Tensor:
        """1 for each token that has a loss, of the prompt and the response."""
        return torch.tensor([0] * (len(self.tokens) - len(self.mask)) + self.mask)

    @property
    def labels(self) -> Tensor:
        """The tokens that have a loss, and ``IGNORED``."""
        return self.tokens.where(self.token_mask == 1, IGNORED)


def draw(*, edges: bool = True) -> list[Drawn]:
    """Draw the twelve sequences.

    ``edges``: whether two samples are split into three, and three are fully masked. Without, each
    sequence is a sample.
    """
    drawn: list[Drawn] = []
    lengths = random.Random(11)
    for sample in range(_SAMPLES):
        for _ in range(3 if sample in _SPLIT else 1):
            number = sample if edges else len(drawn)
            n, prompt_length = lengths.choice([4, 5, 9, 14]), lengths.randint(1, 6)
            mask = [int(lengths.random() < 0.8) for _ in range(n)]
            mask[-1] = 1
            generator = torch.Generator().manual_seed(len(drawn))
            tokens = torch.randint(0, VOCABULARY, (prompt_length + n,), generator=generator)
            advantages, old, ref = (
                torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(3)
            )
            drawn.append(
                Drawn(
                    tokens=tokens,
                    mask=[0] * n if edges and sample in _MASKED else mask,
                    sample=number,
                    prompt=number // (_PER_PROMPT if edges else 3),  # not of a microbatch
                    advantages=advantages,
                    old_log_probs=-3.4 + 0.1 * old,
                    ref_log_probs=-3.4 + 0.1 * ref,
                )
            )
    return drawn


def ppo_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute PPO's clipped losses per token: arXiv 1707.06347 eq. 7, 1912.09729 eq. 5.

    ::

        x = -min(r A, clamp(r, 1 - clip, 1 + clip) A);  where A < 0: x = min(x, -dual_clip A)
    """
    ratio = (log_probs - old_log_probs).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def kl_losses(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute the k3 estimate per token."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1


def aggregations() -> dict[str, Aggregation]:
    """Name the aggregations of one term that need no microbatches and groups."""
    made = {
        str(case): case.aggregation
        for case in MASK_CASES
        if case.second is None
        and case.aggregation.mode not in ("microbatch_token_mean", "balanced")
    }
    return {**made, "token_sum": Aggregation("token_sum", divisor=3.0)}


def column(values: Sequence[Any], ends: Sequence[int], width: int) -> Tensor:
    """Stack values of each sequence's response, each row's before its end; zeros elsewhere."""
    made = torch.zeros(len(ends), width)
    for row, end, given in zip(made, ends, values, strict=True):
        row[end - len(given) : end] = torch.as_tensor(given)
    return made


KL, ENTROPY, CLIP, DUAL_CLIP = 0.31, 0.053, 0.2, 3.0
DIVISOR = 40.0
"""L of ``constant``."""

Weights = list[tuple[int, float]]
"""Active tokens of each sequence that has some, and a token's weight; sorted."""


class Driver(ABC):
    """A framework's own step; one in a process.

    Making one imports the framework, before there are process groups; what it raises is said as a
    missing module, or as the framework's own failure.
    """

    function: ClassVar[str]
    """The framework's function that is run, by its dotted path."""
    settings: ClassVar[Mapping[str, Aggregation]]
    """Its own settings, the default first, and what the name of each promises."""
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {
        "pg_loss": ("pg", 1.0),
        "kl_loss": ("kl", KL),
        "entropy_loss": ("entropy", -ENTROPY),
    }
    """Of each term that is weighed: what it is in :func:`losses_of`, and its coefficient."""
    follow: ClassVar[frozenset[str]] = frozenset(("pg", "kl", "penalty", "entropy", "nll"))
    """The terms that a mode of ours weighs."""
    sample: ClassVar[str] = "number"
    """What a sample is: each sequence (``number``), or all of a rollout (``sample``)."""
    lacks: ClassVar[frozenset[str]] = frozenset()
    """Modes that its integration refuses."""
    dual_clip: ClassVar[float | None] = DUAL_CLIP
    """Of its policy loss; None if it has none."""
    tolerance: ClassVar[float] = 1e-5
    """Relative, of weights and losses; frameworks count in float32."""
    float32: ClassVar[bool] = True
    per_token: ClassVar[bool] = False
    """Whether the framework trains in the per-token loss scaling."""

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        self.parallelism, self.drawn = parallelism, drawn

    def start(self) -> None:
        """Build the model; Megatron's groups are there."""
        self.chunk = self.wrapped(per_token=self.per_token)

    def mine(self) -> Sequence[Drawn]:
        """Return this data-parallel rank's sequences."""
        from megatron.core import parallel_state

        return self.drawn[parallel_state.get_data_parallel_rank() :: self.parallelism.dp]

    def wrapped(self, *, per_token: bool) -> Any:
        """Return a small GPT in DistributedDataParallel."""
        from megatron_lossagg.verify import small_gpt

        config = small_gpt.config_of(self.parallelism, per_token=per_token)
        return small_gpt.wrapped_chunks(self.parallelism, config)[0]

    @abstractmethod
    def listen(self, report: Any) -> ScriptWeighing:
        """Install weighing for every step and return it; ``report`` gets each term, on rank 0."""

    def prepare(self, trained: str | Aggregation) -> Any:
        """Do what the framework does in a process of its own, before there are process groups.

        ``trained``: a setting of its own, by name, or a mode of ours.
        """
        return None

    @abstractmethod
    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Run a step; return what the framework logs, by names of ``terms``.

        ``loss`` is all of them.
        """

    def logged(self, name: str) -> Mapping[str, float]:
        """Return the terms of what is logged under a name, and their coefficients there."""
        if name in self.terms:
            return {self.terms[name][0]: 1.0}
        return dict(self.terms.values())

    @classmethod
    def trains(cls, aggregation: Aggregation) -> bool:
        """Whether its integration has a mode."""
        return aggregation.mode not in cls.lacks


def word_tokenizer() -> Any:
    """Make a tokenizer of Transformers', whose words are token ids; the last one pads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    last = str(VOCABULARY - 1)
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=Tokenizer(models.WordLevel(words, last)),
        pad_token=last,
        padding_side="right",
    )


class Unchanging:
    """An optimizer that changes no weight, and its schedule."""

    param_groups: Sequence[Any] = ({},)

    def zero_grad(self) -> None:
        """Do nothing."""

    def step(self, increment: int = 0) -> tuple[bool, float, int]:
        """Do nothing, well."""
        return True, 0.0, 0


@dataclass(frozen=True)
class Reference:
    """Losses and weights of the drawn batch, in float64."""

    drawn: Sequence[Drawn]
    sample: str
    losses: Mapping[str, Sequence[Sequence[Tensor]]]
    """Of each term: of each sequence its response's losses."""

    def weights(self, aggregation: Aggregation) -> Weights:
        """Return the weight of a token of each sequence that is not fully masked."""
        leaves = [torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in self.drawn]
        losses = [[leaf] * len(one.mask) for leaf, one in zip(leaves, self.drawn, strict=True)]
        self._loss(aggregation, losses).backward()  # type: ignore[no-untyped-call]
        pairs = [
            (n, leaf.grad.item() / n)
            for leaf, one in zip(leaves, self.drawn, strict=True)
            if (n := sum(one.mask)) and leaf.grad is not None
        ]
        return sorted(pairs)

    def loss(self, aggregation: Aggregation, terms: Mapping[str, float]) -> float:
        """Return the step's loss: of each term times its coefficient."""
        return math.fsum(
            c * self._loss(aggregation, self.losses[term]).item() for term, c in terms.items()
        )

    def _loss(self, aggregation: Aggregation, losses: Sequence[Sequence[Tensor]]) -> Tensor:
        sequences = [
            {
                "x": list(x),
                "counted": one.mask,
                "trained": one.mask,
                "sample": number if self.sample == "number" else one.sample,
                "prompt": one.prompt,
            }
            for number, (one, x) in enumerate(zip(self.drawn, losses, strict=True))
        ]
        options = reference_options(aggregation, [])
        return reference_loss.step_loss(aggregation.mode, sequences, **options)


def reference_of(driver: Driver) -> Reference:
    """Compute the reference, on each rank by itself."""
    from megatron_lossagg.verify.small_gpt import reference_model

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            found = [*_losses(reference_model(driver.parallelism.shape), driver)]
    finally:
        torch.set_default_dtype(default)
    losses = {term: [list(one[term].unbind()) for one in found] for term in found[0]}
    return Reference(driver.drawn, driver.sample, losses)


def _losses(model: Any, driver: Driver) -> Iterator[dict[str, Tensor]]:
    """Compute the losses of each sequence's response, by term."""
    for one in driver.drawn:
        n = len(one.mask)
        logits = model(one.tokens[None], torch.arange(len(one.tokens))[None], None)[0, -n - 1 : -1]
        log_p = torch.log_softmax(logits.double(), -1)
        x = log_p.gather(1, one.tokens[-n:, None])[:, 0]
        old, advantages, dual_clip = one.old_log_probs, one.advantages, driver.dual_clip
        policy = ppo_losses(x, old, advantages, clip=CLIP, dual_clip=dual_clip)
        yield {
            "nll": -x,
            "pg": policy,
            "kl": kl_losses(x, one.ref_log_probs),
            "penalty": KL * kl_losses(x, one.ref_log_probs),
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }


_SIZES = (1, 2, 3)
"""Sequences of a rank's microbatches, over and over."""


class HookedDriver(Driver):
    """A loop whose module looks up the schedule by its name."""

    schedule: ClassVar[str]
    """The module."""
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {LOSS: ("nll", 1.0)}
    lacks = frozenset(("prompt_mean",))  # its data has no prompts

    def start(self) -> None:
        """Build a model for each loss scaling."""
        self.chunks = {one: self.wrapped(per_token=one) for one in (False, True)}

    def microbatches(self) -> list[list[Drawn]]:
        """Return this rank's sequences, as microbatches of unequal sizes."""
        return cut(self.mine())

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen to what the model returns."""
        weighing = ScriptWeighing(1, sys.maxsize, stop=False, report=report)
        rebind_schedule(self.schedule, weighing, expected=f"a loop of {self.function}")
        return weighing

    @contextmanager
    def trained_by(self, trained: str | Aggregation) -> Iterator[Any]:
        """Rebind the schedule for a step of a mode of ours; give what looks it up."""
        module = import_module(self.schedule)
        with replaced(module, **{HOOK: getattr(module, HOOK)}):
            if isinstance(trained, Aggregation):
                self.install(trained)
            yield getattr(module, HOOK)

    @abstractmethod
    def install(self, aggregation: Aggregation) -> None:
        """Install the framework's integration."""


def loss_of(returned: Sequence[Any]) -> dict[str, float]:
    """Return the loss that a ``train_step`` of Megatron's logs, from what it returns.

    Raises :class:`FrameworkError` if it logs none.
    """
    logged, _, _, ends, exit_code, *_ = returned
    if ends:
        raise FrameworkError(
            f"got exit code {exit_code} from train_step and no loss: after the first step it ends "
            "a run whose loss is NaN or infinite; run only this setting or mode to see its weights"
        )
    if "lm loss" not in logged:
        raise FrameworkError(f"got {[*logged]} in the log of train_step, expected 'lm loss'")
    return {"loss": float(logged["lm loss"])}


def packed(drawn: Sequence[Drawn], *, multiple: int) -> dict[str, Tensor]:
    """Put sequences into one pack, each padded to a multiple: flat tensors, and offsets."""
    columns: dict[str, list[int]] = {"tokens": [], "labels": [], "loss_mask": [], "positions": []}
    offsets = [0]
    for one in drawn:
        tokens, n = one.tokens.tolist(), len(one.tokens) - 1
        padding = [0] * (-n % multiple)
        columns["tokens"] += tokens[:-1] + padding
        columns["labels"] += tokens[1:] + padding
        columns["loss_mask"] += one.token_mask[1:].tolist() + padding
        columns["positions"] += range(n + len(padding))
        offsets.append(offsets[-1] + n + len(padding))
    made = {name: torch.tensor(values) for name, values in columns.items()}
    return {**made, "offsets": torch.tensor(offsets, dtype=torch.int32)}


def cut(drawn: Sequence[Drawn]) -> list[list[Drawn]]:
    """Cut a rank's sequences into microbatches of unequal sizes."""
    left, made, sizes = list(drawn), [], cycle(_SIZES)
    while left:
        size = next(sizes)
        made.append(left[:size])
        left = left[size:]
    return made
