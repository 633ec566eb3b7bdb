"""Counts to weights to partial losses: no Megatron, no step."""
