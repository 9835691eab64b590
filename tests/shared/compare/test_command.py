import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.compare.__main__ import main
from tests.shared.compare.made_runs import make_run


def words(text: str) -> list[str]:
    """Every line with single spaces, so that tests do not depend on column widths."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_exit_status_is_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", backend="torch")
    other = make_run(tmp_path / "other", batches={1: "x"})
    assert main([str(one), str(two)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Same run: ")
    assert main([str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("Not the same run: ")


def test_the_table_shows_both_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # So that the paths are short.
    one = make_run(Path("one"), held_out={2: 3.5, 4: 1.5}, summary={}, config={"remat": "none"})
    two = make_run(
        Path("two"),
        (4.0, 3.0, 2.5, 1.0, 0.5),
        backend="torch",
        device={"kind": "A[100]", "count": 2},
        recipe={"seed": 7},
        fingerprints={"recipe": "eeee", "data": None},
        held_out={4: 1.25},
        held_out_tokens=50,
        tokens_per_s=1500.0,
        config={"remat": "full"},
    )
    with (two / "metrics.jsonl").open("a") as stream:
        stream.write("torn")
    main([str(one), str(two)])
    output = words(capsys.readouterr().out)
    for line in (
        f"directory {one} {two}",
        "framework jax 0.10.2 torch 2.13.0",
        "device 1 x cpu 2 x A[100]",
        "steps 4 of 4 5 of 4",
        "seed 0 7 differs",
        "remat none full",
        "recipe aaaa eeee differ",
        "data bbbb not recorded unknown",
        "initial weights cccc cccc equal",
        "4 batches in both equal",
        "at step 4 1.000000 1.000000",
        "largest difference 0.5 at step 3",
        "mean, to step 300 0.12 over 1e-4",
        "first step over limit 3",
        "Held-out loss, step 4",
        "nats per token 1.500000 1.250000 -2.5e-01",
        "nats per byte 0.750000 0.625000",
        "tokens per second 1.00k 1.50k 1.50x",
        "torch on 2 x A[100] is still running or was stopped: it has no summary.",
        "torch on 2 x A[100]: 1 damaged line(s) of metrics.jsonl left out.",
        "The held-out losses were measured on different amounts of text (see evaluation.max_rows).",
    ):
        assert line in output


def test_a_terminal_of_80_columns_shows_no_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from shared.compare.comparison import compare_runs
    from shared.compare.runs import load_run
    from shared.compare.table import print_table

    prints = {"recipe": "0123456789abcdef", "data": "0123456789abcdef"}
    one = load_run(make_run(tmp_path / "one", fingerprints=prints))
    two = load_run(make_run(tmp_path / "two", fingerprints=prints, backend="torch"))
    print_table(compare_runs(one, two), Console(width=80))
    assert "recipe 0123456789abcdef 0123456789abcdef equal" in words(capsys.readouterr().out)


def test_json_holds_the_whole_comparison(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", held_out={4: 1.5})
    two = make_run(tmp_path / "two", (4.0, 3.0, 2.5, 1.0), backend="torch", held_out={4: 1.25}, tokens_per_s=1500.0)
    assert main([str(one), str(two), "--json", str(tmp_path / "out.json")]) == 1
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert found["same_run"] is False
    assert len(found["reasons"]) == 1
    assert found["verdict"] == f"Not the same run: {found['reasons'][0]}."
    assert found["fingerprints"] == {
        "recipe": {"equal": True, "values": ["aaaa", "aaaa"]},
        "data": {"equal": True, "values": ["bbbb", "bbbb"]},
        "initial_weights": {"equal": True, "values": ["cccc", "cccc"]},
        "learning_rates": {"equal": True, "values": ["dddd", "dddd"]},
        "batches": {"equal": True, "steps_compared": 4, "steps_that_differ": 0, "first_step_that_differs": None},
    }
    assert found["loss"] == {
        "mean_abs_diff": 0.125,
        "max_abs_diff": 0.5,
        "max_at_step": 3,
        "first_step_over_limit": 3,
        "steps_compared": 4,
        "steps_not_finite": 0,
        "judged": {
            "measure": "mean_abs_diff",
            "value": 0.125,
            "limit": 1e-4,
            "within_limit": False,
            "steps_compared": 4,
        },
    }
    assert found["held_out"] == {
        "step": 4,
        "loss": [1.5, 1.25],
        "nats_per_byte": [0.75, 0.625],
        "tokens": [100, 100],
        "abs_diff": 0.25,
    }
    assert found["throughput_ratio"] == 1.5
    assert [run["backend"] for run in found["runs"]] == ["jax", "torch"]


def test_json_is_strict_when_a_run_diverged(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", (4.0, float("nan")))

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert main([str(one), str(two), "--json", str(tmp_path / "out.json")]) == 1
    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=no_constant)
    assert found["loss"]["max_abs_diff"] == "inf"


def test_the_limit_can_be_given(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", (4.01, 3.01, 2.01, 1.01))
    assert main([str(one), str(two)]) == 1
    assert main([str(one), str(two), "--limit", "0.02"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: D; see python -m shared.compare --help"),
        (["{run}"], "compare takes two run directories, 1 given"),
        (["{run}", "{run}", "{run}"], "compare takes two run directories, 3 given"),
        (["{run}", "{tmp}/rum"], "{tmp}/rum: no such run directory; did you mean '{tmp}/run'?"),
        (["{run}", "{run}", "--limit", "much"], "argument --limit: 'much' is not a number above 0; see"),
        (["{run}", "{run}", "--limit", "-1"], "argument --limit: '-1' is not a number above 0; see"),
        (["{run}", "{run}", "--limit", "nan"], "argument --limit: 'nan' is not a number above 0; see"),
        (["{run}", "{run}", "--lim1t", "1"], "unrecognized arguments: --lim1t"),
        (["{run}", "{run}", "--json", "{tmp}/no/f.json"], "{tmp}/no/f.json: cannot be written: No such file"),
        (["{run}", "{run}", "--json", "{tmp}/run"], "{tmp}/run: cannot be written: it is a folder"),
        (["{run}", "{run}", "--picture", "{tmp}/no/f.png"], "{tmp}/no/f.png: cannot be written: No such file"),
        (["{run}", "{damaged}"], "{damaged}/run.json: damaged, it has no 'recipe'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    places = {"tmp": tmp_path, "run": make_run(tmp_path / "run"), "damaged": make_run(tmp_path / "b", recipe=None)}
    damaged = places["damaged"] / "run.json"
    damaged.write_text(json.dumps({key: v for key, v in json.loads(damaged.read_text()).items() if key != "recipe"}))
    assert main([argument.format(**places) for argument in arguments]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"error: {message.format(**places)}")
    assert error.count("\n") == 1


def test_the_command_runs_without_a_framework_and_imports_none(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", backend="torch")
    program = (
        "import sys; from shared.compare.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "assert not {'jax', 'torch', 'tensorflow', 'matplotlib.pyplot'} & set(sys.modules)\n"
        "sys.exit(status)"
    )
    arguments = [sys.executable, "-c", program, str(one), str(two), "--picture", str(tmp_path / "picture.png")]
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from shared.compare.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'rich', 'numpy', 'matplotlib', 'pydantic'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Exit status: 0 the same run" in done.stdout
