"""A step as verl's own agent loop makes it: trajectories of several sequences each.

Real: verl's ``AgentLoopWorkerTQ`` from ``_run_prompt`` to ``_agent_loop_postprocess``, and the
sequences that verl adds to make a batch divisible. Not real: the model that generates, and the
queue between verl's workers, a dictionary of rows. ``verl_sessions_worker.py`` trains the step.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import verl.trainer.ppo.padding_utils as padding_utils
import verl.trainer.ppo.v1.agent_loop_tq as agent_loop_tq
from verl.experimental.agent_loop import agent_loop
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


class Queue:
    """The functions of TransferQueue that verl calls here, on rows by key."""

    def __init__(self):
        self.rows, self.failed = {}, []

    async def async_kv_put(self, key, partition_id, tag):
        if tag["status"] == "failure":
            self.failed.append(key)

    async def async_kv_batch_put(self, **given):
        self.kv_batch_put(**given)

    def kv_batch_put(self, keys, partition_id, fields, tags):
        for place, key in enumerate(keys):
            row = {name: values[place] for name, values in fields.items()}
            self.rows[key] = {name: getattr(one, "data", one) for name, one in row.items()} | {
                name: one for name, one in row.items() if isinstance(one, torch.Tensor)
            }

    def kv_batch_get(self, keys, partition_id):
        return [self.rows[key] for key in keys]


@dataclass
class Meta:
    """TransferQueue's ``KVBatchMeta``: the keys of a batch's rows."""

    keys: list
    tags: list
    partition_id: str
    fields: list | None = None
    extra_info: dict = field(default_factory=dict)

    def __len__(self):
        return len(self.keys)


class Replay:
    """An agent loop that returns what was drawn, each session's sequences as its outputs."""

    def __init__(self, sessions):
        self.sessions = sessions

    async def run(self, sampling_params, *, uid, session_id, **_):
        return [
            agent_loop.AgentLoopOutput(
                prompt_ids=one["tokens"][: -one["response"]],
                response_ids=one["tokens"][-one["response"] :],
                response_mask=one["mask"],
                response_logprobs=one["old"].tolist(),
                reward_score=1.0,
                num_turns=2,
                metrics={},
                extra_fields={"reward_extra_info": {}},
            )
            for one in self.sessions[uid][session_id]
        ]


def sessions_of(step):
    """Group a step's sequences: of each prompt, of each of its rollouts."""
    rollouts = [list(of_one) for _, of_one in itertools.groupby(step, lambda one: one["rollout"])]
    prompts = itertools.groupby(rollouts, lambda of_one: of_one[0]["uid"])
    return {uid: list(of_prompt) for uid, of_prompt in prompts}


def worker_of(loop):
    """Make verl's worker around an agent loop, without its constructor's model and servers."""
    agent_loop._agent_loop_registry["replay"] = loop
    agent_loop.hydra = SimpleNamespace(
        utils=SimpleNamespace(instantiate=lambda config, **_: config)
    )
    worker = object.__new__(agent_loop_tq.AgentLoopWorkerTQ)
    rollout = SimpleNamespace(n=1)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), data={})
    vars(worker).update(
        config=config,
        llm_client=None,
        tokenizer=None,
        processor=None,
        hf_model_type=None,
        mm_processor_kwargs={},
        dataset_cls=None,
        tools=[],
        reward_loop_worker_handles=None,
        distillation_enabled=False,
    )
    return worker


def rows_of(step, multiple):
    """Return the step's sequences as rows of verl's, padded to a multiple; and their drawn ones."""
    queue, sessions = Queue(), sessions_of(step)
    agent_loop_tq.tq = padding_utils.tq = queue
    worker = worker_of(Replay(sessions))
    for uid, of_prompt in sessions.items():
        prompt = {"uid": uid, "agent_name": "replay", "raw_prompt": [], "global_steps": 1}
        trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
        given = {**prompt, "__rollout_n__": len(of_prompt)}
        asyncio.run(worker._run_prompt(given, {}, trajectory))
    assert not queue.failed
    keys = list(queue.rows)
    assert len(keys) == len(step)
    padding_utils.KVBatchMeta = Meta
    meta = Meta(keys, [{} for _ in keys], "train")
    meta = padding_utils.upsample_batch_to_divisible_size(meta, multiple, eos_token_id=0)
    drawn = {
        f"{uid}_{session}_{index}": one
        for uid, of_prompt in sessions.items()
        for session, outputs in enumerate(of_prompt)
        for index, one in enumerate(outputs)
    }
    return [(queue.rows[key], drawn.get(key)) for key in meta.keys]


def batch_of(rows):
    """Put rows into a batch with what verl's trainer computes of them before the actor's step."""
    made = []
    for row, one in rows:
        of_trainer = {"old_log_probs": "old", "ref_log_prob": "ref", "advantages": "advantage"}
        one = one or dict.fromkeys(of_trainer.values(), torch.ones(1, dtype=torch.float64))
        made.append({**row, **{name: one[drawn] for name, drawn in of_trainer.items()}})
    for row in made:
        row["temperature"] = torch.ones(())
    return list_of_dict_to_tensordict(made)
