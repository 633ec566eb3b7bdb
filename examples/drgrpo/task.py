"""The task: take differences along a sequence of digits, each without its sign.

A prompt is ``7-5-9-3:``, worked from left to right: |7-5| leaves 2, |2-9| leaves 7, |7-3|
leaves 4. A response writes any number of steps, each ended by ``;``, then ``=``, the answer
and ``.``::

    =4.           at once: three differences inside the model
    2;=4.         one step written, then two differences at once
    2;7;=4.       fully worked: one difference at a time

So a response is short or long by the model's own choice, and long ones are right more
often. Pure Python; every draw is a function of its arguments.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

ALPHABET = "0123456789-:;=."
PAD = len(ALPHABET)
VOCABULARY_SIZE = 16
"""Even, so that two tensor-parallel ranks can halve it."""
END = ALPHABET.index(".")

MIN_DIGITS = 3
MAX_DIGITS = 8
MAX_PROMPT_TOKENS = 2 * MAX_DIGITS
MAX_RESPONSE_TOKENS = 2 * (MAX_DIGITS - 2) + 8
"""A full working has 5 tokens less."""

AT_ONCE = 0.6
"""Share of the warm-up's demonstrations that answer at once."""

_ANSWER = re.compile(r"(?:\d;)*=(\d)\.")
_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Problem:
    """Some digits in a sequence."""

    digits: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """What the model is given."""
        return "-".join(map(str, self.digits)) + ":"

    @property
    def steps(self) -> list[int]:
        """The difference after each digit but the first; the answer is the last."""
        differences = itertools.accumulate(self.digits, lambda a, b: abs(a - b))
        return list(differences)[1:]

    def response(self, num_written: int) -> str:
        """Write a right response with its first ``num_written`` steps."""
        working = "".join(f"{step};" for step in self.steps[:num_written])
        return f"{working}={self.steps[-1]}."

    def reward(self, response: str) -> float:
        """Return 1.0 for a complete response with the right answer, else 0.0.

        Only the answer is looked at: a wrong step costs nothing by itself.
        """
        match = _ANSWER.fullmatch(response)
        return float(match is not None and int(match[1]) == self.steps[-1])


def encode(text: str) -> list[int]:
    """Return one token per character."""
    return [ALPHABET.index(character) for character in text]


def positions(prompt_length: int, response_length: int) -> list[int]:
    """Return the position ids: a response starts at the same one after any prompt.

    Then the n-th step is at one position and the operation it needs at another, for any
    prompt length, and a two-layer model learns where to look in seconds.
    """
    return [*range(prompt_length), *range(MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS + response_length)]


def decode(tokens: list[int]) -> str:
    """Return the text of tokens; padding and unused tokens become ``?``."""
    return "".join(ALPHABET[t] if t < len(ALPHABET) else "?" for t in tokens)


def training_problem(seed: int, index: int) -> Problem:
    """Draw the index-th training problem; never one of the held-out ones."""
    return next(p for p in _draws(f"train {seed} {index}") if not _is_held_out(p))


def held_out_problems(count: int) -> list[Problem]:
    """Return ``count`` different problems that no seed trains on; the same in every run."""
    found: dict[Problem, None] = {}
    for problem in _draws("held out"):
        if _is_held_out(problem):
            found[problem] = None
        if len(found) == count:
            return list(found)
    raise AssertionError("draws never end")


def demonstration(seed: int, index: int) -> tuple[Problem, str]:
    """Draw the index-th problem of the supervised warm-up, with a right response.

    Most answer at once. Of the others, half are fully worked and half write a uniformly drawn
    number of steps.
    """
    problem = training_problem(seed, index)
    rng = random.Random(f"demonstration {seed} {index}")
    most = len(problem.digits) - 2
    num_written = 0 if rng.random() < AT_ONCE else rng.choice([most, rng.randint(1, most)])
    return problem, problem.response(num_written)


def _draws(key: str) -> Iterator[Problem]:
    rng = random.Random(key)
    while True:
        num_digits = rng.randint(MIN_DIGITS, MAX_DIGITS)
        yield Problem(tuple(rng.randint(0, 9) for _ in range(num_digits)))


def _is_held_out(problem: Problem) -> bool:
    digest = hashlib.sha256(problem.prompt.encode()).digest()
    return digest[0] < 256 * _HELD_OUT_SHARE
