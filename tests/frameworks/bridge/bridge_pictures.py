"""A small vision-language model for Bridge's ``vlm_step``: text, and vectors in place of pictures.

As Bridge's own models do, it replaces the embeddings of picture tokens, slices everything itself
with Bridge's function, and returns its losses with the slice of the mask.
"""

import os
from dataclasses import dataclass

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.bridge.utils.common_utils import slice_batch_for_context_parallel
from megatron.core.models.gpt import GPTModel
from torch.utils.data import default_collate

PICTURE = 7
"""The token in whose place a picture's vectors go."""
WIDTH = 32
PADDING = 8
"""Positions that a model with pictures in front puts before the text."""


class Pictures(GPTModel):
    """A GPT that sees pictures."""

    def forward(
        self,
        input_ids,
        position_ids,
        attention_mask,
        labels=None,
        loss_mask=None,
        packed_seq_params=None,
        pixel_values=None,
    ):
        embedded = self.embedding(input_ids=input_ids, position_ids=None)
        if pixel_values is not None:
            is_picture = (input_ids == PICTURE).t()[..., None].expand_as(embedded)
            embedded = embedded.masked_scatter(is_picture, pixel_values)
        embedded, labels, loss_mask, position_ids, attention_mask = (
            slice_batch_for_context_parallel(
                inputs_embeds=embedded,
                labels=labels,
                loss_mask=loss_mask,
                position_ids=position_ids,
                attention_mask=attention_mask,
                packed_seq_params=packed_seq_params,
                pg_collection=self.config._pg_collection,
            )
        )
        losses = super().forward(
            None,
            position_ids,
            attention_mask,
            decoder_input=embedded,
            labels=labels,
            packed_seq_params=packed_seq_params,
        )
        if loss_mask is None:
            return losses
        if os.environ["PICTURES"] == "in front":
            losses, loss_mask = (
                torch.nn.functional.pad(values, (PADDING, 0)) for values in (losses, loss_mask)
            )
        return losses, loss_mask


@dataclass
class Provider(GPTModelProvider):
    """Bridge's provider of a GPT, which sees pictures."""

    def provide(self, *args, **kwargs):
        """Return the model."""
        model = super().provide(*args, **kwargs)
        model.__class__ = Pictures
        return model


def vectors(tokens):
    """Return one vector for each picture token, which depend on all the text."""
    draw = torch.Generator().manual_seed(int(tokens.sum()))
    return torch.randn(int((tokens == PICTURE).sum()), WIDTH, generator=draw)


def with_picture(item):
    """Put one picture into a sample of packed conversations; its tokens are not trained."""
    tokens, mask = item["tokens"].clone(), item["loss_mask"].clone()
    tokens[[1, 2, 14, 21]] = PICTURE
    mask[tokens == PICTURE] = 0
    item = {**item, "tokens": tokens, "loss_mask": mask}
    return {**item, "visual_inputs": GenericVisualInputs(pixel_values=vectors(tokens))}


def collated(items):
    """Make a microbatch of one sample, as Bridge's collate functions do."""
    (item,) = items
    batch = default_collate([{k: v for k, v in item.items() if k != "visual_inputs"}])
    offsets = {name: values[0] for name, values in batch.items() if name.startswith("cu_seqlens")}
    return {**batch, **offsets, "visual_inputs": item["visual_inputs"]}


class Seen:
    """A model for the reference, which gives it one conversation after the other."""

    def __init__(self, model, pictures):
        self.model, self.parameters = model, model.parameters
        self.unseen = torch.cat([picture.pixel_values for picture in pictures])

    def __call__(self, tokens, positions, mask, *, labels):
        """Return the losses of a conversation."""
        size = int((tokens == PICTURE).sum())
        now, self.unseen = self.unseen[:size], self.unseen[size:]
        return self.model(tokens, positions, mask, labels=labels, pixel_values=now)
