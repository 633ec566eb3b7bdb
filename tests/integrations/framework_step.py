"""The step that launched workers train by the integrations, and its loss by the reference.

Sequences are whole token lists with a prompt and a response; a response token's loss is on the
logit before it. Losses are PPO's, with KL and entropy: as the frameworks write them.
"""

import tiny_gpt
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from step_data import make_sequences

import megatron_lossagg.cpu as cpu
from megatron_lossagg.verify import reference_loss

PROMPTS = [3, 1, 2, 1, 4, 2, 1, 9, 3, 6, 1, 2, 1, 5]
L = 40
KL, ENTROPY = 0.3, 0.05
CASES = {
    "token_mean": ("token_mean", True),
    "sample_mean": ("sample_mean", True),
    "constant": ("constant", True),
    "prompt_mean": ("prompt_mean", True),
    "prompt_mean without empty": ("prompt_mean", False),
    "sample_mean without empty": ("sample_mean", False),
}


def samples():
    """Return sequences: tokens, the response's length and mask, a prompt's id, constants per token.

    Every sample is one sequence. Two sequences are fully masked, one of them a prompt of its own.
    """
    made = []
    for number, (sequence, prompt) in enumerate(zip(make_sequences(), PROMPTS, strict=True)):
        tokens = [5] * prompt + sequence["tokens"]
        mask = [*sequence["trained"], 1]  # the last token of a response is trained as well
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn(3, len(mask), generator=generator, dtype=torch.float64)
        made.append(
            {
                "tokens": tokens,
                "response": len(mask),
                "mask": mask,
                "uid": f"prompt {number % 5}",
                "advantage": drawn[0],
                "old": -3.5 + 0.2 * drawn[1],
                "ref": -3.5 + 0.2 * drawn[2],
            }
        )
    for number in (4, 6):
        made[number]["mask"] = [0] * made[number]["response"]
    made[6]["uid"] = "a prompt with no active tokens"
    return made


def policy_loss(log_prob, sequence):
    """Compute PPO's clipped loss per token, with verl's dual clip at 3."""
    ratio, a = (log_prob - sequence["old"]).clamp(-20, 20).exp(), sequence["advantage"]
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    return torch.where(a < 0, torch.minimum(clipped, -3 * a), clipped)


def kl_loss(log_prob, sequence):
    """Compute the k3 estimate per token."""
    log_ratio = (sequence["ref"] - log_prob).clamp(-20, 20)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


def reference(path):
    """Save loss and gradients of each case by the reference; unpacked, on one process."""
    tiny_gpt.start()
    model = tiny_gpt.gpt(tiny_gpt.config_of(), get_gpt_layer_local_spec())
    live = []
    for number, sequence in enumerate(samples()):
        tokens = torch.tensor(sequence["tokens"])
        logits = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None], None)[0]
        log_p = torch.log_softmax(logits, -1)[-sequence["response"] :]
        log_prob = log_p.gather(1, tokens[-sequence["response"] :, None]).squeeze(1)
        x = {
            "pg": policy_loss(log_prob, sequence),
            "kl": kl_loss(log_prob, sequence),
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }
        mask = sequence["mask"]
        live.append(
            {"x": x, "counted": mask, "trained": mask, "sample": number, "prompt": sequence["uid"]}
        )
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    saved = {}
    for case, (mode, count_empty) in CASES.items():
        for terms in ("pg", "pg kl", "pg kl entropy"):
            coefficients = {"pg": 1.0, "kl": KL, "entropy": -ENTROPY}
            sequences = [
                {
                    **sequence,
                    "x": list(sum(coefficients[t] * sequence["x"][t] for t in terms.split())),
                }
                for sequence in live
            ]
            divisor = L if mode == "constant" else None
            loss = reference_loss.step_loss(
                mode, sequences, divisor=divisor, count_empty=count_empty
            )
            saved[case, terms] = graded(loss, named)
    torch.save(saved, path)


def graded(loss, named):
    """Return a loss and its gradients by name."""
    grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
    return loss.item(), dict(zip(named, grads, strict=True))


def assert_gradients(chunk, grads, *, factor=1.0, bound=1e-12):
    """Compare every parameter's gradient with the reference's; returns the largest error."""
    worst = 0.0
    for shard in cpu.named_shards([chunk]):
        got, want = shard.parameter.main_grad, grads[shard.name] * factor
        assert want.norm() > 1e-7, shard.name
        error = ((got - want).norm() / want.norm()).item()
        assert error < bound, (shard.name, error)
        worst = max(worst, error)
    return worst
