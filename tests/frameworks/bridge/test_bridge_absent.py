"""Megatron-Bridge's integration without Megatron-Bridge."""

from importlib.util import find_spec

import pytest

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import bridge


@pytest.mark.skipif(find_spec("megatron.bridge") is not None, reason="Megatron-Bridge is there")
def test_a_framework_that_is_not_there_is_refused_by_name():
    message = "cannot be imported.*Megatron-Bridge: put its checkout on PYTHONPATH"
    with pytest.raises(ContractError, match=message):
        bridge.install("sample_mean")
