"""The page of ``lossagg plot`` is rendered whole or not at all."""

import jinja2
import pytest

from megatron_lossagg.cli import html


def test_a_name_that_a_template_lacks_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="is undefined"):
        html.page("shares.html")
