"""``python -m megatron_lossagg``: the ``lossagg`` command, for launchers that start modules."""

import sys

from megatron_lossagg.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
