"""``python -m benchmarks`` is ``python benchmarks/run.py``."""

import sys

from benchmarks.run import main

sys.exit(main())
