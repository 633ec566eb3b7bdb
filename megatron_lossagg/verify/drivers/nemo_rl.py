"""NeMo-RL: its policy's split of a batch, and ``train`` of its Megatron policy worker.

The policy loss and its KL are divided by the step's counts in the loss function. Not run: Ray, what
loads a model, an optimizer.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import CLIP, DUAL_CLIP, KL, Drawn, Driver, column
from megatron_lossagg.verify.drivers.imports import packed_seq_params, without_nvtx
from megatron_lossagg.verify.parallelism import Parallelism

_MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "token_sum")
_MOST_TOKENS, _SEQUENCES = 40, 2
"""Of a microbatch: of packed sequences, which NeMo-RL needs with context parallelism, and not."""


class FrameworkDriver(Driver):
    """NeMo-RL's policy worker around a small GPT."""

    function = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorkerImpl.train"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "token_level_loss=True": Aggregation("token_mean"),
        "token_level_loss=False": Aggregation("sample_mean"),
    }
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {
        "actor_loss": ("pg", 1.0),
        "kl": ("penalty", 1.0),
    }
    per_token = True

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        self.module = worker_module()
        from nemo_rl.algorithms.loss import loss_functions  # noqa: F401
        from nemo_rl.models.policy import lm_policy  # noqa: F401

    @classmethod
    def trains(cls, aggregation: Aggregation) -> bool:
        """Whether it is one of the modes that the loss function can divide by."""
        return aggregation.mode in _MODES and aggregation.count_empty is not False

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen in what reduces losses."""
        from megatron_lossagg.integrations import weigh_rl

        return weigh_rl.install("nemo-rl", steps=sys.maxsize, report=report)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Split the batch over the ranks, and train one step."""
        from megatron.core import parallel_state

        is_packed = self.parallelism.cp > 1
        policy_config = config(self.parallelism, is_packed=is_packed)
        worker = worker_of(
            self.module.MegatronPolicyWorkerImpl, self.chunk, policy_config, _Optimizer()
        )
        shards = sharded(data_of(self.drawn), policy_config, self.parallelism.dp, len(self.drawn))
        shard = shards[parallel_state.get_data_parallel_rank()]
        self.chunk.zero_grad_buffer()
        size = 1 if is_packed else _SEQUENCES
        metrics = worker.train(shard, loss_of(trained), gbs=len(self.drawn), mbs=size)
        return {"loss": metrics["global_loss"].double().sum().item()}


class _Nothing:
    """A scheduler, a timer: every method returns None."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Optimizer(_Nothing):
    """Changes no weight."""

    grad_norms_by_group: Mapping[str, float] = {}
    param_groups: Sequence[Any] = ({},)

    def step(self) -> tuple[bool, float, int]:
        """Do nothing, well."""
        return True, 0.0, 0


def loss_of(trained: str | Aggregation) -> Any:
    """Return NeMo-RL's policy loss with KL, under a setting of its own or a mode of ours."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from megatron_lossagg.integrations.nemo_rl import aggregated

    level = trained != "token_level_loss=False"
    own = ClippedPGLossFn(
        ClippedPGLossConfig(
            ratio_clip_min=CLIP,
            ratio_clip_max=CLIP,
            ratio_clip_c=DUAL_CLIP,
            reference_policy_kl_penalty=KL,
            token_level_loss=level,
        )
    )
    if isinstance(trained, str):
        return own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of losses that a model adds
        return aggregated(own, trained)


def config(parallelism: Parallelism, *, is_packed: bool) -> Any:
    """Return the policy's part of NeMo-RL's own configuration of GRPO on Megatron."""
    import nemo_rl
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    checkout = Path(next(iter(nemo_rl.__path__))).parent
    file = checkout / "examples/configs/grpo_math_1B_megatron.yaml"
    made = MasterConfig(**OmegaConf.to_container(load_config(file), resolve=True)).policy
    made["make_sequence_length_divisible_by"] = 4
    made["sequence_packing"] |= {"enabled": is_packed, "train_mb_tokens": _MOST_TOKENS}
    made["dynamic_batching"] |= {"enabled": False}
    made["megatron_cfg"]["context_parallel_size"] = parallelism.cp
    # As this model is wrapped.
    made["megatron_cfg"]["distributed_data_parallel_config"]["overlap_grad_reduce"] = False
    return made


def data_of(drawn: Sequence[Drawn]) -> Any:
    """Return the trainer's batch; the first token of a sequence has no loss."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    ends = [len(one.tokens) for one in drawn]
    width = -(-max(ends) // 4) * 4
    names = ("tokens", "mask", "advantages", "old_log_probs", "ref_log_probs")
    columns = {name: column([getattr(one, name) for one in drawn], ends, width) for name in names}
    return BatchedDataDict(
        {
            "input_ids": columns["tokens"].long(),
            "input_lengths": torch.tensor(ends),
            "token_mask": columns["mask"],
            "sample_mask": torch.ones(len(drawn)),
            "advantages": columns["advantages"],
            "prev_logprobs": columns["old_log_probs"],
            "generation_logprobs": columns["old_log_probs"],
            "reference_policy_logprobs": columns["ref_log_probs"],
        }
    )


def sharded(data: Any, policy_config: Any, dp_size: int, sequences_per_step: int) -> Any:
    """Split a batch over data-parallel ranks as NeMo-RL's policy does."""
    from nemo_rl.models.policy.lm_policy import Policy

    class OfSize(Policy):  # type: ignore[misc]
        """A policy of as many data-parallel ranks."""

        data_parallel_size = dp_size

    policy: Any = object.__new__(OfSize)
    packing = policy_config["sequence_packing"]
    policy.cfg = policy_config
    policy.use_dynamic_batches = policy_config["dynamic_batching"]["enabled"]
    policy.use_sequence_packing = packing["enabled"]
    keys = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    policy.dynamic_batching_args = {**keys, "sequence_length_round": 4}
    policy.sequence_packing_args = {
        **keys,
        "algorithm": packing["algorithm"],
        "sequence_length_pad_multiple": policy_config["make_sequence_length_divisible_by"],
    }
    return policy._shard_for_train(data, sequences_per_step)


def worker_module() -> Any:
    """Import NeMo-RL's worker, with what newer releases of Megatron-Core have."""
    import megatron.core.dist_checkpointing.strategies.torch as checkpoints
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as fsdp
    import transformers

    transformers.AutoProcessor  # noqa: B018  which loads transformers anew
    loaded: Any = sys.modules["transformers"]
    loaded.__version__ = "5.11.0"  # its patch of a tokenizer asserts it
    for module, names in (
        (checkpoints, ["get_async_strategy"]),
        (fsdp, ["FullyShardedDataParallelV1", "FullyShardedDataParallelV2"]),
    ):
        for name in names:
            if not hasattr(module, name):
                setattr(module, name, fsdp.FullyShardedDataParallel)
    generation: Any = types.ModuleType("nemo_rl.models.generation.megatron.megatron_worker")
    for name in ("MegatronGenerationMixin", "MegatronGenerationRefitMixin"):
        setattr(generation, name, type(name, (), {}))
    sys.modules[generation.__name__] = generation
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.policy.workers import megatron_policy_worker

    # Of Megatron-LM: a causal mask, which is this model's attention's own, and positions.
    data: Any = sys.modules["nemo_rl.models.megatron.data"]
    data.get_ltor_masks_and_position_ids = lambda data, **_: (
        (None, None, torch.arange(data.shape[1]).expand_as(data))
    )
    data.PackedSeqParams = packed_seq_params()
    # Over the ranks of one model: they have equal values here.
    worker: Any = megatron_policy_worker
    worker.get_pg_collection = lambda model: SimpleNamespace(mp=None)
    worker.logical_and_across_model_parallel_group = lambda value, mp_group: value
    worker.reduce_max_stat_across_model_parallel_group = lambda value, mp_group: value
    setattr(torch.cuda, "get_device_name", lambda: "cpu")  # noqa: B010  it has arguments
    without_nvtx()
    BatchedDataDict.to = lambda self, device, **_: self
    return worker


def worker_of(kind: Any, chunk: Any, policy_config: Any, optimizer: Any) -> Any:
    """Return a worker around a wrapped model."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    worker = object.__new__(kind)
    vars(worker).update(
        cfg=policy_config, dp_size=parallel_state.get_data_parallel_world_size(), model=chunk,
        optimizer=optimizer, scheduler=_Nothing(), timer=_Nothing(),
        dtype=torch.get_default_dtype(), draft_model=None, sampling_params=None,
        media_placeholder_token_id=None, defer_fp32_logits=False,
        mcore_state=SimpleNamespace(straggler_timer=None), delegate_pack_to_model=False,
        delegate_mtp_loss_mask_to_model=False, model_slices_context_parallel_inputs=False,
        _router_replay_enabled=False, _first_train_step_forward_pre_hook_disabled=False,
        should_disable_forward_pre_hook=False, _policy_like_cfg=policy_config,
        rank=dist.get_rank(), megatron_cfg=SimpleNamespace(optimizer=None, ddp=None),
    )  # fmt: skip
    return worker
