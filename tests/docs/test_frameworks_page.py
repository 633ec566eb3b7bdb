"""The rows of what frameworks train, from what ``lossagg weigh --framework`` writes."""

import pytest

from tools.frameworks_page import rows, trained


def term(low, high, *, error, factor=None, nearest="token_mean", causes=()):
    weighed = {"factor": factor, "nearest": nearest, "causes": causes}
    return {"error": error, "relative": [low, high], "coefficient": 0.31, "weighed": weighed}


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (term(1.0, 1.0, error=1e-8, factor=0.31), "sample_mean"),
        (term(1.03, 1.03, error=0.03, factor=0.3193), "**1.03 times sample_mean**"),
        (term(0.5, 2.0, error=1.0, factor=0.31), "**token_mean**"),
        (term(0.25, 1.0, error=1.0, factor=0.155), "**0.5 times token_mean**"),
        (
            term(0.5, 2.0, error=1.0, causes=["a mean of means"]),
            "**0.5 to 2 times its weights**; a mean of means",
        ),
    ],
)
def test_a_term_is_what_its_setting_promises_or_what_it_trains_instead(of, said):
    assert trained(of, "sample_mean") == said


def test_a_row_has_the_terms_that_a_driver_knows():
    step = {
        "trained": "default",
        "is_ours": False,
        "wanted": "sample_mean",
        "terms": {
            "pg_loss": term(1.0, 1.0, error=0.0),
            "ppo_kl": {"coefficient": None},
        },
    }
    assert rows({"steps": [step]}) == ["| `default` | sample_mean | pg_loss: sample_mean |"]
