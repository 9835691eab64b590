"""Processes that would train different runs are told apart before they begin."""

from __future__ import annotations

import pytest

from shared.agreement import require_agreement, statement
from shared.errors import UserError

FINGERPRINTS = {"recipe": "a1", "data": "b2", "initial_weights": "c3"}
VERSIONS = {"torch": "2.13.0", "numpy": "2.4.6"}


def test_processes_that_say_the_same_agree() -> None:
    require_agreement([statement(FINGERPRINTS, 7, VERSIONS)] * 4)


@pytest.mark.parametrize(
    ("fingerprints", "step", "versions", "complaint"),
    [
        ({"data": "x"}, 7, {}, "the fingerprint of data is b2 in process 0 and x in process 2"),
        ({}, 0, {}, "the step of the newest checkpoint is 7 in process 0 and 0 in process 2"),
        ({}, 7, {"torch": "2.12.0"}, "the version of torch is 2.13.0 in process 0 and 2.12.0 in process 2"),
        ({}, 7, {"cuda": "13"}, "the version of cuda is None in process 0 and 13 in process 2"),
    ],
)
def test_what_differs_is_named_with_its_process(
    fingerprints: dict[str, str], step: int, versions: dict[str, str], complaint: str
) -> None:
    same = statement(FINGERPRINTS, 7, VERSIONS)
    other = statement(FINGERPRINTS | fingerprints, step, VERSIONS | versions)
    with pytest.raises(UserError) as caught:
        require_agreement([same, same, other, same])
    assert complaint in str(caught.value)
