"""One driver per framework: its own step on the drawn batch, without GPUs.

``driver.py`` has what a driver is, the batch and the reference; ``runs.py`` what the command line
does with one. A driver imports its framework, and runs in processes of its own.
"""
