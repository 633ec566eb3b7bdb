"""verl as its page starts it, and where its trainer is to start its workers."""

import os

import page_lines
import page_stops
import stand_ins

GIVEN = (
    "trainer.n_gpus_per_node=2",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
)


def start(folder):
    """Start verl; return the engine of its workers and the aggregation."""
    model = page_lines.tiny_model(folder)
    paths = [f"{part}.model.path={model}" for part in ("actor_rollout_ref", "critic")]
    command = page_lines.words(page_lines.blocks("verl", "sh")[0], *GIVEN, *paths)
    found, done = page_lines.started(command, folder, "verl_page")
    assert found is not None, done.stderr[-4000:]
    return found


def stop():
    """verl's trainer, where it is to start its workers; its task has their environment."""
    if page_stops.is_rays_own():
        return
    stand_ins.install(stand_ins.DATA, stand_ins.ENGINES, stand_ins.AGENT_LOOP)
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # of which there is none
    page_stops.once_imported("verl.trainer.ppo.v1.trainer_base", _stops)


def _stops(module):
    def init(trainer):
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.engine import EngineRegistry

        actor = trainer.config.actor_rollout_ref.actor
        (mode, *_) = get_policy_loss_fn(actor.policy_loss.loss_mode).args
        page_stops.reached(
            engine=EngineRegistry.get_engine_cls("language_model", actor.strategy).__module__,
            aggregation=str(mode.aggregation(actor.loss_scale_factor)),
        )

    module.PPOTrainer.init = init
