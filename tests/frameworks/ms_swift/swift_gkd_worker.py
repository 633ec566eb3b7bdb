"""One run of ms-swift's own ``MegatronGKDTrainer.train`` on the CPU, with what tests compare.

``swift_gkd_worker.py FILE AGGREGATION CP LOSS_SCALING LAYOUT [ARGUMENT=VALUE ...]``: two steps and
an evaluation on conversations, in float64; ``LAYOUT``: ``packed`` (padding-free) or ``padded``.
Its own: the trainer with its buffer, the teacher's forward passes, collation, slices for context
parallelism, forward step, loss, log and optimizer. Not its own: both models (Megatron-Core's on the
CPU), an engine, what a template encodes, its arguments' defaults without their checks, checkpoints.
The last rank writes what ms-swift logs to FILE as JSON, with each step's gradient, and rank 0, if
it is the only one, the loss of each step and its gradient by loops over conversations and tokens.
AGGREGATION ``stock``: ``install`` is left out; ``shadow``: it asks for a shadow only. Instead of
a layout, for padded data: ``blind``, the teacher knows nothing of one trained token; ``factor`` and
``gradient``, ``loss_func`` returns 1.01 times its loss, or its loss with another gradient.
"""

import math

import imports_swift  # noqa: F401  first
import swift_grpo_worker
import swift_worker
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from swift.megatron.trainers import gkd_trainer
from swift.megatron.utils import wrap_model
from swift.rlhf_trainers import gkd_helpers

import megatron_lossagg.cpu as cpu

STEPS, BATCH = 2, len(swift_worker.PADDED)


def conversations(seed):
    return swift_worker.Conversations(seed, STEPS, swift_worker.PADDED, is_packed=False)


class Rows(torch.utils.data.Dataset):
    """Rows of a data set; the conversation of each is drawn from its number."""

    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, row):
        return {"messages": [{"role": "user", "content": str(row)}], "row": row, "seed": self.seed}


def encoded(sample, template):
    """Encode a sample as ms-swift's templates do."""
    return conversations(sample.extra["seed"])[sample.extra["row"]]


class Trainer(gkd_trainer.MegatronGKDTrainer):
    """ms-swift's trainer on two models for the CPU."""

    is_blind = False

    def prepare_model(self):
        config = tiny_gpt.config_of(per_token=self.args.calculate_per_token_loss)
        self.unwrapped_models = [tiny_gpt.gpt(config, cpu.gpt_layer_spec(config))]
        self.unwrapped_models[0].get_input_tensor = lambda: None  # of mcore-bridge's models
        self.teacher_models = [tiny_gpt.gpt(config, cpu.gpt_layer_spec(config))]
        cpu.initialize_weights(self.teacher_models, seed=4)
        for weight in self.teacher_models[0].parameters():
            weight.data *= 3  # it is surer than the student
        self.teacher_models[0].requires_grad_(False)
        self.config, self.bridge, self.peft_models = config, None, []
        self.wrapped_models = wrap_model(self.args, self.unwrapped_models)

    def _compute_teacher_logits(self, encoded_batches, vp_stage=None):
        super()._compute_teacher_logits(encoded_batches, vp_stage)
        if self.is_blind:
            first = encoded_batches[0]["teacher_output"]
            row, position = (first.labels != -100).nonzero()[0]
            first.topk_logprobs[row, position] = -math.inf

    def _replace_data_iterator(self, data_iterator):
        made = super()._replace_data_iterator(data_iterator)
        if dist.get_world_size() == 1 and self.unwrapped_models[0].training:
            self.written["by_hand"].append(by_hand(self, self._step - 1))
        return made

    def save_checkpoint(self):
        """Keep nothing."""


def by_hand(trainer, step):
    """Return a step's configured loss and its gradient, by loops over conversations and tokens."""
    model, teacher = trainer.unwrapped_models[0], trainer.teacher_models[0]
    data, losses = conversations(0), []
    for row in range(step * BATCH, (step + 1) * BATCH):
        tokens, labels = torch.tensor(data[row]["input_ids"]), data[row]["labels"]
        given = tokens[None, :-1], torch.arange(len(tokens) - 1)[None], None
        logits, of_teacher = model(*given)[0], teacher(*given)[0].detach()
        losses.append(
            [
                token_loss(trainer.args, logits[t - 1], of_teacher[t - 1], label)
                for t, label in enumerate(labels)
                if label >= 0
            ]
        )
    if trainer.mode == "token_mean":
        loss = sum(map(sum, losses)) / sum(map(len, losses))
    else:
        loss = sum(sum(one) / len(one) for one in losses if one) / BATCH
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.item(), "gradient": swift_grpo_worker.flat(gradients)}


def token_loss(args, logits, of_teacher, label):
    """Return a token's loss: the generalised Jensen-Shannon divergence, and SFT's part."""
    ids = range(len(logits))
    if args.gkd_logits_topk is not None:
        ids = of_teacher.topk(args.gkd_logits_topk).indices.tolist()
    p, q = ((one / args.temperature).exp() for one in (logits, of_teacher))
    of_p, of_q = (sum(one[v] for v in ids) for one in (p, q))
    loss = -args.sft_alpha * logits.log_softmax(-1)[label]
    for v in ids:
        student, teacher = p[v] / of_p, q[v] / of_q
        if args.beta == 0:
            loss = loss + teacher * (teacher / student).log()
        elif args.beta == 1:
            loss = loss + student * (student / teacher).log()
        else:
            mixed = (1 - args.beta) * student + args.beta * teacher
            loss = loss + args.beta * teacher * (teacher / mixed).log()
            loss = loss + (1 - args.beta) * student * (student / mixed).log()
    return loss


def changed(how):
    """Return a ``loss_func`` as a release with another loss would have it."""
    own = gkd_trainer.MegatronGKDTrainer.loss_func

    def loss_func(trainer, output, **given):
        loss, *others = own(trainer, output, **given)
        other = 1.01 * loss if how == "factor" else loss + (output - output.detach()).mean()
        return other, *others

    return loss_func


def arguments(cp, loss_scaling, is_packed, more):
    """Return the defaults of ms-swift's arguments, and what a run sets."""
    data = conversations(0)
    data.is_packed = is_packed
    dp = parallel_state.get_data_parallel_world_size()
    given = {
        "rlhf_type": "gkd",
        "tuner_type": "full",
        "teacher_model": "teacher",
        "packing": False,
        "micro_batch_size": 2,
        "num_microbatches": BATCH // 2 // dp,
        "train_iters": STEPS,
        "eval_steps": STEPS,
        "lr": 0.03,
        "min_lr": 0.03,
        "clip_grad": 0.0,
        "num_generations": 1,
        "generation_batch_size": BATCH,
        "steps_per_generation": 1,
        "lmbda": 0.0,
        "beta": 0.5,
        "temperature": 0.9,
        "sft_alpha": 0.0,
        "gkd_logits_topk": None,
        "use_vllm": False,
        "report_to": [],
        "truncation_strategy": None,
    }
    return swift_worker.arguments(cp, loss_scaling, data, {**given, **more})


def train(path, mode, cp, loss_scaling, layout, more):
    """Distil; returns the trainer and the hook."""
    tiny_gpt.start(cp=cp)
    asked = {"stock": None, "shadow": "None, options=Options(shadow='sample_mean')"}.get(
        mode, f"Aggregation({mode!r})"
    )
    hook = swift_worker.installed(path, "ms_swift_gkd", asked)
    gkd_helpers.encode_sample = encoded
    is_packed = layout == "packed"
    args = arguments(cp, loss_scaling, is_packed, more)
    collator = swift_worker.Collator(is_packed=is_packed, cp=cp)
    collator.packing, collator.max_length = False, None
    if layout in ("factor", "gradient"):
        gkd_trainer.MegatronGKDTrainer.loss_func = changed(layout)
    trainer = Trainer(args, collator, vllm_client=None)
    trainer.mode, trainer.is_blind = mode, layout == "blind"
    trainer.train(Rows(0), Rows(1))
    return trainer, hook


if __name__ == "__main__":
    swift_worker.run(train)
