"""What goes wrong in a run: numbers that are not finite, and disks that are full."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shared.config.schema import Config
from shared.initialization import FirstDraws
from shared.models import ModelSpec, Parameter, model_spec
from tests.backends import BACKENDS
from tests.test_handover import exported
from tests.test_runs import RECIPE, command, losses, records, train, trained, working_folder

STEPS = 24


class Poisoned(FirstDraws):
    """The first draws, but for the embedding of the letter Z, which is infinite: a batch that has a Z gives NaN."""

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        array = super().read(role, parameter)
        if parameter.name == "model.embed_tokens.weight":
            array[ord("Z")] = np.inf
        return array


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, weights that some of its batches cannot bear, and those weights without the flaw."""
    from shared.huggingface import write_pretrained

    schedule = RECIPE["schedule"] | {"steps": STEPS, "warmup_steps": 2}
    sections = {"schedule": schedule, "checkpoint": {"every": 4, "keep": 9}}
    folder = working_folder(tmp_path_factory.mktemp("faults"), RECIPE | sections)
    for path in (folder / "corpus").iterdir():
        text = path.read_text()
        path.write_text(" Z ".join(text[start : start + 800] for start in range(0, len(text), 800)))
    config = Config.model_validate(yaml.safe_load((folder / "recipe.yaml").read_text()))
    spec: ModelSpec = model_spec(config.model)
    write_pretrained(folder / "poisoned", config, spec, Poisoned(config.seed), "parameters")
    return folder


def faults(run: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem): json.loads(path.read_text()) for path in (run / "faults").glob("*.json")}


@pytest.fixture(scope="module")
def skipped(folder: Path) -> dict[str, Path]:
    words = ("--quiet", "--init-from", "poisoned", "nonfinite={policy: skip, limit: 20}", "logging.every=5")
    return {backend: trained(folder, backend, f"skip-{backend}", *words) for backend in BACKENDS}


def test_skip_leaves_out_the_updates_that_are_not_finite_and_writes_their_rows_down(
    folder: Path, skipped: dict[str, Path]
) -> None:
    """Of every step, also those that are not logged; and both backends go on alike."""
    found = {backend: faults(run) for backend, run in skipped.items()}
    assert found["jax"].keys() == found["torch"].keys() and 2 <= len(found["jax"]) < STEPS / 2
    for backend in BACKENDS:
        for step, fault in found[backend].items():
            assert fault["loss"] == "nan" and fault["policy"] == "skip" and fault["step"] == step
            assert len(fault["rows"]) == 8 and any("Z" in row["text"] for row in fault["rows"])
    assert [fault["rows"] for fault in found["jax"].values()] == [fault["rows"] for fault in found["torch"].values()]
    ours, theirs = (
        [record["loss"] for record in records(run) if record["step"] not in found["jax"]] for run in skipped.values()
    )
    assert ours == pytest.approx(theirs, rel=1e-12) and np.isfinite(ours).all()
    states = [exported(folder, backend, run.name, f"state-{backend}") for backend, run in skipped.items()]
    updates = [json.loads((state / "manifest.json").read_text())["state"]["num_updates"] for state in states]
    assert updates == [STEPS - len(found["jax"])] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_stop_ends_the_run_and_names_the_file_with_the_rows(
    folder: Path, backend: str, skipped: dict[str, Path]
) -> None:
    first = min(faults(skipped[backend]))
    done = train(folder, backend, f"stop-{backend}", "--init-from", "poisoned")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"stopped: step {first} is not finite: loss nan" in done.stderr
    assert f"its rows are in stop-{backend}/faults/{first}.json" in done.stderr
    newest = (first - 1) // 4 * 4
    assert f"Newest checkpoint: {f'step {newest}' if newest else 'none'}" in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_rewind_tries_again_and_stops_where_the_data_is_to_blame(
    folder: Path, backend: str, skipped: dict[str, Path]
) -> None:
    first = min(faults(skipped[backend]))
    done = train(folder, backend, f"rewind-{backend}", "--init-from", "poisoned", "nonfinite=rewind")
    assert done.returncode == 1
    assert (
        f"warning: step {first} is not finite" in done.stderr and "going back to the newest checkpoint" in done.stderr
    )
    assert f"stopped: step {first} is not finite" in done.stderr and "the machine is not to blame" in done.stderr


HEALED = """
import importlib, sys
name = sys.argv.pop(1)
backend = importlib.import_module(f"{name}train.backend")
Backend = getattr(backend, f"{name.capitalize()}Backend")
step, seen = Backend.train_step, []

def struck(self, state, batch):
    # A machine that fails once, in the sixth step: a parameter is overwritten.
    seen.append(batch)
    if len(seen) == 6 and name == "jax":
        import dataclasses
        key = "head.kernel"
        state = dataclasses.replace(state, parameters=state.parameters | {key: state.parameters[key] * float("nan")})
    elif len(seen) == 6:
        state.model.head.weight.data.mul_(float("nan"))
    return step(self, state, batch)

Backend.train_step = struck
framework = getattr(importlib.import_module(f"{name}train.framework"), name.capitalize())()
from shared.command import main
sys.exit(main(sys.argv[1:], framework))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_rewind_heals_a_fault_of_the_machine_bit_for_bit(folder: Path, backend: str) -> None:
    import sys

    whole = trained(folder, backend, f"well-{backend}", "--quiet")
    words = ["--config", "recipe.yaml", "--run-dir", f"struck-{backend}", "nonfinite=rewind"]
    done = subprocess.run(
        [sys.executable, "-c", HEALED, backend, *words], cwd=folder, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "step 6 is not finite" in done.stderr
    struck = folder / f"struck-{backend}"
    assert [record["step"] for record in records(struck)] == list(range(1, STEPS + 1))
    assert np.array_equal(losses(struck), losses(whole))
    assert list(faults(struck)) == [6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_cannot_grow_is_told_of_and_the_checkpoint_before_stays(folder: Path, backend: str) -> None:
    """The system's limit on the size of a file stands for a disk that is full; the state is 400 kB."""
    run = f"full-{backend}"
    trained(folder, backend, run, "--quiet", "--stop-at-step", "4")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        command(backend, run), cwd=folder, text=True, capture_output=True, timeout=120, preexec_fn=limit
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"warning: {run}/checkpoints/8: cannot be written" in done.stderr and "training goes on" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {run}/checkpoints/{STEPS}: cannot be written: ") and last.endswith("step 4")
    assert [path.name for path in (folder / run / "checkpoints").iterdir()] == ["4"]

    trained(folder, backend, run, "--quiet")
    assert [record["step"] for record in records(folder / run)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_place_that_takes_no_checkpoints_is_one_line(folder: Path, backend: str) -> None:
    run = folder / f"blocked-{backend}"
    run.mkdir()
    (run / "checkpoints").touch()
    done = train(folder, backend, run.name, "--quiet", "--stop-at-step", "2")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "checkpoints/2: cannot be written: " in done.stderr
