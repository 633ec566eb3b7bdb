"""A line for each optimizer step, and the comparison of two runs."""
