"""The loop around Megatron's schedule: ``LossAggregator``, ``Step``, the schedule hook, the probe."""
