"""AReaL's trainers make engines of ours, and its losses are proportional to advantages.

``areal_trainers.py CHECKOUT``. Real: its loss function, how its trainers choose an engine, the
controllers, what they tell a scheduler to start, the import by name. Not real: the scheduler, and
the parser of ``actor.backend``.
"""

import os
from itertools import pairwise
from types import SimpleNamespace

import areal_first  # before AReaL and Megatron-Core
import pytest
import torch
from areal.api.cli_args import (
    PPOActorConfig,
    RejectionSamplingConfig,
    SchedulingSpec,
    TrainEngineConfig,
)
from areal.infra.controller import train_controller
from areal.trainer.ppo.actor import grpo_loss_fn
from areal.trainer.rl_trainer import PPOTrainer
from areal.trainer.rw_trainer import RWTrainer
from areal.trainer.sft_trainer import SFTTrainer
from areal.utils import stats_tracker
from areal.utils.dynamic_import import import_from_string
from ranks import leave

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.integrations import areal

AGGREGATION = Aggregation("constant", divisor=4096, count_empty=False)
MEGATRON = SimpleNamespace(backend="megatron", parallel=None)
# Its parser, a stand-in here, reads "megatron:d2" to this.
train_controller.ModelAllocation = SimpleNamespace(from_str=lambda backend: MEGATRON)
FSDP = SimpleNamespace(backend="fsdp", parallel=None)


def trainer_of(base, config, *, aggregation=AGGREGATION):
    made = object.__new__(areal.aggregated(base, aggregation))
    made.config, made.scheduler, made.actor_alloc = config, None, MEGATRON
    return made


def specs():
    return (SchedulingSpec(cmd="python -m areal.infra.rpc.rpc_server"),)


def path_of(controller):
    """Return what AReaL's controller tells its workers to import."""
    return f"{controller.train_engine.__module__}.{controller.train_engine.__name__}"


def check(controller, base):
    engine = import_from_string(path_of(controller))
    assert engine is controller.train_engine
    assert base in [one.__name__ for one in engine.__mro__[1:3]], engine.__mro__
    (spec,) = controller.config.scheduling_spec
    os.environ.update(spec.env_vars)  # as its scheduler does in a worker
    assert areal._of_environment() == AGGREGATION


def check_weighed(config):
    """AReaL's own weights, and the variable that weighs, reach the workers of a policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSSAGG_WEIGH", "1")
        trainer = trainer_of(PPOTrainer, config, aggregation=None)
        controller = trainer._create_train_engine(config.actor, MEGATRON)
        assert path_of(controller) == "megatron_lossagg.integrations.areal.WeighedActor"
        assert import_from_string(path_of(controller)) is controller.train_engine
        assert config.actor.scheduling_spec[0].env_vars["LOSSAGG_WEIGH"] == "1"
        for aggregation in (None, AGGREGATION):
            trainer = trainer_of(SFTTrainer, config, aggregation=aggregation)
            with pytest.raises(ContractError, match="AReaL's SFT is not weighed"):
                trainer._create_actor(config.actor)


def check_refused(config):
    """Where AReaL's constructor of an SFT trainer makes its actor."""
    trainer = trainer_of(SFTTrainer, config, aggregation=Aggregation("prompt_mean"))
    with pytest.raises(AggregationError, match="AReaL's SFT has no prompt ids"):
        trainer._create_actor(config.actor)


def losses_of(data, scale_S, cu_seqlens, **options):
    """Return AReaL's policy loss of packed sequences times its tokens, and its gradient."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    scale_T = scale_S.repeat_interleave(torch.tensor(lengths))
    logprobs = data["new"].clone().requires_grad_()
    given = {name: data[name] for name in ("logprobs", "prox_logp", "loss_mask")}
    given["advantages"] = data["advantages"] * scale_T
    given["cu_seqlens"] = torch.tensor(cu_seqlens)
    clips = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": 3.0}
    with stats_tracker.scope("loss"):
        loss = grpo_loss_fn(logprobs, torch.zeros(len(logprobs)), given, **{**clips, **options})
    stats_tracker.export_all()
    loss = loss * data["loss_mask"].sum()
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def check_proportional(**options):
    """Sequences packed with scaled advantages have the scaled losses of each by itself."""
    torch.manual_seed(5)
    data = {name: 0.4 * torch.randn(12) for name in ("new", "logprobs", "prox_logp", "advantages")}
    data["loss_mask"] = (torch.rand(12) < 0.7).float()
    bounds, scale_S = [0, 3, 8, 12], torch.tensor([0.25, 3.0, 1.5])
    got = losses_of(data, scale_S, bounds, **options)
    value, grads = 0.0, []
    for (start, end), scale in zip(pairwise(bounds), scale_S, strict=True):
        one = {name: values[start:end] for name, values in data.items()}
        loss, grad = losses_of(one, torch.ones(1), [0, end - start], **options)
        value, grads = value + scale * loss, [*grads, scale * grad]
    assert torch.allclose(got[0], value, rtol=1e-5), options
    assert torch.allclose(got[1], torch.cat(grads), rtol=1e-5, atol=1e-6), options
    assert got[1].abs().max() > 0.01, options


def main():
    check_proportional()
    check_proportional(importance_sampling_level="sequence")
    check_proportional(use_sapo_loss=True)
    for level in ("token", "sequence"):
        for action in ("mask", "clamp"):
            rejected = {"level": level, "action": action, "metric": "ratio", "upper": 1.2}
            sampling = RejectionSamplingConfig(**rejected)
            check_proportional(rejection_sampling=sampling, use_decoupled_loss=True)
    actor, ref = (PPOActorConfig(scheduling_spec=specs()) for _ in range(2))
    trainer = trainer_of(PPOTrainer, SimpleNamespace(actor=actor, teacher=None))
    check(trainer._create_train_engine(actor, MEGATRON), "MegatronPPOActor")
    check_weighed(SimpleNamespace(actor=actor, teacher=None))
    controller = trainer._create_train_engine(ref, MEGATRON)
    assert path_of(controller) == "areal.engine.megatron_engine.MegatronPPOActor"
    assert not ref.scheduling_spec[0].env_vars
    with pytest.raises(ContractError, match=r"got the engine areal.*FSDPPPOActor"):
        trainer._create_train_engine(actor, FSDP)
    config = TrainEngineConfig(scheduling_spec=specs())
    trainer = trainer_of(SFTTrainer, SimpleNamespace(actor=config))
    check(trainer._create_actor(config), "MegatronLMEngine")
    check_refused(SimpleNamespace(actor=config))
    trainer = trainer_of(RWTrainer, SimpleNamespace(actor=config))
    with pytest.raises(ContractError, match=r"got the engine areal.*MegatronRWEngine"):
        trainer._create_actor(config)
    print("losses and trainers: as expected")


if __name__ == "__main__":
    assert areal_first.CHECKOUT
    main()
    leave()  # of the controllers
