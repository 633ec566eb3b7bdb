"""Proof on the installed Megatron-Core that the loss trained is the loss named.

A small model, uneven rows with every degenerate case, Megatron's own schedules,
DistributedDataParallel and ``finalize_model_grads``, against a float64 oracle on one process.
"""
