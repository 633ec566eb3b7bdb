"""The command line: ``lossagg verify`` and ``lossagg explain``."""
