"""The first tensor that differs, in the order of a step."""

from __future__ import annotations

import numpy as np
import pytest

from shared.parity.difference import differences, first_difference, relative_error

TRACE = {
    "microbatch.rows": np.array([[0, 2], [1, 3]]),
    "forward.embedding": np.array([1.0, 2.0]),
    "forward.logits": np.array([3.0, 4.0]),
    "loss": np.array(1.5),
    "gradient.first": np.array([1.0]),
    "gradient.last": np.array([2.0]),
    "update.first": np.array([0.1]),
    "parameter.first": np.array([1.1]),
}


def test_equal_traces_differ_nowhere() -> None:
    assert first_difference(TRACE, dict(TRACE), 0.0) is None


@pytest.mark.parametrize("name", TRACE)
def test_a_single_difference_is_found(name: str) -> None:
    other = TRACE | {name: TRACE[name] * 1.01 + 1}
    found = first_difference(TRACE, other, 1e-9)
    assert found is not None and found.name == name


def test_the_first_in_the_order_of_a_step_is_named() -> None:
    other = {name: value + 1 for name, value in TRACE.items()}
    order = ["microbatch.rows", "forward.embedding", "forward.logits", "loss"]
    # The backward pass comes to the last layer first.
    order += ["gradient.last", "gradient.first", "update.first", "parameter.first"]
    assert [d.name for d in differences(TRACE, other)] == order
    assert differences(TRACE, other)[0].error > 0


def test_errors_are_norms_over_norms() -> None:
    assert relative_error(np.array([3.0, 4.4]), np.array([3.0, 4.0])) == pytest.approx(0.4 / 5)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_error(np.ones(2), np.zeros(2)) == np.inf


def test_another_shape_a_missing_tensor_and_a_lone_infinity_differ() -> None:
    assert relative_error(np.ones(2), np.ones(3)) == np.inf
    assert relative_error(np.array([np.inf, 1.0]), np.array([1.0, 1.0])) == np.inf
    assert relative_error(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) == 0.0
    without = {name: value for name, value in TRACE.items() if name != "forward.logits"}
    for pair in ((TRACE, without), (without, TRACE)):
        found = first_difference(*pair, 1e-9)
        assert found is not None and (found.name, found.error) == ("forward.logits", np.inf)
