"""One run of ms-swift's own ``MegatronGRPOTrainer.train`` on the CPU, with what tests compare.

``swift_grpo_worker.py FILE AGGREGATION CP LOSS_SCALING LAYOUT [ARGUMENT=VALUE ...]``: a rollout,
its two steps and an evaluation, in float64; ``LAYOUT``: ``packed`` (padding-free) or ``padded``.
Its own: the trainer with its rollout buffer, rewards, advantages, old and reference
log-probabilities, collation, slices and gathers for context parallelism, forward step, loss, log
and optimizer. Not its own: the model (Megatron-Core's on the CPU), the engine that generates, what
a template encodes, its arguments' defaults without their checks, checkpoints. The last rank writes
what ms-swift logs to FILE as JSON, with each step's gradient, and rank 0, if it is the only one,
the loss of each step and its gradient by loops over completions and tokens. AGGREGATION ``stock``:
``install`` is left out; ``shadow``: it asks for shadows only. A refusal is printed by every rank.
With ``weigh=true`` the file has each step's tokens and weights, and the drawn tokens.
"""

import math
import tempfile
from types import SimpleNamespace

import imports_swift  # noqa: F401  first
import swift_worker
import tiny_gpt
import torch
import torch.distributed as dist
from accelerate import PartialState
from megatron.core import parallel_state
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.trainers import grpo_trainer
from swift.megatron.utils import wrap_model

import megatron_lossagg.cpu as cpu
from megatron_lossagg.integrations import weigh_rl
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify.step_data import VOCABULARY

GROUP, BATCH, STEPS = 4, 16, 2
"""Completions of a prompt and of a step, and steps of a rollout, which is a run."""
WIDTH = 9
"""``max_completion_length``."""


def completion_of(row, number, *, seed):
    """Draw a completion: its prompt, its tokens, which of them are trained, its rollout."""
    draw = torch.Generator().manual_seed(1_000 * seed + 10 * row + number)
    prompt = torch.Generator().manual_seed(1_000 * seed + row)

    def tokens(length, generator):
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    length = int(torch.randint(1, WIDTH + 1, (1,), generator=draw))
    trained = (torch.rand(length, generator=draw) < 0.8).tolist()
    trained[-1] = True  # the token that ended it
    return SimpleNamespace(
        row=row,
        prompt=tokens(2 + row % 3, prompt),
        tokens=tokens(length, draw),
        trained=trained,
        reward=int(torch.randint(-4, 5, (1,), generator=draw)) / 4,
        is_truncated=length == WIDTH,
        log_probs=(-1 - 3 * torch.rand(length, generator=draw)).tolist(),
    )


class Prompts(torch.utils.data.Dataset):
    """Rows of a data set; the completions of each are drawn from its number."""

    def __init__(self, rows, *, seed):
        self.rows, self.seed = rows, seed

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        return {"messages": [{"role": "user", "content": str(row)}], "row": row, "seed": self.seed}


def encoded(sample, template):
    """Encode a sample as ms-swift's templates do."""
    drawn = completion_of(**sample.rollout_infos)
    tokens = drawn.prompt + drawn.tokens
    labels = [t if on else -100 for t, on in zip(drawn.tokens, drawn.trained, strict=True)]
    labels = [-100] * len(drawn.prompt) + labels
    return {"input_ids": tokens, "labels": labels, "length": len(tokens)}


def reward(completions, *, rollout_infos, **_):
    """Return the drawn reward of each completion."""
    return [completion_of(**infos).reward for infos in rollout_infos]


class Trainer(grpo_trainer.MegatronGRPOTrainer):
    """ms-swift's trainer on a model for the CPU, without an engine."""

    def prepare_model(self):
        per_token = self.args.calculate_per_token_loss
        # The trainer computes in float32: one layer leaves an error of 1.01e-6, two 7.6e-7.
        config = tiny_gpt.config_of(per_token=per_token, num_layers=2)
        self.unwrapped_models = [tiny_gpt.gpt(config, cpu.gpt_layer_spec(config))]
        self.ref_models = [tiny_gpt.gpt(config, cpu.gpt_layer_spec(config))]
        cpu.initialize_weights(self.ref_models, seed=4)
        self.ref_models[0].requires_grad_(False)
        self.config, self.bridge, self.peft_models = config, None, []
        self.wrapped_models = wrap_model(self.args, self.unwrapped_models)

    def _move_model_to_vllm(self):
        """Keep no engine."""

    def _rollout(self, samples):
        """Return what an engine would: drawn completions; the place in a group is the position."""
        first = dist.get_rank(group=self._get_rollout_group()) * len(samples)
        outputs = []
        for number, sample in enumerate(samples, first):
            infos = {"row": sample.extra["row"], "number": number % GROUP}
            infos["seed"] = sample.extra["seed"]
            drawn = completion_of(**infos)
            sampled = zip(drawn.log_probs, drawn.trained, strict=True)
            choice = SimpleNamespace(
                message=SimpleNamespace(content="drawn"),
                token_ids=drawn.tokens,
                logprobs={"content": [{"logprob": x} for x, on in sampled if on]},
                finish_reason="length" if drawn.is_truncated else "stop",
            )
            outputs.append(
                SimpleNamespace(
                    response=SimpleNamespace(choices=[choice]),
                    messages=None,
                    response_token_ids=[],
                    rollout_logprobs=[],
                    rollout_infos=infos,
                )
            )
        return outputs

    def _replace_data_iterator(self, data_iterator):
        made = super()._replace_data_iterator(data_iterator)
        if dist.get_world_size() == 1 and self.unwrapped_models[0].training:
            if self._step == 1:
                self.old = old_log_probs(self)
            self.written["by_hand"].append(by_hand(self, self._step - 1))
        return made

    def save_checkpoint(self):
        """Keep nothing."""


def completions(step):
    """Draw the completions of a step, by prompt."""
    rows = range(step * BATCH // GROUP, (step + 1) * BATCH // GROUP)
    return [[completion_of(row, number, seed=0) for number in range(GROUP)] for row in rows]


@torch.no_grad()
def old_log_probs(trainer):
    """Return the log-probabilities of the rollout's completions under both models at its start."""
    models = trainer.unwrapped_models[0], trainer.ref_models[0]
    groups = [group for step in range(STEPS) for group in completions(step)]
    return {
        (one.row, number): [log_probs(model, one, trainer.args.temperature) for model in models]
        for group in groups
        for number, one in enumerate(group)
    }


def by_hand(trainer, step):
    """Return a step's configured loss and its gradient, by loops over completions and tokens."""
    model, args = trainer.unwrapped_models[0], trainer.args
    groups, tokens = completions(step), {}
    for group in groups:
        mean = math.fsum(one.reward for one in group) / GROUP
        for number, one in enumerate(group):
            new = log_probs(model, one, args.temperature)
            old, ref = trainer.old[one.row, number]
            active = [t for t, on in enumerate(one.trained) if on]
            if args.overlong_filter and one.is_truncated:
                active = []
            advantage = one.reward - mean
            tokens[one.row, number] = [
                token_loss(trainer, advantage, new, old, ref, one.log_probs, t, active)
                for t in active
            ]
    loss = aggregated(trainer.mode, groups, tokens)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.item(), "gradient": flat(gradients)}


def flat(tensors):
    """Return the numbers of all tensors in one list."""
    return torch.cat([one.flatten() for one in tensors]).tolist()


def log_probs(model, one, temperature):
    """Return the log-probability of each token of a completion, alone in its batch."""
    tokens = torch.tensor([one.prompt + one.tokens])
    n = tokens.shape[1]
    logits = model(tokens[:, :-1], torch.arange(n - 1)[None], None)[0] / temperature
    picked = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return picked[len(one.prompt) - 1 :]


def token_loss(trainer, advantage, new, old, ref, rollout, t, active):
    """Return the loss of a token, from the formulas of the papers."""
    level, kind = trainer.importance_sampling_level, trainer.loss_type
    ratio = torch.exp(new[t] - old[t])
    if level == "sequence":
        ratio = torch.exp(sum(new[i] - old[i] for i in active) / len(active))
    if kind == "cispo":
        loss = -min(ratio.item(), trainer.epsilon_high) * advantage * new[t]
    elif kind == "sapo":
        tau = trainer.tau_pos if advantage > 0 else trainer.tau_neg
        loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    else:
        low, high = 1 - trainer.epsilon_low, 1 + trainer.epsilon_high
        if low <= ratio.item() <= high:
            loss = -ratio * advantage
        else:
            clipped = min(max(ratio.item(), low), high)
            loss = max(-ratio * advantage, -clipped * advantage + 0 * ratio)
    if trainer.beta:
        difference = ref[t] - new[t]
        loss = loss + trainer.beta * (torch.exp(difference) - difference - 1)
    if trainer.args.corrects_rollout:
        most = trainer.rollout_importance_sampling_threshold
        loss = loss * min(math.exp(old[t].item() - rollout[t]), most)
    return loss


def aggregated(mode, groups, tokens):
    """Return the loss of a step; ``groups``: its completions, by prompt."""
    flat = [loss for losses in tokens.values() for loss in losses]
    count = sum(map(len, groups))
    if mode == "token_mean":
        return sum(flat) / len(flat)
    if mode.startswith("constant"):
        return sum(flat) / (count * WIDTH)
    if mode == "sample_mean":
        return sum(sum(losses) / len(losses) for losses in tokens.values() if losses) / count
    means = []
    for group in groups:
        of_group = [loss for n, one in enumerate(group) for loss in tokens[one.row, n]]
        means.append(sum(of_group) / max(len(of_group), 1))
    return sum(means) / len(groups)


class Watch(swift_worker.Watch):
    """Keeps what ms-swift logs, and the gradient that each step trains."""

    def on_step_begin(self):
        """Nothing yet: the step's completions are not drawn."""

    def on_step_end(self):
        parameters = self.trainer.unwrapped_models[0].parameters()
        self.trainer.written["gradients"].append(flat(one.main_grad for one in parameters))


megatron_callbacks_map["watch"] = Watch


def arguments(cp, loss_scaling, layout, more):
    """Return the defaults of ms-swift's arguments, and what a run sets."""
    data = SimpleNamespace(is_packed=layout == "packed", packs=range(BATCH))
    dp, world = parallel_state.get_data_parallel_world_size(), dist.get_world_size()
    given = {
        "rlhf_type": "grpo",
        "tuner_type": "full",
        "loss_type": "grpo",
        "packing": False,
        "micro_batch_size": 2,
        "num_microbatches": BATCH // 2 // dp,
        "train_iters": STEPS,
        "eval_steps": STEPS,
        "lr": 0.03,
        "min_lr": 0.03,
        "clip_grad": 0.0,
        "num_generations": GROUP,
        "generation_batch_size": BATCH * STEPS,
        "steps_per_generation": STEPS,
        "per_device_generation_batch_size": BATCH * STEPS // world,
        "max_completion_length": WIDTH,
        "beta": 0.0,
        "epsilon": 0.05,
        "kl_in_reward": False,
        "scale_rewards": "none",
        "reward_funcs": [reward],
        "use_vllm": False,
        "output_dir": tempfile.mkdtemp(),
        "model_info": SimpleNamespace(model_dir="."),
        "report_to": [],
        "truncation_strategy": None,
        "corrects_rollout": False,
    }
    return swift_worker.arguments(cp, loss_scaling, data, {**given, **more})


def train(path, mode, cp, loss_scaling, layout, more):
    """Train with GRPO; returns the trainer and the hook."""
    tiny_gpt.start(cp=cp)
    PartialState(cpu=True)  # it gathers rewards
    shadow = f"sample_mean,prompt_mean,constant:{WIDTH}"
    divisor = f", divisor={WIDTH}" if mode == "constant" else ""
    asked = {"stock": None, "shadow": f"None, options=Options(shadow={shadow!r})"}.get(
        mode, f"Aggregation({mode!r}{divisor})"
    )
    weighing = weigh_rl.install("ms-swift", steps=STEPS) if more.pop("weigh", False) else None
    hook = swift_worker.installed(path, "ms_swift_grpo", asked)
    grpo_trainer.encode_sample = encoded
    args = arguments(cp, loss_scaling, layout, more)
    collator = swift_worker.Collator(is_packed=layout == "packed", cp=cp)
    collator.packing, collator.max_length, collator.processor = False, None, None
    collator.template_meta = SimpleNamespace(default_system=None)
    trainer = Trainer(args, collator, vllm_client=None)
    trainer.mode = mode
    if args.off_policy_sequence_mask_delta is not None:  # 4.6.0 sees a teacher in every run
        trainer._has_teacher = False
    if args.corrects_rollout:  # what an engine that returns log-probabilities allows
        trainer.disable_rollout_importance_sampling = False
        trainer.rollout_importance_sampling_mode = "token_truncate"
    trainer.train(Prompts(64, seed=0), Prompts(8, seed=1))
    if weighing is not None:
        trainer.written["trains"] = [str(step.trains) for step in weighing.weighed]
        trainer.written["weighed"] = [
            [(one.tokens, one.weight_min, one.weight_max) for one in step.sequences]
            for step in weighing.weighed
        ]
        drawn = [[one for group in completions(step) for one in group] for step in range(STEPS)]
        trainer.written["tokens"] = [[sum(one.trained) for one in step] for step in drawn]
    cuts = mode == "prompt_mean" and BATCH // parallel_state.get_data_parallel_world_size() % GROUP
    assert ("prompts over several steps" in faults._warned) == bool(cuts)
    return trainer, hook


if __name__ == "__main__":
    swift_worker.run(train)
