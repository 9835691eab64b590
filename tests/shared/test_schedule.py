"""Learning rates, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shared.config.schema import Schedule
from shared.schedule import learning_rates, table_fingerprint
from tests.recipes import recipe


def table(**schedule: Any) -> np.ndarray:
    section: Schedule = recipe(schedule=schedule).schedule
    return learning_rates(section)


def test_the_warm_up_rises_to_the_peak_in_that_many_updates() -> None:
    rates = table(name="constant", steps=6, learning_rate=0.4, warmup_steps=4)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rel=1e-15)


def test_a_cosine_goes_from_the_peak_to_exactly_the_final_rate() -> None:
    rates = table(name="cosine", steps=6, learning_rate=1.0, warmup_steps=2, final_learning_rate=0.2)
    by_hand = [0.2 + 0.8 * (1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.5, 1.0, *by_hand], rel=1e-14)
    assert rates[-1] == pytest.approx(0.2, rel=1e-15)
    assert (np.diff(rates[1:]) < 0).all(), "it never rises again"


def test_wsd_is_stable_and_then_linear() -> None:
    rates = table(name="wsd", steps=8, learning_rate=1.0, warmup_steps=2, decay_steps=4, final_learning_rate=0.0)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0], abs=1e-15)
    flat = table(name="wsd", steps=4, learning_rate=1.0, warmup_steps=0, decay_steps=0, final_learning_rate=0.0)
    assert (flat == 1.0).all()


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_every_schedule_reaches_its_peak_and_stays_positive_until_the_last(warmup: int) -> None:
    for extra in ({"name": "constant"}, {"name": "cosine", "final_learning_rate": 0.0}):
        rates = table(steps=5, learning_rate=0.3, warmup_steps=warmup, **extra)
        assert len(rates) == 5 and rates.dtype == np.float64
        assert rates.max() <= 0.3 and (rates[:-1] > 0).all()


def test_tables_that_differ_have_different_fingerprints() -> None:
    schedule = {"name": "cosine", "steps": 50, "learning_rate": 1e-3, "warmup_steps": 5, "final_learning_rate": 1e-4}
    assert table_fingerprint(table(**schedule)) == "771a4b9ab45b159e"
    assert table_fingerprint(table(**schedule | {"warmup_steps": 6})) != table_fingerprint(table(**schedule))
    assert table_fingerprint(table(**schedule | {"steps": 51})) != table_fingerprint(table(**schedule))
