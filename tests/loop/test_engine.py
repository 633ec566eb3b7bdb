"""Each ``check_`` of the workers passes on live Megatron-FSDP."""

from importlib.util import find_spec

import pytest
from conftest import RELEASE, each_check

pytestmark = pytest.mark.skipif(
    RELEASE < (0, 16) or find_spec("einops") is None, reason="refused, or without einops"
)
output, test_megatron_fsdp = each_check("loop/engine_worker.py", processes=2)
of_four, test_instances = each_check("loop/hybrid_engine_worker.py", processes=4)
