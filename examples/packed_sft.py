"""Packed SFT at DP 2 and at CP 2, from the same weights: stock Megatron-Core and this package.

::

    python examples/packed_sft.py [--picture FILE]

Prints the gradient norm of every step under stock's default, under stock's
``--calculate-per-token-loss``, under ``token_mean`` and under ``sample_mean``, each at DP 2 and at
CP 2, next to the norm that loops over conversations give, in one process and without this package.
Every parallelism begins each step from the same weights: those of a short training of the token
mean by hand, which goes on between the steps.

Conversations have 500 to 16,000 tokens, and their answers are trained: short answers to long
documents, and long answers to short questions. Megatron-Core's own
``GPTModel``, ``DistributedDataParallel`` and schedule run in two processes on the CPU. The layers
have no attention: over 16,000 tokens it takes minutes on a CPU, and it does not enter the
scaling of a loss (``lossagg verify`` has it).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_lossagg.cpu as cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import (  # noqa: E402
    ModuleSpec,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from packed_sft_picture import apart, draw  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from megatron_lossagg import LossAggregator  # noqa: E402
from megatron_lossagg.loop.step import Step  # noqa: E402

VOCABULARY, HIDDEN = 128, 32
SHORTEST, LONGEST = 500, 16_000
PACKS, PACK_TOKENS = 4, 16_384
WARMUP_STEPS, LEARNING_RATE = 20, 0.01
PARALLELISMS = {"DP 2": 1, "CP 2": 2}
"""The context-parallel size of each; two processes, so the rest is data parallel."""
RUNS = {
    "stock, default": (None, False),
    "stock, --calculate-per-token-loss": (None, True),
    "token_mean": ("token_mean", False),
    "token_mean, --calculate-per-token-loss": ("token_mean", True),
    "sample_mean": ("sample_mean", False),
    "sample_mean, --calculate-per-token-loss": ("sample_mean", True),
}
"""The mode, None for Megatron's own loss, and the loss scaling of each run."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Conversations end to end, shifted: entry i belongs to logit i. One microbatch."""

    token: Tensor
    label: Tensor
    mask: Tensor
    cu_seqlens: Tensor

    def conversations(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Cut tokens, labels and mask into conversations."""
        lengths = self.cu_seqlens.diff().tolist()
        parts = (tensor.split(lengths) for tensor in (self.token, self.label, self.mask))
        yield from zip(*parts, strict=True)


def draw_step(step: int) -> list[Pack]:
    """Draw a step's packs; they depend on its number alone."""
    random = torch.Generator().manual_seed(step)
    packs: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(PACKS)]
    for pack in packs:
        left = PACK_TOKENS
        while left >= SHORTEST:
            uniform = float(torch.rand((), generator=random))
            length = min(round(SHORTEST * (LONGEST / SHORTEST) ** uniform), left) // 4 * 4
            pack.append(draw_conversation(length, random))
            left -= length
    return [
        Pack(
            token=torch.cat([token for token, _, _ in pack]),
            label=torch.cat([label for _, label, _ in pack]),
            mask=torch.cat([mask for _, _, mask in pack]),
            cu_seqlens=torch.tensor([0, *(len(token) for token, _, _ in pack)]).cumsum(0).int(),
        )
        for pack in packs
    ]


def draw_conversation(length: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a long document with a short answer, or a short question with a long, regular one.

    The text is a walk over the vocabulary, more or less regular.
    """
    has_short_answer, place = torch.rand(2, generator=random).tolist()
    if has_short_answer < 0.5:
        regular, question = 0.3, 0.90 + 0.09 * place
    else:
        regular, question = 0.8, 0.05 + 0.35 * place
    jump = torch.randint(1, VOCABULARY, (length + 1,), generator=random)
    jump[torch.rand(length + 1, generator=random) < regular] = 3
    text = jump.cumsum(0) % VOCABULARY
    mask = (torch.arange(length) >= int(length * question)).float()
    mask[-1] = 0  # nothing follows the last token
    return text[:-1], text[1:], mask


def gpt(*, per_token: bool) -> GPTModel:
    """Build Megatron-Core's model at the sizes of its groups; its weights are set later."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads,
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(MLP, submodules=linear)
    layer = TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add)
    return GPTModel(
        config,
        ModuleSpec(TransformerLayer, submodules=layer),
        vocab_size=VOCABULARY,
        max_sequence_length=PACK_TOKENS,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )


def by_hand(
    model: GPTModel, packs: Sequence[Pack], modes: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Return the gradient of each mode as a paper writes it: a loop over conversations."""
    sums, means, num_tokens = [], [], 0
    for pack in packs:
        for token, label, mask in pack.conversations():
            losses = cross_entropy(model(token[None], None, None)[0], label, reduction="none")
            sums.append((losses * mask).sum())
            means.append(sums[-1] / mask.sum())
            num_tokens += int(mask.sum())
    parameters = list(model.parameters())
    loss_of = {"token_mean": sum(sums) / num_tokens, "sample_mean": sum(means) / len(means)}
    return {
        mode: list(torch.autograd.grad(loss_of[mode], parameters, retain_graph=mode != modes[-1]))
        for mode in modes
    }


class Runs:
    """The models of one parallelism, one for each loss scaling, and what a step of each gives."""

    def __init__(self) -> None:
        self.models = {per_token: _wrapped(gpt(per_token=per_token)) for per_token in (False, True)}
        self._aggregators = {
            (mode, per_token): LossAggregator([self.models[per_token]], mode)
            for mode, per_token in RUNS.values()
            if mode is not None
        }

    def train(self, packs: Sequence[Pack], mode: str | None, per_token: bool) -> dict[str, float]:
        """Run Megatron's schedule over this rank's packs; return loss and gradient norm."""
        model = self.models[per_token]
        model.zero_grad_buffer()
        if mode is None:
            reports = run_schedule(model, packs, stock)
        else:
            aggregator = self._aggregators[mode, per_token]
            active = [int(mask.sum()) for pack in packs for _, _, mask in pack.conversations()]
            with aggregator.step(active_tokens=active, num_microbatches=len(packs)) as step:
                reports = run_schedule(model, packs, configured(step, packs))
        # As Megatron-LM logs it: sums over microbatches and ranks, then one division.
        report = torch.stack([report["lm loss"] for report in reports]).sum(0)
        dist.all_reduce(report)
        gradients = [parameter.main_grad for parameter in model.parameters()]
        return {"loss": float(report[0] / report[1]), "grad_norm": norm(gradients)}


def run_schedule(
    model: DistributedDataParallel, packs: Sequence[Pack], loss_func_of: Callable[..., Any]
) -> list[dict[str, Tensor]]:
    """Run Megatron's schedule, a pack for each microbatch; return what the loss_func reported."""

    def forward_step(iterator: Iterator[tuple[int, Pack]], chunk: Any) -> Any:
        number, pack = next(iterator)
        here = zigzag(pack.cu_seqlens)
        losses = chunk(pack.token[None, here], None, None, labels=pack.label[None, here])
        return losses, loss_func_of(number, pack, here)

    reports: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(enumerate(packs)),
        model=[model],
        num_microbatches=len(packs),
        seq_length=PACK_TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    return reports


def _wrapped(model: GPTModel) -> DistributedDataParallel:
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def zigzag(cu_seqlens: Tensor) -> Tensor:
    """Return the tokens that this context-parallel rank holds, as Megatron-Core splits them."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    parts = torch.arange(int(cu_seqlens[-1])).split(cu_seqlens.diff().tolist())
    chunks = [part.chunk(2 * size) for part in parts]
    both = [chunk for of_one in chunks for chunk in (of_one[rank], of_one[2 * size - 1 - rank])]
    return torch.cat(both)


def stock(number: int, pack: Pack, here: Tensor) -> Callable[[Tensor], Any]:
    """Return the loss_func of Megatron-LM's ``pretrain_gpt.py``."""
    del number
    mask = pack.mask[here]

    def loss_func(output: Tensor) -> Any:
        loss = (output.view(-1) * mask).sum()
        num_tokens = mask.sum().int()
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}

    return loss_func


def configured(step: Step, packs: Sequence[Pack]) -> Callable[..., Any]:
    """Return what makes the loss_func of a mode: this package, in a loop of one's own."""
    numbers = [len(pack.cu_seqlens) - 1 for pack in packs]

    def loss_func_of(number: int, pack: Pack, here: Tensor) -> Callable[[Tensor], Any]:
        del here
        first = sum(numbers[:number])

        def loss_func(output: Tensor) -> Any:
            sequences = range(first, first + numbers[number])
            mb = step.microbatch(sequences, pack.mask, cu_seqlens=pack.cu_seqlens)
            loss = mb.reduce(output.view(-1))
            return mb.outputs(loss, report={"lm loss": loss})

        return loss_func

    return loss_func_of


def norm(gradients: Sequence[Tensor]) -> float:
    """Return the norm of the whole gradient."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def set_weights(model: torch.nn.Module, weights: Sequence[Tensor]) -> None:
    """Begin from these weights."""
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def work(num_steps: int, output: Path, *, only_last: bool) -> None:
    """Measure: by hand on rank 0, then on all ranks at each parallelism; rank 0 writes the lines.

    ``only_last``: run Megatron in the last step only, whose line is then the only one.
    """
    dist.init_process_group("gloo")
    steps = [draw_step(step) for step in range(num_steps)]
    weights_of_step: list[list[Tensor]] = []
    lines: list[dict[str, Any]] = [{} for _ in steps]
    for parallelism, cp_size in PARALLELISMS.items():
        parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
        model_parallel_cuda_manual_seed(1)
        if not weights_of_step:
            sent = [follow_by_hand(steps, lines) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(sent)
            (weights_of_step,) = sent
        runs = Runs()
        dp_size = parallel_state.get_data_parallel_world_size()
        dp_rank = parallel_state.get_data_parallel_rank()
        of_steps = list(zip(steps, weights_of_step, lines, strict=True))
        for packs, weights, line in of_steps[-1:] if only_last else of_steps:
            for model in runs.models.values():
                set_weights(model, weights)
            line[parallelism] = {
                name: runs.train(packs[dp_rank::dp_size], *how) for name, how in RUNS.items()
            }
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        measured = lines[-1:] if only_last else lines
        output.write_text("".join(json.dumps(line) + "\n" for line in measured))
    dist.destroy_process_group()


def follow_by_hand(
    steps: Sequence[Sequence[Pack]], lines: Sequence[dict[str, Any]]
) -> list[list[Tensor]]:
    """Train the token mean by hand, first on other data; return the weights of each step."""
    model = gpt(per_token=False)
    cpu.initialize_weights([model], seed=1)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    weights = []
    warmup = [draw_step(1000 + step) for step in range(WARMUP_STEPS)]
    for number, packs in enumerate([*warmup, *steps], -WARMUP_STEPS):
        is_measured = number >= 0
        modes = ["token_mean", "sample_mean"] if is_measured else ["token_mean"]
        gradients = by_hand(model, packs, modes)
        if is_measured:
            weights.append([parameter.detach().clone() for parameter in parameters])
            lines[number]["by hand"] = {mode: norm(of) for mode, of in gradients.items()}
        for parameter, gradient in zip(parameters, gradients["token_mean"], strict=True):
            parameter.grad = gradient
        optimizer.step()
    return weights


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what the step gave in which stock's default differs most, and the factors of all."""
    factors = [apart(line, "stock, default") for line in lines]
    number = factors.index(max(factors))
    step = lines[number]
    yield f"{'':<41}{'DP 2':>20}{'CP 2':>20}   gradient norms differ"
    head = f"{f'step {number + 1} of {len(lines)}':<41}"
    yield head + 2 * f"{'loss':>10}{'grad norm':>10}" + "   by a factor of up to"
    for name in RUNS:
        both = [step[parallelism][name] for parallelism in PARALLELISMS]
        values = "".join(f"{of['loss']:10.5f}{of['grad_norm']:10.5f}" for of in both)
        yield f"{name:<41}{values}   {max(apart(line, name) for line in lines):.6f}"
    for mode, value in step["by hand"].items():
        yield f"{'by hand, ' + mode:<41}{value:20.5f}{value:20.5f}"


def main() -> None:
    """Launch two processes, print the table, draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only-last", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.steps, args.worker, only_last=args.only_last)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.jsonl"
        worker = [str(Path(__file__).resolve()), "--worker", str(output)]
        done = cpu.launch([*worker, "--steps", str(args.steps)], processes=2, timeout=1800)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
    print("\n".join(table(lines)))
    if args.picture is not None:
        draw(lines, args.picture)
        print(args.picture)


if __name__ == "__main__":
    main()
