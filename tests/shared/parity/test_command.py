"""The command: a wrong input is one line and exit 2, and the ladder of a recipe holds what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.parity.__main__ import main
from shared.parity.jobs import Job
from shared.parity.ladder import Length, jobs_of, ladder
from shared.parity.view import figure

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config FILE is needed to climb the ladder"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--config", str(DEMO), "--only", "flaot64"], "--only flaot64: no such rung; did you mean 'float64'?"),
        (["--mutants", "--only", "GELU by arf"], "--only GELU by arf: no such mutant; did you mean 'GELU by erf'?"),
        (["--config", str(DEMO), "--steps", "1"], "--steps must be at least 2, not 1"),
        (["--config", str(DEMO), "schedule.stepz=3"], "schedule.stepz is not a known key; did you mean 'steps'?"),
        (["--config", str(DEMO), "--against", "nowhere"], "nowhere"),
        (["--config", str(DEMO), "--wrong"], "unrecognized arguments: --wrong; see python -m shared.parity --help"),
    ],
)
def test_a_wrong_input_is_one_line_and_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*argv, "--work", str(tmp_path / "work")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "work").exists(), "nothing was started, nothing is lost"


def test_the_ladder_of_a_recipe_has_all_rungs_and_one_run_serves_several() -> None:
    config = load_config(DEMO).config
    rungs = ladder(DEMO, config, [], Length())
    assert [rung.name for rung in rungs] == [
        "fingerprints", "float64 step", "float64", "float32 step", "float32 SGD", "float32", "bfloat16", "float16",
        "loss scale", "dtypes", "execution", "replicas", "resumed",
    ]  # fmt: skip
    jobs = jobs_of(rungs)
    assert len(jobs) == len({job.label for job in jobs}) == 10
    assert "--stop-at-step 300" in " ".join(jobs[0].flags)


@pytest.mark.parametrize(
    "job", jobs_of(ladder(DEMO, load_config(DEMO).config, [], Length())), ids=lambda job: job.label
)
def test_every_run_of_the_ladder_has_a_valid_config(job: Job) -> None:
    load_config(DEMO, job.overrides)


def test_a_short_recipe_has_a_short_ladder() -> None:
    config = load_config(DEMO, ["schedule.steps=4", "schedule.warmup_steps=1", "batch.global_batch=3"]).config
    rungs = ladder(DEMO, config, [], Length())
    assert "replicas" not in [rung.name for rung in rungs], "three rows cannot be shared by two"
    assert "--stop-at-step 4" in " ".join(jobs_of(rungs)[0].flags)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (2.0, "2"), (1.234, "1.23"), (3.2e-13, "3.2e-13"), (float("inf"), "inf")]
)
def test_figures_are_short(value: float, text: str) -> None:
    assert figure(value) == text
