"""The command line: ``lossagg verify``, ``run``, ``explain`` and ``plot``."""
