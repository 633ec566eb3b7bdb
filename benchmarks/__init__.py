"""What the package costs, beside the known algorithms: ``python benchmarks/run.py``."""
