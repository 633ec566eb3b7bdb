"""What the drivers of slime and miles share: from their conversion of rollouts to train_one_step.

Both take Megatron-LM's arguments, reduce each term by ``get_sum_of_sample_mean``, and multiply by
what Megatron's average loss scaling divides by. Their object store, which is Ray's, is passed by.
"""

from __future__ import annotations

import argparse
import sys
from abc import abstractmethod
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, ClassVar

from megatron_lossagg.integrations._rollouts import REDUCER, Hooks
from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.loop.flags import args_of
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import (
    CLIP,
    DUAL_CLIP,
    ENTROPY,
    KL,
    Drawn,
    Driver,
    Unchanging,
)
from megatron_lossagg.verify.drivers.runs import FrameworkError
from megatron_lossagg.verify.parallelism import Parallelism

_PER_TOKEN = "--calculate-per-token-loss"
_MOST_TOKENS = 40
"""Of a microbatch over its context-parallel ranks."""


class RolloutDriver(Driver):
    """Runs the drawn batch as one rollout batch, and one step."""

    hooks: ClassVar[Hooks]
    cp_utils: ClassVar[str]
    """The module that slices response tokens over context parallelism."""
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "the default": Aggregation("sample_mean"),
        _PER_TOKEN: Aggregation("token_mean"),
    }
    sample = "sample"

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        import ray
        import torch._dynamo

        torch._dynamo.config.disable = True  # compiling takes a minute and changes no number
        ray.put = ray.get = lambda value, **_: value
        self.parsed = parsed(self.hooks)

    def arguments(self, **given: Any) -> Namespace:
        """Return the framework's own defaults, and what makes its loss that of the reference."""
        ours = {
            "advantage_estimator": "grpo",
            "decoder_seq_length": None,
            "entropy_coef": ENTROPY,
            "eps_clip_c": DUAL_CLIP,
            "global_batch_size": len({one.sample for one in self.drawn}),
            "kl_loss_coef": KL,
            "kl_loss_type": "k3",
            "max_tokens_per_gpu": _MOST_TOKENS // self.parallelism.cp,
            "micro_batch_size": 1,
            "n_samples_per_prompt": 2,
            "rewards_normalization": False,
            "seq_length": 64,
            "use_dynamic_batch_size": True,
            "use_kl_loss": True,
        }
        return Namespace(**{**vars(self.parsed), **ours, **given})

    def start(self) -> None:
        """Build a model for each loss scaling."""
        self.chunks = {one: self.wrapped(per_token=one) for one in (False, True)}
        self.begin(self.arguments())

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen in the functions that reduce the terms."""
        from megatron_lossagg.integrations import weigh_rollouts

        return weigh_rollouts.install(self.hooks.name, steps=sys.maxsize, report=report)

    def prepare(self, trained: str | Aggregation) -> tuple[Namespace, Any]:
        """Convert the rollouts, as the rollout manager does."""
        given: dict[str, Any] = {"calculate_per_token_loss": trained == _PER_TOKEN}
        if isinstance(trained, Aggregation):
            given |= args_with_weights(self.hooks, trained)
        args = self.arguments(**given)
        return args, self.converted(args)

    def train(
        self, trained: str | Aggregation, prepared: tuple[Namespace, Any]
    ) -> Mapping[str, float]:
        """Split the rollouts over the ranks, and train one step."""
        from megatron.core import mpu
        from megatron.training import global_vars

        args, converted = prepared
        global_vars.set_args(args)
        if args.custom_megatron_init_path:
            resolve_name(args.custom_megatron_init_path)(args)
        chunk = self.chunks[args.calculate_per_token_loss]
        sizes = {
            "dp_size": mpu.get_data_parallel_world_size(),
            "cp_size": mpu.get_context_parallel_world_size(),
            "vpp_size": 1,
        }
        refs = self.split(args, converted, sizes)
        partition = refs[mpu.get_data_parallel_rank()].inner["partition"]
        data = self.received(args, refs)
        for key in ("advantages", "old_log_probs", "ref_log_probs"):
            data[key.replace("old_", "")] = self._held(partition, data, key)
        iterator, (m,), (g,) = self.iterator(args, chunk, data)
        losses = self.train_one_step(
            args, 0, 0, iterator, [chunk], Unchanging(), Unchanging(), m, g
        )
        names = ("loss", *self.terms)
        return {name: float(losses[name]) for name in names if name in losses}

    def _held(self, partition: Sequence[int], data: Mapping[str, Any], key: str) -> list[Any]:
        """Return what this context-parallel rank holds of a field of the response tokens."""
        slice_with_cp = import_module(self.cp_utils).slice_log_prob_with_cp
        lengths = zip(partition, data["total_lengths"], data["response_lengths"], strict=True)
        return [slice_with_cp(getattr(self.drawn[s], key).float(), *n) for s, *n in lengths]

    def begin(self, args: Namespace) -> None:
        """Prepare this process, in its groups."""

    @abstractmethod
    def converted(self, args: Namespace) -> Any:
        """Convert the drawn batch as the rollout manager does."""

    @abstractmethod
    def split(self, args: Namespace, converted: Any, sizes: dict[str, int]) -> Any:
        """Return a reference to the data of each rank."""

    @abstractmethod
    def received(self, args: Namespace, refs: Any) -> dict[str, Any]:
        """Return this rank's data as the actor receives it."""

    @abstractmethod
    def iterator(self, args: Namespace, chunk: Any, data: Any) -> tuple[Any, Any, Any]:
        """Return the data's iterator, and M and the rollouts of each step."""

    @abstractmethod
    def train_one_step(self, *given: Any) -> Mapping[str, Any]:
        """Run the framework's step; return what it logs."""


def parsed(hooks: Hooks, provider: Any = None) -> Namespace:
    """Parse a framework's defaults by Megatron-LM's parser, with only the policy loss.

    ``provider`` adds its options. Raises :class:`FrameworkError` if it has no option that the
    integration uses.
    """
    from megatron.training.arguments import parse_args

    if provider is None:
        made = import_module(f"{hooks.name}.utils.arguments")
        provider = getattr(made, f"get_{hooks.name}_extra_args_provider")(None)
    argv, sys.argv = sys.argv, ["train.py", "--rollout-batch-size", "4"]
    try:
        args: argparse.Namespace = parse_args(provider, ignore_unknown_args=True)
    finally:
        sys.argv = argv
    used = (hooks.carry_argument, REDUCER, "custom_megatron_init_path", "custom_config_path")
    lacking = [f"--{name.replace('_', '-')}" for name in used if not hasattr(args, name)]
    if lacking:
        raise FrameworkError(f"its arguments lack {', '.join(lacking)}")
    given = {
        "loss_type": "policy_loss",
        "eps_clip": CLIP,
        "eps_clip_high": CLIP,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "rollout_temperature": 1.0,
    }
    vars(args).update(given)
    return args


def make_samples(drawn: Sequence[Drawn], sample: Any) -> list[Any]:
    """Make a framework's sample of each drawn sequence; it numbers rollouts of one sequence."""
    of_rollout = Counter(one.sample for one in drawn)
    return [
        sample(
            group_index=one.prompt,
            index=100 + index,  # which miles takes for the id of an unsplit rollout
            rollout_id=one.sample if of_rollout[one.sample] > 1 else None,
            tokens=one.tokens.tolist(),
            response_length=len(one.mask),
            reward=0.0,
            loss_mask=one.mask,
            status=sample.Status.COMPLETED,
        )
        for index, one in enumerate(drawn)
    ]


def args_with_weights(hooks: Hooks, aggregation: Aggregation) -> dict[str, Any]:
    """Return a framework's arguments that ask for an aggregation and carry its weights."""
    of_hooks = {
        hooks.carry_argument: hooks.carry_path,
        "custom_megatron_init_path": hooks.check_path,
    }
    return {**args_of(aggregation), **of_hooks}
