"""The integrations of verl, SkyRL and NeMo-RL on live Megatron-Core without them, DP 2 x CP 2.

A framework's own part is written here from its source, with the factors it multiplies by
afterwards: ``make test-frameworks`` runs verl's and SkyRL's own code. Each context-parallel rank
gathers whole sequences' log-probabilities. Back goes the gradient of its own slice: that of its own
loss in verl and SkyRL, the sum over context-parallel ranks in NeMo-RL, which divides by CP for it.
"""

import itertools
import sys
import types
from types import SimpleNamespace

import framework_step
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from step_data import zigzag

from megatron_lossagg import Aggregation, Sequences, plan_step

L = framework_step.L


class Gather(torch.autograd.Function):
    """Gather over context parallelism; the gradient of the own slice, summed or not."""

    @staticmethod
    def forward(ctx, own, is_summed):
        ctx.is_summed, group = is_summed, parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        ctx.num_own = len(own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        group = parallel_state.get_context_parallel_group()
        if ctx.is_summed:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=group)
        return gradient.split(ctx.num_own)[dist.get_rank(group)], None


def gathered_log_probs(model, sequences, is_summed):
    """Return each sequence's log-probabilities of its response, whole on every rank."""
    cp_size = parallel_state.get_context_parallel_world_size()
    cp_rank = parallel_state.get_context_parallel_rank()
    tokens, targets, offsets = [], [], [0]
    for sequence in sequences:
        fill = [0] * (-len(sequence["tokens"]) % (2 * cp_size))
        tokens += sequence["tokens"] + fill
        targets += [*sequence["tokens"][1:], 0, *fill]
        offsets.append(len(tokens))
    held = zigzag(offsets, cp_size, cp_rank)
    whose = [zigzag(offsets, cp_size, rank) for rank in range(cp_size)]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(offsets)])
    logits = model(
        torch.tensor(tokens)[held][None],
        positions[held][None],
        None,
        packed_seq_params=tiny_gpt.packed_at(offsets),
    )

    def read(logits):
        target = torch.tensor(targets)[held][:, None]
        own = torch.log_softmax(logits[0], -1).gather(1, target).squeeze(1)
        places = torch.tensor([place for part in whose for place in part])
        whole = Gather.apply(own, is_summed)[places.argsort()]
        starts = [
            offset + len(sequence["tokens"]) - sequence["response"] - 1
            for offset, sequence in zip(offsets, sequences, strict=False)
        ]
        return [
            whole[start : start + sequence["response"]]
            for start, sequence in zip(starts, sequences, strict=True)
        ]

    return logits, read


def padded(values):
    """Pad to ``[b, s]`` with zeros."""
    made = [value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in values]
    return torch.nn.utils.rnn.pad_sequence(made, batch_first=True)


class Verl:
    """verl 1dda039b: ppo_loss's call of a registered policy loss, then * M, two outputs."""

    cases = ("token_mean", "sample_mean", "constant")
    per_token = False

    def __init__(self, steps, dp_size):
        core = types.ModuleType("verl.trainer.ppo.core_algos")
        core.POLICY_LOSS_REGISTRY = {"vanilla": self.vanilla}
        core.register_policy_loss = lambda name: (
            lambda loss: core.POLICY_LOSS_REGISTRY.setdefault(name, loss)
        )
        core.agg_loss = lambda *_, **__: torch.full((), torch.nan)
        self.core = core
        for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[core.__name__] = core
        from megatron_lossagg.integrations import verl

        assert "lossagg_constant" in verl.plugin
        self.verl, self.steps, self.dp_size = verl, steps, dp_size

    def vanilla(
        self, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **_
    ):
        sequence = {"old": old_log_prob, "advantage": advantages}
        losses = framework_step.policy_loss(log_prob, sequence)
        info = config.global_batch_info
        return self.core.agg_loss(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **info
        ), {}

    def prepare(self, case):
        """Plan the whole step here, whose ranks' sequences the engine would gather."""
        mode = self.verl.LossMode.named(f"lossagg_{framework_step.CASES[case][0]}")
        lengths = [sum(sequence["mask"]) for rank in self.steps for sequence in rank]
        plan = plan_step(mode.aggregation(L), Sequences(active_tokens=lengths))
        places = {id(s): n for n, s in enumerate(s for rank in self.steps for s in rank)}
        self.planned = {**getattr(self, "planned", {}), case: (mode, plan, places)}
        return self.steps

    def loss(self, case, sequences, log_probs, num_microbatches):
        mode, plan, places = self.planned[case]
        positions = torch.tensor([places[id(sequence)] for sequence in sequences])

        def ppo_loss(data):
            return self.core.POLICY_LOSS_REGISTRY[mode.name](
                old_log_prob=padded([sequence["old"] for sequence in sequences]),
                log_prob=padded(log_probs),
                advantages=padded([sequence["advantage"] for sequence in sequences]),
                response_mask=padded([sequence["mask"] for sequence in sequences]).bool(),
                loss_agg_mode="token-mean",
                config=SimpleNamespace(global_batch_info={}),
            )

        data = {self.verl.SEQUENCE: positions}
        loss, _ = self.verl.with_plan(ppo_loss, plan, self.dp_size, data=data)
        return loss * num_microbatches


class SkyRL:
    """SkyRL a9564572: advantages scaled over the mini-batch, losses summed, * M DP, two outputs."""

    cases = tuple(framework_step.CASES)
    per_token = False

    def __init__(self, steps, dp_size):
        trainer = types.ModuleType("skyrl.train.trainer")
        source = (
            "class RayPPOTrainer:\n"
            "    def __init__(self, cfg): self.cfg = cfg\n"
            "    def _normalize_advantages(self, data, boundaries, prompts=None):\n"
            "        for start, end in boundaries:\n"
            "            own = [(a - start, b - start) for a, b in prompts if start <= a < end]\n"
            "            data['advantages'][start:end] = "
            "apply_loss_reduction_to_advantages_minibatch(\n"
            "                advantages=data['advantages'][start:end],\n"
            "                loss_mask=data['loss_mask'][start:end], loss_reduction='token_mean',\n"
            "                micro_batch_size=1, max_seq_len=None, prompt_boundaries=own)\n"
            "        return data\n"
            "def apply_loss_reduction_to_advantages_minibatch(**_): raise AssertionError\n"
        )
        sys.modules[trainer.__name__] = trainer
        exec(source, trainer.__dict__)
        self.trainer, self.steps, self.dp_size = trainer.RayPPOTrainer, steps, dp_size
        # The trainer has the whole mini-batch, a prompt's sequences together; padding sequences
        # follow.
        self.step = sorted(
            (sequence for rank in steps for sequence in rank), key=lambda sequence: sequence["uid"]
        )

    def prepare(self, case):
        from megatron_lossagg.integrations.skyrl import aggregated

        mode, count_empty = framework_step.CASES[case]
        aggregation = Aggregation(
            mode, divisor=L if mode == "constant" else None, count_empty=count_empty
        )
        algorithm = SimpleNamespace(
            policy_loss_type="dual_clip", use_kl_loss=False, use_entropy_loss=False
        )
        cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))

        class Data(dict):
            metadata = {"uids": ["p"]}  # noqa: RUF012

        data = Data(
            advantages=padded([*(sequence["advantage"] for sequence in self.step), torch.zeros(1)]),
            loss_mask=padded([*(sequence["mask"] for sequence in self.step), [0]]).double(),
        )
        uids = [sequence["uid"] for sequence in self.step]
        starts = [n for n, uid in enumerate(uids) if n == 0 or uid != uids[n - 1]]
        prompts = list(zip(starts, [*starts[1:], len(uids)], strict=True))
        made = aggregated(self.trainer, aggregation)(cfg)
        scaled = made._normalize_advantages(data, [(0, len(uids))], prompts)["advantages"]
        of_sequence = {id(sequence): scaled[n] for n, sequence in enumerate(self.step)}
        return [
            [
                {**sequence, "advantage": of_sequence[id(sequence)][: sequence["response"]]}
                for sequence in rank
            ]
            for rank in self.steps
        ]

    def loss(self, case, sequences, log_probs, num_microbatches):
        total = sum(
            (framework_step.policy_loss(log_prob, sequence) * torch.tensor(sequence["mask"])).sum()
            for log_prob, sequence in zip(log_probs, sequences, strict=True)
        )
        return total * num_microbatches * self.dp_size


class NemoRL:
    """NeMo-RL 7ea279ab: masked_mean by global counts, / CP, * M / CP, two outputs, per token."""

    cases = ("token_mean", "sample_mean", "constant")
    per_token = True

    def __init__(self, steps, dp_size):
        self.steps = steps
        self.tokens = torch.tensor(
            float(sum(sum(sequence["mask"]) for rank in steps for sequence in rank))
        )
        self.samples = torch.tensor(float(sum(len(rank) for rank in steps)))
        self.metric_normalizations = {}
        self.input_type = "logprob"

    def prepare(self, case):
        return self.steps

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
        losses = framework_step.policy_loss(
            next_token_logprobs, {"old": data["old"][:, 1:], "advantage": data["advantages"][:, 1:]}
        )
        if self.loss_type.value == "token_level":
            kept = mask * sample_mask[:, None]
            loss = (losses * kept).sum() / (global_valid_toks + 1e-8)
        else:
            means = (losses * mask).sum(-1) / (mask.sum(-1) + 1e-8)
            loss = (means * sample_mask).sum() / (global_valid_seqs + 1e-8)
        return loss, {"loss": loss.item(), "kl_penalty": 0, "ratio_min": 1.0, "num": len(mask)}

    def loss(self, case, sequences, log_probs, num_microbatches):
        from megatron_lossagg.integrations.nemo_rl import aggregated

        # A sequence-level loss for one mode, so that both of NeMo-RL's divisors are compensated.
        level = "sequence_level" if case == "constant" else "token_level"
        self.loss_type = SimpleNamespace(value=level)
        loss_fn = aggregated(self, Aggregation(case, divisor=L if case == "constant" else None))
        front = lambda values: torch.nn.functional.pad(padded(values), (1, 0))  # noqa: E731
        data = {
            "token_mask": front([sequence["mask"] for sequence in sequences]),
            "sample_mask": torch.ones(len(sequences)),
            "old": front([sequence["old"] for sequence in sequences]),
            "advantages": front([sequence["advantage"] for sequence in sequences]),
        }
        # A sequence that NeMo-RL counts nowhere.
        data = {name: torch.cat([value, value[:1]]) for name, value in data.items()}
        data["sample_mask"][-1] = 0
        log_prob = padded([*log_probs, log_probs[0]])
        loss, metrics = loss_fn(
            log_prob, data, global_valid_seqs=self.samples, global_valid_toks=self.tokens
        )
        assert metrics["num"] == len(sequences) + 1
        assert metrics["ratio_min"] == 1.0
        assert abs(metrics["loss"] - loss.item()) < 1e-12
        cp_size = parallel_state.get_context_parallel_world_size()
        return loss / cp_size * num_microbatches / cp_size


def compare(path, framework):
    saved = torch.load(path)
    steps = [framework_step.samples()[rank::2] for rank in range(2)]
    integration = {"verl": Verl, "skyrl": SkyRL, "nemo_rl": NemoRL}[framework](steps, dp_size=2)
    # SkyRL's trainer is a process of its own: it has the whole step and no process group.
    prepared = {case: integration.prepare(case) for case in integration.cases}
    tiny_gpt.start(cp=2)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=integration.per_token))
    for case in integration.cases:
        sequences = prepared[case][parallel_state.get_data_parallel_rank()]
        for m in (1, 3):

            def forward_step(iterator, model, m=m, case=case):
                batch = next(iterator)
                logits, read = gathered_log_probs(model, batch, framework == "nemo_rl")

                def loss_func(logits):
                    loss = integration.loss(case, batch, read(logits), m)
                    return loss, {"loss": loss.detach().clone()}

                return logits, loss_func

            tiny_gpt.run_schedule(
                forward_step, chunk, [sequences[number::m] for number in range(m)]
            )
            worst = framework_step.assert_gradients(chunk, saved[case, "pg"][1])
            if dist.get_rank() == 0:
                print(f"{case}, M = {m}: the reference, {worst:.1e}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "reference":
        framework_step.reference(sys.argv[2])
    else:
        compare(sys.argv[2], sys.argv[3])
    dist.destroy_process_group()
