"""A model whose loss of a token is one parameter: its gradient is that token's weight."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType


class OneWeightPerToken(torch.nn.Module):
    """The loss of token t is weight t."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, num_tokens):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(num_tokens))

    def set_input_tensor(self, tensor):
        """Take nothing: there is one stage."""

    def forward(self, tokens):
        return self.weight[tokens]


def wrapped(config, num_tokens, **ddp):
    """Wrap the model in Megatron-Core's DistributedDataParallel."""
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(**ddp), OneWeightPerToken(num_tokens)
    )


def masked_sum(mask, output):
    """Return what the loss_func of a framework on Megatron-LM returns."""
    loss, num_tokens = (output * mask).sum(), mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss)])}


def mean_by_hand(sequences, num_tokens, mode):
    """Return the gradient of a mean over the trained tokens of each sequence.

    ``mode``: ``sample_mean``, the mean over sequences of their means, or ``token_mean``.
    """
    gradient = torch.zeros(num_tokens)
    for trained in sequences:
        for token in trained:
            gradient[token] = {
                "sample_mean": 1 / len(trained) / len(sequences),
                "token_mean": 1 / sum(map(len, sequences)),
            }[mode]
    return gradient


def error_of(found, wanted):
    """Return how far a gradient is from the wanted one, relative to it."""
    return ((found - wanted).norm() / wanted.norm()).item()
