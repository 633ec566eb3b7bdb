"""Around Megatron's schedule: ``LossAggregator``, ``Step``, the hook, the probe."""
