"""slime and miles from their checkouts, on a CPU: imports, one rollout batch, the reference.

``FRAMEWORKS_DIR`` has the checkouts that ``tools/fetch_frameworks.sh`` makes. Their code runs as it
is. Stood in for are a device (a CPU), what serves rollouts (sglang) and triton, none of which the
training path computes with, and the object store, which is Ray's.
"""

import importlib
import os
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

import tiny_gpt  # installs the stand-ins of megatron_lossagg.cpu
import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

import megatron_lossagg.cpu as cpu
import megatron_lossagg.cpu.training as cpu_training
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.frameworks.step import draw

ROLLOUTS = 8
GLOBAL_BATCH = 4
PER_PROMPT = 2
SPLIT = (1, 6)
KL, ENTROPY, EPS = 0.3, 0.05, 0.2
DIVISOR, SUM_DIVISOR = 40.0, 50.0
SERVING = ("polars", "sglang", "sglang_router", "torch_memory_saver", "mooncake", "pylatexenc")


class Silent(type):
    """Makes a class whose every method does nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class StandIn(types.ModuleType):
    """A module whose every name is a class that does nothing."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = Silent(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class ServingFinder(MetaPathFinder, Loader):
    """Finds what serves rollouts, where it is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SERVING:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def load(*names):
    """Put checkouts on the path, and import Megatron-LM's training package."""
    folder = Path(os.environ["FRAMEWORKS_DIR"])
    for name in (*names, "Megatron-LM"):
        assert (folder / name).is_dir(), f"no {folder / name}: run tools/fetch_frameworks.sh"
        sys.path.append(str(folder / name))
    sys.meta_path.append(ServingFinder())
    torch._dynamo.config.disable = True  # compiling takes a minute and changes no number
    absent = cpu_training._triton_while_importing()
    try:
        import megatron.training
    finally:
        for name in absent:
            del sys.modules[name]
    assert megatron.training.__file__.startswith(str(folder))


def object_store_in_process(monkey):
    """Let Ray's store hand over the object itself."""
    import ray

    monkey.setattr(ray, "put", lambda value, **_: value)
    monkey.setattr(ray, "get", lambda value, **_: value)


def make_samples():
    """Return the drawn step of ``lossagg verify --framework``, in the default dtype."""
    return [
        {
            "tokens": one.tokens,
            "response": len(one.mask),
            "mask": one.mask,
            "rollout": one.sample,
            "prompt": one.prompt,
            "advantage": one.advantages.to(torch.get_default_dtype()),
            "old": one.old_log_probs.to(torch.get_default_dtype()),
            "ref": one.ref_log_probs.to(torch.get_default_dtype()),
        }
        for one in draw()
    ]


def terms(log_probs, entropy, sample):
    """Compute each token's policy loss and the rest, written from the papers; lists of scalars."""
    policy, rest = [], []
    for token in range(sample["response"]):
        ratio = torch.exp(log_probs[token] - sample["old"][token].double())
        advantage = sample["advantage"][token].double()
        clipped = torch.clamp(ratio, 1 - EPS, 1 + EPS)
        policy.append(-torch.minimum(ratio * advantage, clipped * advantage))
        log_ratio = sample["ref"][token].double() - log_probs[token]
        k3 = torch.exp(log_ratio) - log_ratio - 1
        rest.append(KL * k3 - ENTROPY * entropy[token])
    return policy, rest


def reference(path):
    """Save, per sample and term, its masked sum and that sum's gradient; unpacked, one process."""
    model = tiny_gpt.gpt(tiny_gpt.config_of(), get_gpt_layer_local_spec())
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    saved = []
    for sample in make_samples():
        tokens = sample["tokens"]
        n = sample["response"]
        logits = model(tokens[None], torch.arange(len(tokens))[None], None)[0, -n - 1 : -1]
        log_p = torch.log_softmax(logits.double(), -1)
        log_probs = log_p.gather(1, tokens[-n:, None])[:, 0]
        of_sample = []
        for losses in terms(log_probs, -(log_p.exp() * log_p).sum(-1), sample):
            masked = sum(x for x, m in zip(losses, sample["mask"], strict=True) if m)
            if not isinstance(masked, torch.Tensor):
                of_sample.append((0.0, None))
                continue
            grads = torch.autograd.grad(masked, list(named.values()), retain_graph=True)
            of_sample.append((masked.item(), dict(zip(named, grads, strict=True))))
        saved.append(of_sample)
    torch.save(saved, path)


def custom_loss(args, batch, logits, sum_of_sample_mean, slice_with_cp):
    """Compute the policy loss of both frameworks in float64, as a custom loss of theirs.

    ``slice_with_cp``: the framework's.
    """
    targets = []
    for tokens, n in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        target = torch.cat([tokens[1:], tokens.new_full((1,), -1)])
        target[: len(tokens) - n - 1] = -1
        targets.append(slice_with_cp(target, -1))
    target = torch.cat(targets)
    is_response = target >= 0
    log_p = torch.log_softmax(logits[0, : len(target)][is_response], -1)
    log_probs = log_p.gather(1, target[is_response][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    ratio = torch.exp(log_probs - torch.cat(batch["log_probs"]))
    advantage = torch.cat(batch["advantages"])
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage)
    log_ratio = torch.cat(batch["ref_log_probs"]) - log_probs
    kl = torch.exp(log_ratio) - log_ratio - 1
    if args.custom_pg_loss_reducer_function_path is None:
        pg_loss = sum_of_sample_mean(policy)
    else:
        module, _, name = args.custom_pg_loss_reducer_function_path.rpartition(".")
        make = getattr(importlib.import_module(module), name)
        lengths = batch["total_lengths"], batch["response_lengths"]
        pg_loss = make(*lengths, batch["loss_masks"], args.calculate_per_token_loss)(policy)
    loss = pg_loss + sum_of_sample_mean(KL * kl - ENTROPY * entropy)
    if not len(log_probs):
        loss = loss + 0 * logits.sum()
    return loss, {"loss": loss.clone().detach()}


def expected(saved, members, aggregations, *, places=None, microbatches=None):
    """Combine the reference's sums under the reference: loss, and gradients by parameter name.

    ``members``: samples of the step. ``aggregations``: for the policy term and the rest, each
    keywords of the reference. ``places``: (data-parallel rank, microbatch) of each sample.
    """
    samples = make_samples()
    loss, grads = 0.0, {}
    for term, keywords in enumerate(aggregations):
        sequences = []
        for number in members:
            sample = samples[number]
            sequence = {
                "x": [
                    torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in sample["mask"]
                ],
                "counted": sample["mask"],
                "trained": sample["mask"],
                "sample": sample["rollout"],
                "prompt": sample["prompt"],
            }
            if places is not None:
                sequence["microbatch"] = places[number]
            sequences.append(sequence)
        total = reference_loss.step_loss(sequences=sequences, microbatches=microbatches, **keywords)
        total.backward()
        for number, sequence in zip(members, sequences, strict=True):
            weights = {float(x.grad) for x in sequence["x"] if x.grad is not None} - {0.0}
            if not weights:
                continue
            (weight,) = weights
            value, sample_grads = saved[number][term]
            loss += weight * value
            for name, grad in sample_grads.items():
                grads[name] = grads.get(name, 0) + weight * grad.double()
    return loss, grads


def difference(model, got, want):
    """Return the relative error of a whole gradient; ``got``: this rank's tensors by name."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, grad in want.items():
        squares += torch.stack([(got[name].double() - grad).square().sum(), grad.square().sum()])
    assert squares[1] > 0
    return (squares[0] / squares[1]).sqrt().item()


class Recorder:
    """An optimizer that keeps the reduced gradients and changes no weight."""

    param_groups = ()

    def __init__(self, model):
        self.model = model

    def zero_grad(self):
        pass

    def step(self):
        shards = cpu.named_shards([self.model])
        self.grads = {shard.name: shard.parameter.main_grad.clone() for shard in shards}
        return True, 0.0, 0


class Scheduler:
    """A learning-rate scheduler that counts."""

    def step(self, increment):
        self.increment = increment


AGGREGATIONS = {
    "token_mean": {"mode": "token_mean"},
    "sample_mean": {"mode": "sample_mean"},
    "prompt_mean": {"mode": "prompt_mean"},
    "constant": {"mode": "constant", "divisor": DIVISOR},
    "sample_sum": {"mode": "sample_sum"},
    "token_sum": {"mode": "token_sum", "divisor": SUM_DIVISOR},
    "sample_mean, empty ones do not count": {"mode": "sample_mean", "count_empty": False},
    "prompt_mean, empty ones do not count": {"mode": "prompt_mean", "count_empty": False},
    "constant, empty ones do not count": {
        "mode": "constant",
        "divisor": DIVISOR,
        "count_empty": False,
    },
    "microbatch_token_mean": {"mode": "microbatch_token_mean"},
}
"""Keywords of the reference, by name."""


def flags_of(keywords):
    """Return the arguments that ask for an aggregation."""
    return {
        "loss_aggregation": keywords["mode"],
        "loss_aggregation_divisor": keywords.get("divisor"),
        "loss_aggregation_count_empty": keywords.get("count_empty"),
    }


def report(line):
    """Print a line of the table on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def layout_name():
    """Name the layout: DP and CP."""
    return f"DP {mpu.get_data_parallel_world_size()} CP {mpu.get_context_parallel_world_size()}"
