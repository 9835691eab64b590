import math
from pathlib import Path
from typing import Any

import pytest

from shared.compare.comparison import Comparison, compare_runs
from shared.compare.runs import load_run
from shared.compare.verdict import figure, reasons, rounded, sentence
from tests.shared.compare.made_runs import RECIPE, make_run


def comparison(folder: Path, second: dict[str, Any], first: dict[str, Any] | None = None) -> Comparison:
    """A common run of JAX against one of PyTorch with something changed."""
    one = make_run(folder / "one", **(first or {}))
    two = make_run(folder / "two", **{"backend": "torch", **second})
    return compare_runs(load_run(one), load_run(two))


def test_equal_runs_are_the_same_run(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"losses": (4.0, 3.00001, 2.00001, 1.0), "tokens_per_s": 1310.0})
    assert reasons(found) == []
    assert sentence(found) == (
        "Same run: jax on cpu and torch on cpu read the same batches and their losses differ by 5e-6 on average over "
        "the first 4 steps (limit 1e-4); torch is 1.31x faster."
    )


@pytest.mark.parametrize(
    ("name", "called"),
    [("data", "data"), ("initial_weights", "initial weights"), ("learning_rates", "learning rates")],
)
def test_every_fingerprint_must_be_equal_and_known(tmp_path: Path, name: str, called: str) -> None:
    found = comparison(tmp_path, {"fingerprints": {name: "other"}})
    assert reasons(found) == [f"the {called} differ"]
    found = comparison(tmp_path, {"fingerprints": {name: None}})
    assert reasons(found) == [f"torch on cpu did not record the fingerprint of the {called}"]
    found = comparison(tmp_path, {"fingerprints": {name: None}}, {"fingerprints": {name: None}})
    assert reasons(found) == [f"jax on cpu and torch on cpu did not record the fingerprint of the {called}"]


def test_what_differs_in_the_recipe_is_named_with_both_values(tmp_path: Path) -> None:
    recipe = {"optimizer": {"name": "adamw", "eps": 1.001e-8, "ema_decay": None}, "seed": 1}
    found = comparison(tmp_path, {"recipe": recipe, "fingerprints": {"recipe": "other"}})
    assert reasons(found) == [
        "the recipes differ (seed is 0 and 1, optimizer.eps is 1e-8 and 1.001e-8, "
        "optimizer.ema_decay is (not set) and null)"
    ]
    assert [item.field for item in found.recipe_differences] == ["seed", "optimizer.eps", "optimizer.ema_decay"]


def test_a_sentence_does_not_list_more_than_three_fields(tmp_path: Path) -> None:
    recipe = {f"field_{i}": i for i in range(5)}
    found = comparison(tmp_path, {"recipe": recipe, "fingerprints": {"recipe": "other"}})
    assert reasons(found)[0].endswith("field_2 is (not set) and 2, and 2 more)")


def test_different_hashes_of_equal_fields_are_explained(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"fingerprints": {"recipe": "other"}})
    assert "written by different versions" in reasons(found)[0]


def test_one_different_batch_is_enough(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"batches": {3: "other"}})
    assert reasons(found) == ["1 of 4 batches differ, the first at step 3"]


def test_batches_that_were_not_recorded_are_not_vouched_for(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"batches": dict.fromkeys(range(1, 5))})
    assert reasons(found) == ["the batches' hashes were not recorded by both"]


def test_losses_too_far_apart_are_a_reason(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"losses": (4.0, 3.0, 2.5, 1.0)})
    assert reasons(found) == [
        "their losses differ by 0.12 on average over the first 4 steps (limit 1e-4), beyond it first at step 3"
    ]


@pytest.mark.parametrize(("precision", "same"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_the_limit_follows_the_precision(tmp_path: Path, precision: str, same: bool) -> None:
    recipe = {"precision": {"compute": precision}}
    found = comparison(tmp_path, {"recipe": recipe, "losses": (4.01, 3.01, 2.01, 1.01)}, {"recipe": recipe})
    assert (reasons(found) == []) is same


def test_a_limit_of_the_users_replaces_the_value(tmp_path: Path) -> None:
    one = load_run(make_run(tmp_path / "one"))
    two = load_run(make_run(tmp_path / "two", (4.01, 3.01, 2.01, 1.01)))
    assert reasons(compare_runs(one, two))
    assert not reasons(compare_runs(one, two, limit=0.011))


def test_float64_speaks_of_the_share_of_the_loss(tmp_path: Path) -> None:
    recipe = {"precision": {"compute": "float64"}}
    found = comparison(tmp_path, {"recipe": recipe, "losses": (4.0, 3.0, 2.0, 1.0 + 2**-50)}, {"recipe": recipe})
    assert "their losses differ by at most 8.9e-16 of their value over the first 4 steps (limit 1e-12)" in sentence(
        found
    )


def test_bitwise_equality_is_said(tmp_path: Path) -> None:
    assert "and their losses are equal to the last bit over the first 4 steps;" in sentence(comparison(tmp_path, {}))


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (500.0, "; jax is 2.00x faster."),
        (990.0, "; both are equally fast."),
        (20_000.0, "; torch is 20x faster."),
        (None, "over the first 4 steps."),
    ],
)
def test_the_faster_run_is_named(tmp_path: Path, speed: float | None, words: str) -> None:
    assert sentence(comparison(tmp_path, {"tokens_per_s": speed})).endswith(words)


def test_speed_is_the_median_without_the_first_record(tmp_path: Path) -> None:
    assert load_run(make_run(tmp_path / "run", tokens_per_s=1000.0)).tokens_per_s == 1000.0
    assert load_run(make_run(tmp_path / "only", (2.0, 1.0), tokens_per_s=1000.0)).tokens_per_s == 100.0


# ------------------------------------------------------------------------------------------------------ odd runs


def test_a_run_without_records_says_so(tmp_path: Path) -> None:
    assert sentence(comparison(tmp_path, {"losses": ()})) == (
        "Not the same run: torch on cpu has no training records yet."
    )
    assert reasons(comparison(tmp_path, {"losses": ()}, {"losses": ()})) == [
        "jax on cpu and torch on cpu have no training records yet"
    ]


def test_runs_of_different_length_are_compared_over_what_they_share(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"losses": (4.0, 3.0)})
    assert reasons(found) == []
    assert "over the first 2 steps" in sentence(found)
    assert "over the first step." in sentence(comparison(tmp_path, {"losses": (4.0,)}))


def test_runs_that_log_at_different_steps_are_compared_where_they_meet(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"losses": {2: 3.0, 4: 1.0}})
    assert reasons(found) == []
    assert "over 2 of the first 4 steps" in sentence(found)
    found = comparison(tmp_path, {"losses": {2: 3.0, 4: 1.0}}, {"losses": {1: 4.0, 3: 2.0}})
    assert reasons(found) == ["no step was recorded by both (see logging.every)"]


def test_steps_that_are_all_too_late_cannot_be_judged(tmp_path: Path) -> None:
    losses = {"losses": {500: 1.0, 1000: 0.5}}
    assert reasons(comparison(tmp_path, losses, losses)) == [
        "no step up to 300 was recorded by both, and later ones cannot be judged"
    ]


def test_a_run_that_diverged_alone_is_not_the_same_run(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"losses": (4.0, 3.0, math.nan, math.nan)})
    assert reasons(found) == ["the loss of torch on cpu is nan at step 3"]


def test_runs_that_diverged_from_the_start_are_nothing_to_compare(tmp_path: Path) -> None:
    losses = {"losses": (math.nan, math.inf)}
    found = comparison(tmp_path, losses, losses)
    assert reasons(found) == ["neither loss is finite from step 1 on, which leaves nothing to compare"]


def test_a_repeated_step_counts_as_it_was_written_last(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    lines = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(lines + lines.replace('"loss": 4.0', '"loss": 9.0'))
    assert load_run(path).losses == {1: 9.0, 2: 3.0, 3: 2.0, 4: 1.0}


def test_runs_of_one_kind_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"backend": "jax", "tokens_per_s": 2000.0})
    assert sentence(found).startswith("Same run: jax on cpu (one) and jax on cpu (two) read")
    assert sentence(found).endswith("; two is 2.00x faster.")
    one, two = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    assert f"jax on cpu ({one}) and jax on cpu ({two})" in sentence(compare_runs(load_run(one), load_run(two)))


def test_a_directory_compared_with_itself_is_called_that(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    found = compare_runs(load_run(run), load_run(tmp_path / "." / "run" / ".." / "run"))
    assert sentence(found) == f"Same run: both are one directory, {run}, compared with itself."


def test_several_devices_are_counted_in_the_name(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"device": {"kind": "NVIDIA A100", "count": 8}})
    assert "torch on 8 x NVIDIA A100 read" in sentence(found)


def test_settings_that_must_not_matter_are_no_reason(tmp_path: Path) -> None:
    found = comparison(
        tmp_path,
        {"config": {"accumulation": {"microbatch": 8}, "recipe": RECIPE}},
        {"config": {"accumulation": {"microbatch": None}, "checkpoint": {"every": 2}}},
    )
    assert reasons(found) == []
    (difference,) = found.execution_differences
    assert (difference.field, difference.first, difference.second) == ("accumulation.microbatch", None, 8)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-4, "1e-4"),
        (1.234567e-9, "1.234567e-9"),
        (0.003, "0.003"),
        (0.0, "0.0"),
        (1e20, "1e20"),
        (True, "true"),
        (None, "null"),
        ("adamw", "adamw"),
        (600, "600"),
        (math.nan, "nan"),
    ],
)
def test_values_are_written_exactly_and_short(value: Any, text: str) -> None:
    assert figure(value) == text


def test_measured_values_are_written_in_two_digits() -> None:
    assert [rounded(value) for value in (2.1345e-6, 0.0123456, 1.0, 9.99e-5)] == ["2.1e-6", "0.012", "1.0", "1e-4"]
