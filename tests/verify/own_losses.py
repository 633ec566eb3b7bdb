"""Loss functions of ones own, right and wrong, for ``check_loss``."""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce


def pretrain_gpt(microbatch, output):
    """What ``loss_func`` of Megatron-LM's pretrain_gpt.py computes."""
    losses, mask = output.view(-1).float(), microbatch["loss_mask"].view(-1).float()
    loss, num_tokens = torch.sum(losses * mask), mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def _global_tokens(microbatch):
    """Count the step's tokens over its microbatches and all ranks."""
    total = sum(each["loss_mask"].sum() for each in microbatch["step"])
    dist.all_reduce(total)
    return total


def global_mean(microbatch, output):
    """The token mean of the step, compensated for the average loss scaling."""
    k = len(microbatch["step"]) * dist.get_world_size()
    loss = (output * microbatch["loss_mask"]).sum() / _global_tokens(microbatch) * k
    return loss, torch.ones((), dtype=torch.int), {}


def seventh(microbatch, output):
    """A right mean, divided by 7."""
    loss, num_tokens, report = global_mean(microbatch, output)
    return loss / 7, num_tokens, report


def sum_over_7(microbatch, output):
    """A sum that knows neither M nor ranks."""
    loss = (output * microbatch["loss_mask"]).sum() / 7
    return loss, torch.ones((), dtype=torch.int), {}


def policy(microbatch, output):
    """A mean per microbatch of losses with coefficients, as a policy loss has."""
    ratio = (-output - microbatch["old_log_probs"]).exp()
    loss = -(ratio * microbatch["advantage_of_token"] * microbatch["loss_mask"]).sum()
    return loss, microbatch["loss_mask"].sum().int(), {}


def mean_of_samples(microbatch, output):
    """A mean per microbatch of sample means; whole sequences only, so CP 1."""
    means = []
    for number in range(len(microbatch["cu_seqlens"]) - 1):
        mask = microbatch["loss_mask"] * (microbatch["sequence"] == number)
        means.append((output * mask).sum() / mask.sum())
    return torch.stack(means).mean(), {}


def gspo(microbatch, output, is_summed=True):
    """The mean over sequences of a sequence's ratio times its advantage."""
    from megatron.core import parallel_state

    mask, sequence = microbatch["loss_mask"], microbatch["sequence"].flatten()
    log_ratio = (-output - microbatch["old_log_probs"]) * mask
    parts = torch.zeros(2, len(microbatch["advantage"]))
    parts = parts.index_add(1, sequence, torch.stack([log_ratio.flatten(), mask.flatten()]))
    group = parallel_state.get_context_parallel_group()
    sums, tokens = all_reduce(parts, group=group) if is_summed else parts
    ratio = (sums / tokens.clamp(min=1)).exp()
    loss = -(ratio * microbatch["advantage"]).sum() / dist.get_world_size(group)
    count = len(ratio) if dist.get_rank(group) == 0 else 0
    return loss, torch.tensor(count, dtype=torch.int), {}


def gspo_of_parts(microbatch, output):
    """The same with a ratio of what each context-parallel rank holds."""
    return gspo(microbatch, output, is_summed=False)


def of_padding(microbatch, output):
    """A loss that forgets its mask."""
    return output.sum(), microbatch["loss_mask"].sum().int(), {}


def of_nothing(microbatch, output):
    """Train no token."""
    return (output * 0).sum(), {}


def nan_at_a_token(microbatch, output):
    """A right mean but for the gradient of one token."""
    loss, num_tokens, report = global_mean(microbatch, output)
    return loss + output.flatten()[0] * float("nan"), num_tokens, report


def mean_of_squares(microbatch, output):
    """A mean over tokens which is not linear in ``output``."""
    return global_mean(microbatch, output**2)


def padding_at_cp(microbatch, output):
    """A right loss, which trains padding if there are context-parallel ranks."""
    from megatron.core import parallel_state

    loss, num_tokens, report = pretrain_gpt(microbatch, output)
    if parallel_state.get_context_parallel_world_size() > 1:
        loss = loss + (output * (1 - microbatch["loss_mask"])).sum()
    return loss, num_tokens, report


def raises(microbatch, output):
    """Read a column that the batch does not have."""
    return microbatch["rewards"].sum(), {}


def sequences(number=12, lengths=(5, 9, 3, 8, 4, 7)):
    """Return a batch with the columns of the policy losses."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(number):
        n = lengths[index % len(lengths)]
        drawn = torch.rand(3, n, generator=generator)
        made.append(
            {
                "loss_mask": [1.0] * (n - 1) + [float(index % 2)],
                "output": drawn[0],
                "old_log_probs": -drawn[1],
                "advantage_of_token": drawn[2] - 0.5,
                "advantage": 1.0 + index,
            }
        )
    return made


def samples_of_a_rank(microbatch, output):
    """A mean of sample means over this rank's own number of sequences."""
    from megatron.core import parallel_state

    mask, sequence = microbatch["loss_mask"].flatten(), microbatch["sequence"].flatten()
    tokens = torch.zeros(len(microbatch["cu_seqlens"]) - 1).index_add(0, sequence, mask)
    tokens = all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    own = sum(len(each["cu_seqlens"]) - 1 for each in microbatch["step"])
    k = len(microbatch["step"]) * parallel_state.get_context_parallel_world_size()
    loss = (output.flatten() * mask / tokens.clamp(min=1)[sequence]).sum() / own * k
    return loss, torch.ones((), dtype=torch.int), {}


def nan_on_one_rank(microbatch, output):
    """A right mean whose gradient is NaN on the last context-parallel rank, at CP above 1."""
    from megatron.core import parallel_state

    loss, num_tokens, report = global_mean(microbatch, output)
    is_last = parallel_state.get_context_parallel_rank() > 0
    return loss * (float("nan") if is_last else 1.0), num_tokens, report


def of_selected(microbatch, output):
    """The sum over tokens that a bool mask selects, per token."""
    losses = output[microbatch["loss_mask"]]
    return losses.sum(), torch.tensor(len(losses), dtype=torch.int), {}


def bool_masks():
    """Return sequences whose masks are bool."""
    return [{**one, "loss_mask": torch.tensor(one["loss_mask"]) > 0} for one in sequences(7)]
