"""What Megatron does to a loss."""
