"""A model whose loss of a token is one parameter: its gradient is that token's weight."""

import torch
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
