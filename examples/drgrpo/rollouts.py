"""Rollouts: sample them, write them, read them back strictly.

A rollout is one line of ``rollouts.jsonl``, and what is trained on is exactly what the
line holds (log-probabilities are rounded before training, not after), so a replay of the
file repeats the run that wrote it.

Shape suffixes: B = rollouts; T = tokens, prompt and response; R = tokens of the longest
response; V = vocabulary.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import task
import torch
from torch import Tensor

_DECIMALS = 5


class RolloutFileError(ValueError):
    """A malformed file of rollouts; the message names file, line and fault."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response to one prompt, with everything that the loss needs."""

    step: int
    """RL step that trains on it, from 1."""
    prompt_id: int
    """Equal for all rollouts of one prompt, different between prompts of a step."""
    prompt: str
    response: str
    response_tokens: list[int]
    mask: list[int]
    """1 where a response token is trained on, else 0."""
    reward: float
    advantage: float
    """Reward minus the mean reward of the prompt's rollouts; Dr.GRPO divides by no deviation."""
    behaviour_logprobs: list[float]
    """Of each response token under the weights that sampled it."""
    reference_logprobs: list[float]
    """The same under the reference weights of the KL term."""

    def __post_init__(self) -> None:
        """Check what a line of a file may have wrong."""
        num_tokens = len(self.response_tokens)
        most = task.MAX_PROMPT_TOKENS + task.MAX_RESPONSE_TOKENS
        lengths = {len(self.mask), len(self.behaviour_logprobs), len(self.reference_logprobs)}
        numbers = [self.reward, self.advantage, *self.behaviour_logprobs, *self.reference_logprobs]
        right = {
            "step from 1": isinstance(self.step, int) and self.step >= 1,
            "integer prompt_id": isinstance(self.prompt_id, int),
            "prompt": self.prompt != "",
            f"prompt of characters of {task.ALPHABET!r}": {*self.prompt} <= {*task.ALPHABET},
            "response of at least one token": num_tokens > 0,
            f"prompt and response of at most {most} tokens": len(self.prompt) + num_tokens <= most,
            f"response tokens from 0 to {task.VOCABULARY_SIZE - 1}": (
                {*self.response_tokens} <= {*range(task.VOCABULARY_SIZE)}
            ),
            "mask of 0 and 1": {*self.mask} <= {0, 1},
            "mask and log-probabilities of one entry per token": lengths == {num_tokens},
            "finite numbers": all(map(math.isfinite, numbers)),
        }
        for what, is_right in right.items():
            if not is_right:
                raise ValueError(f"it has no {what}")
        if task.decode(self.response_tokens) != self.response:
            raise ValueError(f"its tokens decode to {task.decode(self.response_tokens)!r}")

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return task.encode(self.prompt) + self.response_tokens


# --------------------------------------------------------------------------------------
# Sampling


def roll_out(
    sampler: torch.nn.Module,
    reference: torch.nn.Module,
    *,
    seed: int,
    step: int,
    prompts: range,
    samples_per_prompt: int,
) -> list[Rollout]:
    """Sample a group of responses to each prompt, score them, take group advantages.

    ``prompts``: positions within the step, of this data-parallel rank. The random numbers
    of a rollout depend on (seed, step, position, sample) alone: not on the rank, not on the
    other rollouts, not on what was drawn before.
    """
    problems = [task.training_problem(seed, step * 1_000_003 + position) for position in prompts]
    prompt_B = [task.encode(p.prompt) for p in problems for _ in range(samples_per_prompt)]
    draws = [
        random.Random(f"sample {seed} {step} {position} {sample}")
        for position in prompts
        for sample in range(samples_per_prompt)
    ]
    uniform_BR = torch.tensor(
        [[rng.random() for _ in range(task.MAX_RESPONSE_TOKENS)] for rng in draws],
        dtype=torch.float64,
    )
    response_B, behaviour_B = generate(sampler, prompt_B, uniform_BR)
    reference_B = response_logprobs(reference, prompt_B, response_B)
    reward_B = [
        problems[i // samples_per_prompt].reward(task.decode(response))
        for i, response in enumerate(response_B)
    ]
    rollouts = []
    for i, response in enumerate(response_B):
        group = i // samples_per_prompt
        group_rewards = reward_B[group * samples_per_prompt : (group + 1) * samples_per_prompt]
        rollouts.append(
            Rollout(
                step=step,
                prompt_id=prompts[group],
                prompt=problems[group].prompt,
                response=task.decode(response),
                response_tokens=response,
                mask=[1] * len(response),
                reward=reward_B[i],
                advantage=round(reward_B[i] - sum(group_rewards) / samples_per_prompt, _DECIMALS),
                behaviour_logprobs=[round(x, _DECIMALS) for x in behaviour_B[i]],
                reference_logprobs=[round(x, _DECIMALS) for x in reference_B[i]],
            )
        )
    return rollouts


@torch.no_grad()
def generate(
    sampler: torch.nn.Module, prompts: Sequence[list[int]], uniform_BR: Tensor | None
) -> tuple[list[list[int]], list[list[float]]]:
    """Generate until ``.`` or the length limit; return tokens and their log-probabilities.

    ``uniform_BR``: numbers in [0, 1) that are looked up in the cumulative distribution
    (temperature 1); None takes the likeliest token. Finished responses leave the batch.
    """
    num_sequences = len(prompts)
    length_B = torch.tensor([len(prompt) for prompt in prompts])
    token_BT = torch.full(
        (num_sequences, int(length_B.max()) + task.MAX_RESPONSE_TOKENS), task.PAD, dtype=torch.long
    )
    for i, prompt in enumerate(prompts):
        token_BT[i, : len(prompt)] = torch.tensor(prompt)
    responses: list[list[int]] = [[] for _ in range(num_sequences)]
    logprobs: list[list[float]] = [[] for _ in range(num_sequences)]
    running = torch.arange(num_sequences)
    for r in range(task.MAX_RESPONSE_TOKENS):
        last_B = length_B[running] + r - 1
        logits_BTV = _logits(sampler, token_BT[running, : int(last_B.max()) + 1], length_B[running])
        logprob_BV = torch.log_softmax(logits_BTV[torch.arange(len(running)), last_B].float(), -1)
        if uniform_BR is None:
            chosen_B = logprob_BV.argmax(-1)
        else:
            cumulative_BV = logprob_BV.double().exp().cumsum(-1)
            # The last entry may round to less than 1: stay inside the vocabulary.
            u_B1 = uniform_BR[running, r : r + 1] * cumulative_BV[:, -1:]
            chosen_B = torch.searchsorted(cumulative_BV, u_B1, right=True).squeeze(1)
            chosen_B.clamp_(max=logprob_BV.size(1) - 1)
        token_BT[running, last_B + 1] = chosen_B
        chosen_logprobs = logprob_BV.gather(1, chosen_B[:, None]).squeeze(1).tolist()
        for i, token, logprob in zip(
            running.tolist(), chosen_B.tolist(), chosen_logprobs, strict=True
        ):
            responses[i].append(token)
            logprobs[i].append(logprob)
        running = running[chosen_B != task.END]
        if len(running) == 0:
            break
    return responses, logprobs


@torch.no_grad()
def response_logprobs(
    scorer: torch.nn.Module, prompts: Sequence[list[int]], responses: Sequence[list[int]]
) -> list[list[float]]:
    """Return each response token's log-probability, from one forward pass."""
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    token_BT = torch.full((len(sequences), max(map(len, sequences))), task.PAD, dtype=torch.long)
    for i, sequence in enumerate(sequences):
        token_BT[i, : len(sequence)] = torch.tensor(sequence)
    length_B = torch.tensor([len(prompt) for prompt in prompts])
    logprob_BTV = torch.log_softmax(_logits(scorer, token_BT[:, :-1], length_B).float(), -1)
    logprob_BT = logprob_BTV.gather(2, token_BT[:, 1:, None]).squeeze(2)
    return [
        logprob_BT[i, len(prompt) - 1 : len(sequence) - 1].tolist()
        for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True))
    ]


def count_right(sampler: torch.nn.Module, problems: Sequence[task.Problem]) -> int:
    """Return how many problems the likeliest responses solve."""
    responses, _ = generate(sampler, [task.encode(p.prompt) for p in problems], None)
    rewards = [
        problem.reward(task.decode(response))
        for problem, response in zip(problems, responses, strict=True)
    ]
    return int(sum(rewards))


def _logits(model: torch.nn.Module, token_BT: Tensor, prompt_length_B: Tensor) -> Tensor:
    index_T, length_B1 = torch.arange(token_BT.size(1)), prompt_length_B[:, None]
    # The position ids of task.positions, for sequences padded on the right.
    shift_B1 = task.MAX_PROMPT_TOKENS - length_B1
    position_BT = index_T + torch.where(index_T >= length_B1, shift_B1, 0)
    position_BT.clamp_(max=task.MAX_PROMPT_TOKENS + task.MAX_RESPONSE_TOKENS - 1)
    logits_BTV: Tensor = model(token_BT, position_BT, None)
    return logits_BTV


# --------------------------------------------------------------------------------------
# The file


def append_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Add one line per rollout."""
    with path.open("a") as file:
        for rollout in rollouts:
            file.write(json.dumps(asdict(rollout), separators=(",", ":")) + "\n")


def read_rollouts(path: Path) -> dict[int, list[Rollout]]:
    """Read a whole file of rollouts by step, before anything is trained on.

    Raises :class:`RolloutFileError`, which names file, line and what is wrong.
    """
    steps: dict[int, list[Rollout]] = {}
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutFileError(
            f"{path} cannot be read ({error}): give --rollouts a file written by --record"
        ) from None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rollout = Rollout(**json.loads(line))
        except (OverflowError, TypeError, ValueError) as error:
            shown = repr(line if len(line) <= 40 else line[:37] + "...")
            raise RolloutFileError(
                f"{path}, line {number}: got {shown}, expected a rollout: {error}. Record the file "
                "again with --record, or fix or delete the line"
            ) from None
        steps.setdefault(rollout.step, []).append(rollout)
    if not steps:
        raise RolloutFileError(f"{path} has no rollouts: give --rollouts a file that has some")
    return dict(sorted(steps.items()))
