"""AReaL: ``ppo_update`` of its Megatron engine, from trajectories to gradients.

Not run: what loads a model, an optimizer, its remote calls, NCCL (torch's way of its reduce-scatter
on gloo fails in a subgroup). Its policy loss has no KL and no entropy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import CLIP, DUAL_CLIP, Drawn, Driver, column
from megatron_lossagg.verify.parallelism import Parallelism

_MICROBATCHES = 3


class FrameworkDriver(Driver):
    """AReaL's engine around a small GPT."""

    function = "areal.engine.megatron_engine.MegatronPPOActor.ppo_update"
    settings: ClassVar[Mapping[str, Aggregation]] = {"the default": Aggregation("token_mean")}
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {"pg_loss": ("pg", 1.0)}

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
        import areal.engine.megatron_engine  # noqa: F401
        from torch.distributed.nn import functional

        gather: Any = functional._AllGather
        gather.backward = staticmethod(reduce_scattered)

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen in its policy loss."""
        from megatron_lossagg.integrations import weigh_rl

        return weigh_rl.install("areal", steps=sys.maxsize, report=report)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Dispatch the trajectories over the ranks, and update the policy once."""
        from areal.api.cli_args import MicroBatchSpec, PPOActorConfig
        from areal.infra.controller.train_controller import _dispatch_tensors
        from areal.utils import stats_tracker
        from megatron.core import parallel_state

        from megatron_lossagg.integrations import areal

        kind = areal.WeighedActor
        if isinstance(trained, Aggregation):
            os.environ.update(areal._variables(trained))
            kind = areal.LossAggregationActor
        splits, _ = _dispatch_tensors(trajectories(self.drawn), self.parallelism.dp)
        self.chunk.zero_grad_buffer()
        spec = MicroBatchSpec(n_mbs=_MICROBATCHES)
        config = PPOActorConfig(mb_spec=spec, ppo_n_minibatches=1)
        config.eps_clip, config.c_clip = CLIP, DUAL_CLIP
        engine = around(kind(config), self.chunk)
        engine.ppo_update(splits[parallel_state.get_data_parallel_rank()])
        group = parallel_state.get_data_parallel_group()
        stats = stats_tracker.export_all(reduce_group=group)
        return {"loss": float(stats["ppo_actor/update/actor_loss/avg"])}


def reduce_scattered(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
    """Return a gather's gradient summed over ranks, as NCCL's reduce-scatter does."""
    import torch.distributed as dist

    summed = torch.stack(grads)
    dist.all_reduce(summed, group=ctx.group)
    return None, summed[dist.get_rank(ctx.group)]


def trajectories(drawn: Sequence[Drawn]) -> list[dict[str, Tensor]]:
    """Return AReaL's list: of each prompt its sequences, padded to the longest."""
    prompts: dict[int, list[Drawn]] = {}
    for one in drawn:
        prompts.setdefault(one.prompt, []).append(one)
    return [_trajectory(sequences) for sequences in prompts.values()]


def _trajectory(sequences: Sequence[Drawn]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(one.tokens) for one in sequences])
    ends, width = (lengths - 1).tolist(), int(lengths.max())  # where the logits are
    tokens = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, one in zip(tokens, sequences, strict=True):
        row[: len(one.tokens)] = one.tokens
    old = column([one.old_log_probs for one in sequences], ends, width)
    return {
        "input_ids": tokens,
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
        "loss_mask": column([one.mask for one in sequences], ends, width),
        "logprobs": old,
        "prox_logp": old,
        "advantages": column([one.advantages for one in sequences], ends, width),
        "tot_rewards": torch.zeros_like(old),
        "kl_rewards": torch.zeros_like(old),
        "rewards": torch.zeros(len(sequences)),
    }


def around(engine: Any, chunk: Any) -> Any:
    """Put AReaL's engine around a wrapped model; return it."""
    from areal.engine import megatron_engine
    from areal.utils import logging
    from megatron.core import parallel_state

    engine.model, engine.device = megatron_engine._MegatronModelList([chunk]), "cpu"
    engine.parallel_strategy = SimpleNamespace(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )
    engine.process_group_initialized = True
    engine.logger = logging.getLogger("lossagg")
    engine.optimizer = SimpleNamespace(
        zero_grad=lambda: None,
        step=lambda: (True, 1.0, None),
        param_groups=[{"lr": 0.0}],
        get_loss_scale=lambda: torch.ones(()),
    )
    return engine
