"""Verification on the installed Megatron-Core that the trained loss is the configured loss.

A small model, uneven sequences with every degenerate case, Megatron's own schedules,
DistributedDataParallel and ``finalize_model_grads``, against a float64 reference on one process.
"""
