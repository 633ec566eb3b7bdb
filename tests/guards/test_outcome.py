"""Which steps are weighed; each ``check_`` of ``outcome_worker.py`` passes on two ranks."""

from conftest import each_check

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.guards.outcome import WeighedSteps

output, test_the_weights_at_the_models_losses = each_check("guards/outcome_worker.py", processes=2)


def test_the_first_steps_are_weighed_and_those_after_a_change():
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[3, 1]))
    weighed = WeighedSteps()
    found = [n for n in range(1, 131) if weighed.has_next(plan, 3 if n == 100 else 2)]
    assert found == [1, 2, 4, 8, 16, 32, 64, 100, 128]
    assert weighed.has_next(plan.under("sample_mean"), 2)
    assert not weighed.has_next(plan.under("sample_mean"), 2)
    assert not weighed.has_next(None, 7)


def test_many_numbers_of_microbatches_do_not_weigh_every_step():
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[3, 1]))
    weighed = WeighedSteps()
    assert sum(weighed.has_next(plan, m) for m in range(1, 64)) == 8 + 2  # and 16, 32
