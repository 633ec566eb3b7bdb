"""verl: its Megatron engine's ``forward_backward_batch``, from the trainer's batch to gradients.

Not run: the engine's constructor, which builds models from Hugging Face configurations. With
context parallelism what builds them sets ``calculate_per_token_loss``, and so does this driver.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import DIVISOR, ENTROPY, KL, Drawn, Driver
from megatron_lossagg.verify.parallelism import Parallelism

_LOGGED = {
    "pg_loss": "actor/pg_loss",
    "kl_loss": "kl_loss",
    "entropy_loss": "actor/entropy_loss",
}


class FrameworkDriver(Driver):
    """verl's engine around a small GPT."""

    function = "verl.workers.engine.megatron.transformer_impl.MegatronEngine.forward_backward_batch"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "token-mean": Aggregation("token_mean"),
        "seq-mean-token-mean": Aggregation("sample_mean"),
        "seq-mean-token-sum": Aggregation("sample_sum"),
        "seq-mean-token-sum-norm": Aggregation("constant", divisor=DIVISOR),
    }
    lacks = frozenset(("length_power",))  # verl's configuration has no name for its exponent

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        # As its users set them; read when verl loads its plugins.
        os.environ |= {"VERL_ENGINE_VENDOR": "lossagg", "VERL_ENGINE_DEVICE": "cuda"}
        import verl.workers.engine.megatron.transformer_impl as megatron_engine
        import verl.workers.utils.losses as losses
        from verl.workers.engine import EngineRegistry

        megatron_engine.get_device_id = lambda: "cpu"
        self._loss = losses.ppo_loss
        self._engine_class = EngineRegistry.get_engine_cls("language_model", "megatron")

    def start(self) -> None:
        """Make the engine around the model."""
        self.chunk = self.wrapped(per_token=self.parallelism.cp > 1)
        self.engine = engine_around(self._engine_class, self.chunk)

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen in what calls ``agg_loss``."""
        from megatron_lossagg.integrations import weigh_rl

        return weigh_rl.install("verl", steps=sys.maxsize, report=report)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Train this rank's sequences in microbatches of two or one."""
        mine = self.mine()
        batch = batch_of(mine, size=2 - len(mine) % 2, of_step=len(self.drawn))
        self.chunk.zero_grad_buffer()
        config = actor_config(trained)
        output = self.engine.forward_backward_batch(batch, partial(self._loss, config=config))
        return {name: self._logged(output["metrics"][key]) for name, key in _LOGGED.items()}

    def _logged(self, metrics: Any) -> float:
        """Aggregate as verl's trainer does: the sum over microbatches, the mean over ranks."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        metrics = metrics if isinstance(metrics, list) else [metrics]
        total = torch.tensor(
            sum(float(torch.as_tensor(value).sum()) for one in metrics for value in one.values)
        )
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.item() / self.parallelism.dp


def engine_around(engine_class: Any, chunk: Any) -> Any:
    """Return verl's engine around a wrapped model."""
    from megatron.core import parallel_state

    engine = object.__new__(engine_class)
    engine.tokens_of = {}
    engine.engine_config = SimpleNamespace(
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        dynamic_context_parallel=False,
        pad_bshd_to_minibatch_max=True,
        use_remove_padding=True,
        use_fused_kernels=False,
        pad_to_length=False,
        entropy_from_logits_with_chunking=False,
        router_replay=SimpleNamespace(mode="disabled"),
    )
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["SmallGPT"]),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine.tf_config = chunk.config
    engine.enable_routing_replay = False
    engine.module = [chunk]
    # verl all-reduces this count in place; on a GPU it is a copy, on the CPU the batch's offsets.
    count = engine._routed_num_tokens
    engine._routed_num_tokens = lambda data: count(data).clone()
    return engine


def batch_of(sequences: Sequence[Drawn], *, size: int, of_step: int) -> Any:
    """Make a rank's batch, as the trainer passes it to ``update_actor``."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    whole, n_S = [one.tokens for one in sequences], [len(one.mask) for one in sequences]
    masks = nested([torch.tensor(one.mask) for one in sequences])
    fields = {
        "input_ids": nested(whole),
        "prompts": nested([t[:-n] for t, n in zip(whole, n_S, strict=True)]),
        "responses": nested([t[-n:] for t, n in zip(whole, n_S, strict=True)]),
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": nested([one.old_log_probs.float() for one in sequences]),
        "ref_log_prob": nested([one.ref_log_probs.float() for one in sequences]),
        "advantages": nested([one.advantages.float() for one in sequences]),
        "temperature": torch.ones(len(sequences)),
    }
    batch = TensorDict(fields, batch_size=len(sequences))
    tu.assign_non_tensor_stack(batch, "uid", [f"p{one.prompt}" for one in sequences])
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=size,
        global_batch_size=of_step,
        calculate_entropy=True,
    )
    return batch


def actor_config(trained: str | Aggregation) -> Any:
    """Make verl's ``ActorConfig`` with a setting of its own, or a mode of ours."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    given: dict[str, Any] = {"loss_scale_factor": None}
    if isinstance(trained, Aggregation):
        from megatron_lossagg.integrations.verl import LossMode

        name = LossMode(trained.mode, trained.count_empty is not False, "vanilla").name
        given |= {"policy_loss": PolicyLossConfig(loss_mode=name)}
        given["loss_scale_factor"] = trained.divisor
    else:
        given["loss_agg_mode"] = trained
        if trained.endswith("-norm"):
            given["loss_scale_factor"] = DIVISOR
    return ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_kl_loss=True,
        kl_loss_coef=KL,
        entropy_coeff=ENTROPY,
        **given,
    )
