"""The command line: ``lossagg verify``, ``run``, ``explain``, ``plot`` and ``diff``."""
