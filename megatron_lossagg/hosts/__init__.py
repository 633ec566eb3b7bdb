"""Entry points for training systems with a loss of their own, one file per host."""
