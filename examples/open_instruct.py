"""open-instruct's two cases without Megatron: torch's DDP on two CPU processes, and one factor.

::

    python examples/open_instruct.py

- GRPO: ``loss_denominator`` of ``grpo_fast.py``, "token" or a number. A clipped policy loss.
- SFT under gradient accumulation (open-instruct#1728, #1736). A cross entropy.

Prints the norm of the step's gradient: in one process, by loops over tokens and without this
package (``by hand``); and in two processes, which cut the same 12 responses into 1 or into 3
microbatches each. Everything is float64. ``finetune.py`` averages microbatches, so the last row
changes with their number, and is not what loops over tokens give.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step

PROCESSES, RESPONSES, LONGEST = 2, 12, 48
VOCABULARY, HIDDEN = 32, 16
NUMBER = 64
"""The ``loss_denominator`` that is a number."""
CLIP = 0.2


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Responses next to each other, ``[b, s]``: entry i of a row belongs to logit i."""

    token: Tensor
    label: Tensor
    mask: Tensor
    """1 where the label is a token of the response."""
    advantage: Tensor
    old_logprob: Tensor


TokenLosses = Callable[[nn.Module, Batch], Tensor]
"""Per-token losses ``[b, s]`` of a batch."""


class Model(nn.Module):
    """A small recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.double()

    def forward(self, token: Tensor, label: Tensor) -> Tensor:
        """Return the log-probability of each label, ``[b, s]``."""
        logits = self.head(self.layer(self.embedding(token))[0])
        logprobs: Tensor = logits.log_softmax(-1).gather(-1, label[..., None])[..., 0]
        return logprobs


def draw() -> list[Batch]:
    """Draw a step: batches of one response, of 1 to 40 tokens; one is masked as a whole."""
    random = torch.Generator().manual_seed(2)
    batches = []
    for number in range(RESPONSES):
        text = torch.randint(0, VOCABULARY, (1, LONGEST + 1), generator=random)
        prompt, response = 3 + number % 5, 1 if number % 4 == 0 else 3 * number + 7
        position = torch.arange(LONGEST)[None] + 1  # of the label
        is_response = (position >= prompt) & (position < prompt + response)
        batches.append(
            Batch(
                token=text[:, :-1],
                label=text[:, 1:],
                mask=(is_response & (number != 6)).double(),
                advantage=torch.randn(1, 1, generator=random, dtype=torch.float64),
                old_logprob=-3.5 + torch.randn(1, LONGEST, generator=random, dtype=torch.float64),
            )
        )
    return batches


def joined(batches: Sequence[Batch]) -> Batch:
    """Put batches below each other."""
    names = Batch.__dataclass_fields__
    return Batch(**{name: torch.cat([getattr(of, name) for of in batches]) for name in names})


def policy_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Clip the ratio as PPO does."""
    ratio = (model(batch.token, batch.label) - batch.old_logprob).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return torch.maximum(-batch.advantage * ratio, -batch.advantage * clipped)


def cross_entropies(model: nn.Module, batch: Batch) -> Tensor:
    """Return -log p of each label."""
    logprobs: Tensor = -model(batch.token, batch.label)
    return logprobs


CASES: dict[str, tuple[TokenLosses, Aggregation]] = {
    'GRPO, loss_denominator "token"': (policy_losses, Aggregation("token_mean")),
    f"GRPO, loss_denominator {NUMBER}": (policy_losses, Aggregation("token_sum", divisor=NUMBER)),
    "SFT, the token mean": (cross_entropies, Aggregation("token_mean")),
    "SFT, as finetune.py averages": (cross_entropies, Aggregation("microbatch_token_mean")),
}


def backward_step(
    model: DistributedDataParallel,
    microbatches: Sequence[Batch],
    token_losses: TokenLosses,
    aggregation: Aggregation,
    *,
    divided_by: int = 1,
) -> None:
    """Add the step's gradient to the parameters: of this rank's microbatches, over all ranks.

    ``divided_by``: what the training loop divides each microbatch's loss by before its backward
    pass, such as the number of microbatches.
    """
    active = [int(of) for batch in microbatches for of in batch.mask.sum(-1)]
    microbatch = [m for m, batch in enumerate(microbatches) for _ in batch.mask]
    sequences = Sequences(
        active_tokens=active, microbatch=microbatch, num_microbatches=len(microbatches)
    )
    plan = plan_step(aggregation, sequences, group=dist.group.WORLD)
    # DDP takes the mean of the ranks' gradients, and microbatches add up unless the loop divides.
    factor = dist.get_world_size() * divided_by
    for m, batch in enumerate(microbatches):
        rows = [s for s, of in enumerate(microbatch) if of == m]
        layout = Layout.bshd_zigzag(*batch.mask.shape, cp_size=1, cp_rank=0)
        is_last = m == len(microbatches) - 1
        with nullcontext() if is_last else model.no_sync():
            losses = token_losses(model, batch)
            partial_loss = plan.reducer(rows, batch.mask, layout)(losses)
            (factor * partial_loss / divided_by).backward()
    plan.check()


def by_hand(
    batches: Sequence[Batch], token_losses: TokenLosses, divisor: float | None
) -> list[Tensor]:
    """Return the gradient of the sum over tokens, by a number or theirs; without this package."""
    model = Model()
    loss, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        for value, mask in zip(token_losses(model, batch)[0], batch.mask[0], strict=True):
            if mask:
                loss, num_tokens = loss + value, num_tokens + 1
    return list(torch.autograd.grad(loss / (divisor or num_tokens), list(model.parameters())))


def norm(gradients: Sequence[Tensor]) -> float:
    """Return the norm of the whole gradient."""
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def of_this_rank(num_microbatches: int) -> list[Batch]:
    """Cut this rank's responses into microbatches; the ranks' tokens differ in number."""
    rank, half = dist.get_rank(), RESPONSES // dist.get_world_size()
    own = draw()[rank * half : (rank + 1) * half]
    size = half // num_microbatches
    return [joined(own[first : first + size]) for first in range(0, half, size)]


def gradients_of(name: str, num_microbatches: int, *, divided_by: int = 1) -> list[Tensor]:
    """Return the gradient that every rank has after the step."""
    model = DistributedDataParallel(Model())
    microbatches = of_this_rank(num_microbatches)
    backward_step(model, microbatches, *CASES[name], divided_by=divided_by)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def work(output: Path) -> None:
    """Measure on this rank; rank 0 writes the rows."""
    dist.init_process_group("gloo")
    rows = {}
    for name, (token_losses, aggregation) in CASES.items():
        rows[name] = {
            "by hand": norm(by_hand(draw(), token_losses, aggregation.divisor)),
            "1 microbatch": norm(gradients_of(name, 1)),
            "3 microbatches": norm(gradients_of(name, 3)),
            "3, loop divides": norm(gradients_of(name, 3, divided_by=3)),
        }
    if dist.get_rank() == 0:
        output.write_text(json.dumps(rows))
    dist.destroy_process_group()


def table(rows: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the lines of the table."""
    columns = next(iter(rows.values()))
    yield f"{'gradient norm':<32}" + "".join(f"{column:>18}" for column in columns)
    for name, row in rows.items():
        yield f"{name:<32}" + "".join(f"{value:18.9f}" for value in row.values())


def main() -> None:
    """Launch two processes and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    from megatron_lossagg.cpu import launch  # of this repository: any launcher does

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [str(Path(__file__).resolve()), "--worker", str(output)]
        done = launch(command, processes=PROCESSES, timeout=600)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        print("\n".join(table(json.loads(output.read_text()))))


if __name__ == "__main__":
    main()
