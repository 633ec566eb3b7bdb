"""NeMo-RL's own ``grpo_train`` with given rollouts, until it calls the policy's ``train``."""

from collections import defaultdict
from types import SimpleNamespace

import imports_nemo_rl  # noqa: F401  first
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cases import PROMPTS, SAMPLES, config, drawn

MASKED_PROMPT, EMPTY_PROMPT = 2, 4
"""A prompt whose sample_mask is 0 everywhere, and one with no active tokens."""
TRUNCATED = (1, 18)
"""Sequences whose sample_mask becomes 0, as too long ones."""


def prompts():
    """Return the data loader's batch: one user message per prompt."""
    lengths = [2 + number % 3 for number in range(PROMPTS)]
    logs = [
        [{"role": "user", "content": "", "token_ids": torch.arange(n) + number + 1}]
        for number, n in enumerate(lengths)
    ]
    counted = torch.ones(PROMPTS)
    counted[MASKED_PROMPT] = 0
    return BatchedDataDict(
        message_log=logs,
        length=torch.tensor(lengths),
        loss_multiplier=counted,
        extra_env_info=[None] * PROMPTS,
        idx=list(range(PROMPTS)),
        task_name=["task"] * PROMPTS,
    )


def rollouts(*, input_batch, **_):
    """In place of generation and environments: answers, rewards, and which were truncated."""
    rewards = []
    for sequence, log in enumerate(input_batch["message_log"]):
        length = 1 + (7 * sequence + sequence // 5) % 6
        tokens = torch.arange(length) * 3 % 11 + sequence % 5
        answer = {"role": "assistant", "content": "", "token_ids": tokens}
        if sequence // SAMPLES == EMPTY_PROMPT:
            answer["role"] = "environment"
        else:
            answer["generation_logprobs"] = (-2 + 0.1 * drawn(sequence, length)).float()
        log.append(answer)
        rewards.append((sequence * sequence) % 7 / 7.0)
    truncated = torch.zeros(len(rewards), dtype=torch.bool)
    truncated[list(TRUNCATED)] = True
    input_batch["total_reward"], input_batch["truncated"] = torch.tensor(rewards), truncated
    return input_batch, defaultdict(float)


class Trained(Exception):  # noqa: N818
    """Ends ``grpo_train`` where it has called the policy's ``train``."""


class Nothing:
    """A logger, a checkpointer, a generation: every method returns None."""

    weight_synchronizer = None

    def __getattr__(self, name):
        if name == "requires_kv_scale_sync":
            raise AttributeError(name)
        return lambda *_, **__: None


class Policy(Nothing):
    """In place of the policy: fixed log-probabilities; ``train`` keeps what it is given."""

    def get_logprobs(self, data, **_):
        return {"logprobs": -2 + 0.2 * drawn(101, *data["input_ids"].shape)}

    def get_reference_policy_logprobs(self, data, **_):
        return {"reference_logprobs": -2 + 0.2 * drawn(102, *data["input_ids"].shape)}

    def train(self, data, loss_fn, **_):
        self.data, self.loss_fn = data, loss_fn
        raise Trained


def train_data(loss_fn):
    """Run NeMo-RL's trainer until it trains; return the batch for the policy."""
    from nemo_rl.algorithms import grpo

    grpo.run_multi_turn_rollout = rollouts
    grpo.refit_policy_generation = lambda *_, **__: {}
    grpo.should_use_async_rollouts = lambda _: False
    policy, batches, tokenizer = Policy(), [prompts()], SimpleNamespace(pad_token_id=0)
    state = grpo._initial_grpo_save_state()
    try:
        grpo.grpo_train(
            policy, Nothing(), batches, None, tokenizer, loss_fn, {}, None, Nothing(), Nothing(),
            state, config(),
        )  # fmt: skip
    except Trained:
        assert policy.loss_fn is loss_fn
    return policy.data
