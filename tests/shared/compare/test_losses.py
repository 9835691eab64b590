import math

import numpy as np
import pytest

from shared.compare.comparison import loosest_limit
from shared.compare.losses import JUDGED_STEPS, LIMITS, Limit, compare_losses


def test_the_figures_agree_with_numpy() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.normal(3.0, 1.0, (2, 200))
    steps = range(1, 201)
    found = compare_losses(dict(zip(steps, first, strict=True)), dict(zip(steps, second, strict=True)), Limit(0.5))
    differences = np.abs(first - second)
    # fsum and NumPy's pairwise sum round differently in the last bit.
    assert found.mean == pytest.approx(differences.mean(), rel=1e-15)
    assert found.max == differences.max()
    assert found.max_at_step == differences.argmax() + 1
    assert found.first_step_over_limit == (differences > 0.5).argmax() + 1


def test_only_steps_that_both_recorded_are_compared() -> None:
    every_2 = {step: 1.0 for step in range(2, 13, 2)}
    every_3 = {step: 1.5 for step in range(3, 13, 3)}
    found = compare_losses(every_2, every_3, Limit(1.0))
    assert list(found.differences) == [6, 12]
    assert found.mean == 0.5


def test_only_the_first_300_steps_decide() -> None:
    first = dict.fromkeys(range(1, 601), 1.0)
    late = {step: 1.0 if step <= JUDGED_STEPS else 2.0 for step in first}
    found = compare_losses(first, late, Limit(1e-4))
    assert found.within_limit
    assert found.judged_value == 0.0
    assert found.mean == 0.5  # The later steps are reported all the same.
    assert found.first_step_over_limit == 301
    early = {step: 1.001 if step <= JUDGED_STEPS else 1.0 for step in first}
    assert not compare_losses(first, early, Limit(1e-4)).within_limit


def test_the_mean_decides_and_not_a_single_step() -> None:
    first = dict.fromkeys(range(1, 11), 1.0)
    found = compare_losses(first, first | {5: 1.0009}, Limit(1e-4))
    assert found.judged_value == pytest.approx(9e-5)
    assert found.within_limit
    assert found.first_step_over_limit == 5
    assert not compare_losses(first, first | {5: 1.0011}, Limit(1e-4)).within_limit


def test_in_float64_the_largest_relative_difference_decides() -> None:
    first = dict.fromkeys(range(1, 11), 100.0)
    # 5e-11 of 100 is 5e-13 of it; 2e-10 of 100 is 2e-12 of it. Their means over ten steps would both pass.
    assert compare_losses(first, first | {5: 100.0 + 5e-11}, LIMITS["float64"]).within_limit
    wrong = compare_losses(first, first | {5: 100.0 + 2e-10}, LIMITS["float64"])
    assert not wrong.within_limit
    assert wrong.first_step_over_limit == 5
    assert wrong.judged_value == pytest.approx(2e-12, rel=1e-3)  # 100 + 2e-10 is itself rounded to 1.4e-14.


def test_a_loss_of_zero_is_no_division_by_zero() -> None:
    assert compare_losses({1: 0.0}, {1: 0.0}, LIMITS["float64"]).within_limit
    assert not compare_losses({1: 0.0}, {1: 1e-30}, LIMITS["float64"]).within_limit


@pytest.mark.parametrize("limit", LIMITS.values())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_only_one_run_lost_is_never_within_a_limit(limit: Limit, bad: float) -> None:
    for first, second in (({1: 1.0, 2: 1.0}, {1: 1.0, 2: bad}), ({1: 1.0, 2: bad}, {1: 1.0, 2: 1.0})):
        found = compare_losses(first, second, limit)
        assert found.max == found.judged_value == math.inf
        assert (found.max_at_step, found.first_step_over_limit, found.within_limit) == (2, 2, False)


def test_losses_that_both_runs_lost_are_counted_apart() -> None:
    found = compare_losses({1: 1.0, 2: math.nan, 3: math.inf}, {1: 1.0, 2: math.nan, 3: math.nan}, Limit(1e-4))
    assert found.not_finite == (2, 3)
    assert list(found.differences) == [1]
    assert found.within_limit


def test_nothing_in_common_is_not_agreement() -> None:
    found = compare_losses({1: 1.0}, {2: 1.0}, Limit(1e-4))
    assert (found.mean, found.max, found.max_at_step, found.judged_value) == (None, None, None, None)
    assert not found.within_limit


def test_limits_lie_between_rounding_and_the_smallest_mistake() -> None:
    # SEMANTICS' measurements: two correct float32 runs differ by 2.7e-5, a mistake moves the loss by 4e-3 or more;
    # two correct bfloat16 runs differ by 8e-3.
    assert 2.7e-5 < LIMITS["float32"].value < 4e-3
    assert LIMITS["bfloat16"].value == LIMITS["float16"].value > 8e-3
    assert LIMITS["float64"].relative_maximum
    assert 1e-15 < LIMITS["float64"].value <= 1e-12


def test_the_coarser_precision_sets_the_limit() -> None:
    assert loosest_limit("float64", "float32") == LIMITS["float32"]
    assert loosest_limit("bfloat16", "float32") == LIMITS["bfloat16"]
    assert loosest_limit("unheard of", "float64") == LIMITS["float32"]
