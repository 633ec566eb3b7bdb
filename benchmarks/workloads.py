"""The microbatches that are measured: uneven sequences, multi-turn holes, eight samples per prompt.

Every sequence is a sample: a prompt of some tokens, then a response whose tokens carry losses.
Response lengths are lognormal (sigma 0.6, capped at four times their mean); the masks of 60 %
of the sequences have holes, as the tool outputs of a multi-turn rollout leave them. Lengths, masks
and losses are drawn from fixed seeds.

Shape suffixes: S = sequences; P = mask positions, all responses packed; T = tokens that this
context-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg import Aggregation, Layout, Sequences, StepPlan, plan_step

SIGMA = 0.6
LONGEST = 4.0
SHARE_WITH_HOLES = 0.6
SAMPLES_PER_PROMPT = 8

AGGREGATION = Aggregation("sample_mean")
TOKEN_MEAN = Aggregation("token_mean")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One microbatch as one context-parallel rank sees it."""

    name: str
    num_sequences: int
    mean_tokens: int
    cp_size: int = 1
    cp_rank: int = 0
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.name} CP {self.cp_size}"

    @cached_property
    def response_S(self) -> npt.NDArray[np.int64]:
        """Response tokens of each sequence."""
        random = np.random.default_rng(self.seed)
        mu = np.log(self.mean_tokens) - SIGMA**2 / 2
        drawn = random.lognormal(mu, SIGMA, self.num_sequences)
        return np.clip(drawn, 1, LONGEST * self.mean_tokens).astype(np.int64)

    @cached_property
    def total_S(self) -> npt.NDArray[np.int64]:
        """Prompt and response tokens of each sequence."""
        random = np.random.default_rng(self.seed + 1)
        longest = max(2, self.mean_tokens // 8)
        return self.response_S + random.integers(1, longest, self.num_sequences)

    @cached_property
    def masks(self) -> list[Tensor]:
        """One int32 0/1 mask ``[response]`` per sequence."""
        random = np.random.default_rng(self.seed + 2)
        masks = []
        for n in self.response_S.tolist():
            mask = np.ones(n, dtype=np.int32)
            if random.random() < SHARE_WITH_HOLES:
                for _ in range(random.integers(1, 4)):
                    start = int(random.integers(0, n))
                    mask[start : start + max(1, n // 8)] = 0
            masks.append(torch.from_numpy(mask))
        return masks

    @cached_property
    def mask_P(self) -> Tensor:
        """All masks packed, int32."""
        return torch.cat(self.masks)

    @cached_property
    def active_S(self) -> list[int]:
        """Active tokens of each sequence."""
        return [int(mask.sum()) for mask in self.masks]

    @cached_property
    def prompt_S(self) -> list[int]:
        """Id of each sequence's prompt."""
        return [i // SAMPLES_PER_PROMPT for i in range(self.num_sequences)]

    @cached_property
    def denominators(self) -> list[Tensor]:
        """One 0-dim tensor per sample: its active tokens over all context-parallel ranks."""
        return list(torch.tensor(self.active_S).unbind())

    @property
    def divisor(self) -> float:
        """L of the constant mode."""
        return LONGEST * self.mean_tokens

    @property
    def constant(self) -> Aggregation:
        """The constant mode over L."""
        return Aggregation("constant", divisor=self.divisor)

    @cached_property
    def plan(self) -> StepPlan:
        """A step of this microbatch only."""
        return plan_step(AGGREGATION, self.sequences)

    @property
    def sequences(self) -> Sequences:
        """The microbatch as it is given to ``plan_step``."""
        return Sequences(active_tokens=self.active_S, prompt=self.prompt_S)

    @cached_property
    def num_local_tokens(self) -> int:
        """Number of tokens that this rank holds."""
        return self.layout().num_local_tokens

    def layout(self) -> Layout:
        """Describe this rank's tokens."""
        return Layout.response_zigzag(
            self.total_S, self.response_S, cp_size=self.cp_size, cp_rank=self.cp_rank
        )

    @cached_property
    def x_T(self) -> Tensor:
        """This rank's per-token losses, fp32."""
        generator = torch.Generator().manual_seed(self.seed + 3)
        return torch.randn(self.num_local_tokens, generator=generator, requires_grad=True)


SIZES = {"A": (64, 1024), "B": (512, 512), "C": (4096, 128), "D": (32, 32768)}
CP_SIZES = (1, 8)


def workloads(names: Sequence[str] = tuple(SIZES)) -> list[Workload]:
    """Return the four microbatches at CP 1 and CP 8."""
    return [
        Workload(name=name, num_sequences=SIZES[name][0], mean_tokens=SIZES[name][1], cp_size=cp)
        for name in names
        for cp in CP_SIZES
    ]
