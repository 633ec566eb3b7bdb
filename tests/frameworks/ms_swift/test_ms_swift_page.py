"""An ms-swift that is too old, by its page; ``swift_checks.py`` starts the release."""

import ms_swift_page
import pytest
from frameworks import checkout_of, needs


@pytest.mark.launches
@needs("ms-swift", installed=True)
@pytest.mark.parametrize("trained", ["sft", "grpo"])
def test_an_ms_swift_before_4_6_0_is_refused_by_the_plugin(tmp_path, trained):
    found, done = ms_swift_page.start(tmp_path, trained, paths=[checkout_of("ms-swift")])
    assert found is None
    assert "got an ms-swift whose MegatronTrainer has no _log_callback" in done.stderr
