"""Megatron-Bridge's own loss function under the schedule hook, on live Megatron-Core; DP 2.

``HOSTS_DIR=... pytest tests/test_hosts_bridge.py``, with the checkout in
``$HOSTS_DIR/Megatron-Bridge``; without, it skips. Its data is tried in ``test_schedule.py``.
"""

import os
from pathlib import Path

import pytest
from conftest import launched

LOSSES = (
    Path(os.environ.get("HOSTS_DIR", "")) / "Megatron-Bridge/src/megatron/bridge/training/losses.py"
)


@pytest.mark.skipif(not LOSSES.exists(), reason=f"no checkout with {LOSSES}: set HOSTS_DIR")
def test_bridges_own_loss_function_is_replaced_by_the_configured_loss():
    assert "BRIDGE equals the loops" in launched("bridge_worker.py", LOSSES, processes=2)
