"""``python -m megatron_lossagg``: the ``lossagg`` command, also under torchrun."""

from __future__ import annotations

import sys

from megatron_lossagg.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
