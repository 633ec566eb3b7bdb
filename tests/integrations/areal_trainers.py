"""AReaL's own trainers, in our subclass, make engines of ours, which its workers import by name.

``areal_trainers.py CHECKOUT``. Real: how the trainers choose an engine, the controllers, what they
tell a scheduler to start, the import by name. Not real: the scheduler.
"""

import os
from types import SimpleNamespace

import areal_first  # before AReaL and Megatron-Core
import pytest
from areal.api.cli_args import PPOActorConfig, SchedulingSpec, TrainEngineConfig
from areal.trainer.rl_trainer import PPOTrainer
from areal.trainer.rw_trainer import RWTrainer
from areal.trainer.sft_trainer import SFTTrainer
from areal.utils.dynamic_import import import_from_string

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import areal

AGGREGATION = Aggregation("constant", divisor=4096, count_empty=False)
MEGATRON = SimpleNamespace(backend="megatron", parallel=None)
FSDP = SimpleNamespace(backend="fsdp", parallel=None)


def trainer_of(base, config):
    made = object.__new__(areal.aggregated(base, AGGREGATION))
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
    assert [one.__name__ for one in engine.__mro__[2:3]] == [base], engine.__mro__
    (spec,) = controller.config.scheduling_spec
    os.environ.update(spec.env_vars)  # as its scheduler does in a worker
    assert areal._of_environment() == AGGREGATION


def main():
    actor, ref = (PPOActorConfig(scheduling_spec=specs()) for _ in range(2))
    trainer = trainer_of(PPOTrainer, SimpleNamespace(actor=actor, teacher=None))
    check(trainer._create_train_engine(actor, MEGATRON), "MegatronPPOActor")
    controller = trainer._create_train_engine(ref, MEGATRON)
    assert path_of(controller) == "areal.engine.megatron_engine.MegatronPPOActor"
    assert not ref.scheduling_spec[0].env_vars
    with pytest.raises(ContractError, match=r"got the engine areal.*FSDPPPOActor"):
        trainer._create_train_engine(actor, FSDP)
    config = TrainEngineConfig(scheduling_spec=specs())
    trainer = trainer_of(SFTTrainer, SimpleNamespace(actor=config))
    check(trainer._create_actor(config), "MegatronLMEngine")
    trainer = trainer_of(RWTrainer, SimpleNamespace(actor=config))
    with pytest.raises(ContractError, match=r"got the engine areal.*MegatronRWEngine"):
        trainer._create_actor(config)
    print("trainers: as expected")


if __name__ == "__main__":
    assert areal_first.CHECKOUT
    main()
