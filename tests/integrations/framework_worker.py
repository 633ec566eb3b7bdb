"""The integrations of slime, verl, SkyRL and NeMo-RL on live Megatron-Core without them.

``framework_worker.py REFERENCE FRAMEWORK`` on DP 2 x CP 2. A framework's own part is written here
from its source, with the factors it multiplies by afterwards: ``make test-frameworks`` and
``slime_miles_worker.py`` run their own code. Each context-parallel rank gathers whole sequences'
log-probabilities. Back goes the gradient of its own slice: that of its own loss in verl and SkyRL,
the sum over context-parallel ranks in NeMo-RL, which divides by CP for it.
"""

import itertools
import sys
import types
from types import SimpleNamespace

import framework_step
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from written_frameworks import ClippedPGLossFn, RayPPOTrainer, SkyRLBatch, skyrl_config

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.integrations import nemo_rl, skyrl, slime
from megatron_lossagg.verify.step_data import zigzag

L = framework_step.L
DP, CP = 2, 2
OF_MICROBATCHES = "microbatch_token_mean"


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


class Slime:
    """slime 624b824a: sum of masked sums / max(d_s, 1), * M / G * DP CP, three outputs."""

    cases = (
        *("reducer", "token_mean", "sample_mean", "prompt_mean", "constant", "length_power"),
        OF_MICROBATCHES,
    )
    per_token = False

    def __init__(self, steps, dp_size):
        self.steps = steps

    def prepare(self, case):
        return self.steps

    def begin(self, case, sequences, m):
        """Carry the weights to the sequences as slime does, in a rollout batch of one step."""
        self.num_rollouts = len({one["rollout"] for rank in self.steps for one in rank})
        if case == "reducer":  # each sequence a rollout
            self.num_rollouts = sum(map(len, self.steps))
            return
        data = {
            "loss_masks": [torch.tensor(one["mask"], dtype=torch.int32) for one in sequences],
            "rollout_ids": [one["rollout"] for one in sequences],
            "prompt": [one["uid"] for one in sequences],
            "rollout_mask_sums": torch.ones(len(sequences)),  # of the default dtype, float64
            "micro_batch_indices": [list(range(len(sequences)))[first::m] for first in range(m)],
            "num_microbatches": [m],
            "global_batch_sizes": [self.num_rollouts],
        }
        aggregation = framework_step.CASES.get(case) or OTHERS[case]
        args = SimpleNamespace(
            loss_aggregation=case,
            loss_aggregation_divisor=aggregation.divisor,
            loss_aggregation_exponent=aggregation.exponent,
        )
        slime.carry_weights(args, 0, data)
        numbers = [one["number"] for one in sequences]
        self.d_s = dict(zip(numbers, data["rollout_mask_sums"].clamp(min=1), strict=True))

    def loss(self, case, sequences, log_probs, num_microbatches):
        x, weighted = [], []
        for one, log_prob in zip(sequences, log_probs, strict=True):
            total, n = len(one["tokens"]), one["response"]
            padded = total + -total % (2 * CP)
            held = zigzag([0, padded], CP, parallel_state.get_context_parallel_rank())
            own = [place - (total - n - 1) for place in held if total - n - 1 <= place < total - 1]
            x.append(framework_step.policy_loss(log_prob, one)[own])
            if case != "reducer":
                mask = torch.tensor(one["mask"])[own]
                weighted.append((x[-1] * mask).sum() / self.d_s[one["number"]])
        if case == "reducer":
            reducer = slime.constant_40(
                [len(one["tokens"]) for one in sequences],
                [one["response"] for one in sequences],
                [torch.tensor(one["mask"], dtype=torch.int32) for one in sequences],
                False,
            )
            loss = reducer(torch.cat(x))
        else:
            loss = torch.stack(weighted).sum()
        return loss * num_microbatches / self.num_rollouts * DP * CP


def refuse_together():
    """Every rank refuses a mask that one rank has, in the first or last step."""
    rank = parallel_state.get_data_parallel_rank()
    for wrong in (0, 1):
        masks = torch.ones(4, 3, dtype=torch.int32)  # two steps of two sequences
        if rank == 1:
            masks[2 * wrong] = 2
        data = {
            "loss_masks": list(masks),
            "rollout_ids": [10 * rank + sequence for sequence in range(4)],
            "rollout_mask_sums": torch.ones(4),
            "micro_batch_indices": [[0, 1], [2, 3]],
            "num_microbatches": [1, 1],
            "global_batch_sizes": [4, 4],
        }
        args = SimpleNamespace(loss_aggregation="sample_mean", loss_aggregation_count_empty=False)
        with pytest.raises(PlanError, match=r"rank 1 of .*loss_masks"):
            slime.carry_weights(args, 0, data)
        print(f"step {wrong}: refused together", flush=True)


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
        mode = self.verl.LossMode.named(f"lossagg_{framework_step.CASES[case].mode}")
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
        self.steps, self.dp_size = steps, dp_size
        # The trainer has the whole mini-batch, a prompt's sequences together; padding sequences
        # follow.
        self.step = sorted(
            (sequence for rank in steps for sequence in rank), key=lambda sequence: sequence["uid"]
        )

    def prepare(self, case):
        tensors = {
            "advantages": padded([*(one["advantage"] for one in self.step), torch.zeros(1)]),
            "loss_mask": padded([*(one["mask"] for one in self.step), [0]]).double(),
        }
        uids = [sequence["uid"] for sequence in self.step]
        starts = [n for n, uid in enumerate(uids) if n == 0 or uid != uids[n - 1]]
        prompts = list(zip(starts, [*starts[1:], len(uids)], strict=True))
        trainer = skyrl.aggregated(RayPPOTrainer, framework_step.CASES[case])
        made = trainer(skyrl_config(policy_loss_type="dual_clip"))
        batch = SkyRLBatch(tensors, uids=["p"])
        scaled = made._normalize_advantages(batch, [(0, len(uids))], prompts)["advantages"]
        of_sequence = {one["number"]: scaled[n] for n, one in enumerate(self.step)}
        return [
            [{**one, "advantage": of_sequence[one["number"]][: one["response"]]} for one in rank]
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
        whole = [sequence for rank in steps for sequence in rank]
        self.counts = {
            "global_valid_seqs": torch.tensor(float(len(whole))),
            "global_valid_toks": torch.tensor(float(sum(sum(one["mask"]) for one in whole))),
        }

    def prepare(self, case):
        return self.steps

    def loss(self, case, sequences, log_probs, num_microbatches):
        # A sequence-level loss for one mode, so that both of NeMo-RL's divisors are compensated.
        stock = ClippedPGLossFn(token_level=case != "constant")
        names = {"token_mask": "mask", "prev_logprobs": "old", "advantages": "advantage"}
        data = {"sample_mask": torch.ones(len(sequences))}
        for field, name in {**names, "reference_policy_logprobs": "ref"}.items():
            whole = padded([sequence[name] for sequence in sequences])
            data[field] = torch.nn.functional.pad(whole, (1, 0))
        # A sequence that NeMo-RL counts nowhere.
        data = {name: torch.cat([value, value[:1]]) for name, value in data.items()}
        data["sample_mask"][-1] = 0
        loss_fn = nemo_rl.aggregated(stock, framework_step.CASES[case])
        loss, metrics = loss_fn(padded([*log_probs, log_probs[0]]), data=data, **self.counts)
        assert abs(metrics["loss"] - loss.item()) < 1e-12
        return loss / CP * num_microbatches / CP


def compare(path, framework):
    saved = torch.load(path)
    steps = [framework_step.samples()[rank::DP] for rank in range(DP)]
    integration = FRAMEWORKS[framework](steps, dp_size=DP)
    # SkyRL's trainer is a process of its own: it has the whole step and no process group.
    prepared = {case: integration.prepare(case) for case in integration.cases}
    tiny_gpt.start(cp=CP)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=integration.per_token))
    for case, m in itertools.product(integration.cases, (1, 3)):
        sequences = prepared[case][parallel_state.get_data_parallel_rank()]
        if framework == "slime":
            integration.begin(case, sequences, m)

        def forward_step(iterator, model, m=m, case=case):
            batch = next(iterator)
            logits, read = gathered_log_probs(model, batch, framework == "nemo_rl")

            def loss_func(logits):
                loss = integration.loss(case, batch, read(logits), m)
                report = {"loss": loss.detach().clone()}
                if framework == "slime":
                    return loss, torch.tensor(1, dtype=torch.int), report
                return loss, report

            return logits, loss_func

        tiny_gpt.run_schedule(forward_step, chunk, [sequences[first::m] for first in range(m)])
        numbers = [[one["number"] for one in rank] for rank in steps]
        places = {n: (r, i % m) for r, rank in enumerate(numbers) for i, n in enumerate(rank)}
        by = "rollout" if framework == "slime" and case != "reducer" else "number"
        aggregation = framework_step.CASES.get(case) or OTHERS[case]
        _, grads = framework_step.expected(
            saved, {"pg": aggregation}, by=by, places=places, microbatches=[m] * DP
        )
        worst = framework_step.worst_error(chunk, grads)
        assert worst < 1e-12, (case, worst)
        if dist.get_rank() == 0:
            print(f"{case}, M = {m}: the reference, {worst:.1e}", flush=True)
    if framework == "slime":
        refuse_together()
    if framework == "verl":
        refuse_other_batches(integration.verl)


def refuse_other_batches(verl):
    """See all ranks refuse a batch that one of them has otherwise; the same one passes."""
    for mask, uid, differs in (
        ([1, 0, 1], "b", False),
        ([1, 1, 0], "b", True),
        ([1, 0, 1], "c", True),
    ):
        is_other = dist.get_rank() == 2
        masks = [torch.tensor([1, 1]), torch.tensor(mask if is_other else [1, 0, 1])]
        data = {
            "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
            "uid": ["a", uid if is_other else "b"],
        }
        if not differs:
            verl.check_same_batch(Aggregation("token_mean"), data)
            continue
        with pytest.raises(PlanError, match=r"on rank 0 of the 4 .* different one on rank 2"):
            verl.check_same_batch(Aggregation("token_mean"), data)
        if dist.get_rank() == 0:
            print("refused together", flush=True)


FRAMEWORKS = {"slime": Slime, "verl": Verl, "skyrl": SkyRL, "nemo_rl": NemoRL}
OTHERS = {
    "reducer": Aggregation("constant", divisor=L),
    OF_MICROBATCHES: Aggregation(OF_MICROBATCHES),
}


if __name__ == "__main__":
    compare(sys.argv[1], sys.argv[2])
    dist.destroy_process_group()
