"""What the package costs, compared with the known algorithms: ``python -m benchmarks.run``."""
