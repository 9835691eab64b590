"""Whatever happens to a file of a checkpoint or an export is found out before it is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shared.checkpoint import Checkpoints
from shared.config.schema import Checkpoint as Rule
from shared.config.schema import Config
from shared.errors import UserError
from shared.handover import HandOver
from shared.models import model_spec
from tests.backends import BACKENDS
from tests.test_handover import exported
from tests.test_runs import RECIPE, losses, records, train, trained, working_folder

WORDS = ("--quiet", "schedule.steps=24", "checkpoint={every: 8, keep: 3}", "precision=float16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return working_folder(tmp_path_factory.mktemp("corruption"), RECIPE)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    return {backend: trained(folder, backend, f"run-{backend}", *WORDS) for backend in BACKENDS}


def files(directory: Path) -> list[Path]:
    return [path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file()]


def damages(path: Path) -> list[bytes | None]:
    """What the file may be afterwards: cut off by a byte, by half, empty, gone; one bit flipped at the ends and at
    places in between that are drawn."""
    whole = path.read_bytes()
    found: list[bytes | None] = [whole[:length] for length in {0, len(whole) // 2, len(whole) - 1} if length >= 0]
    found.append(None)
    rng = np.random.default_rng(len(whole))
    for place in {0, len(whole) - 1, *rng.integers(0, len(whole), 4)} if whole else ():
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        found.append(bytes(flipped))
    return [content for content in found if content != whole]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_file_of_a_checkpoint_cut_off_or_flipped_in_one_bit_is_found_out(
    backend: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    """And the checkpoint before it is taken instead."""
    checkpoints = runs[backend] / "checkpoints"
    names, tried = files(checkpoints / "24"), 0
    assert {"manifest.json", "manifest.sha256"} < {str(name) for name in names}
    for name in names:
        for content in damages(checkpoints / "24" / name):
            copy = tmp_path / "checkpoints"
            shutil.copytree(checkpoints, copy)
            if content is None:
                (copy / "24" / name).unlink()
            else:
                (copy / "24" / name).write_bytes(content)
            told: list[str] = []
            found = Checkpoints(copy, Rule()).restorable(told.append)
            assert found is not None and found.step == 16, (name, content)
            assert len(told) == 1 and "step 24 is damaged" in told[0]
            shutil.rmtree(copy)
            tried += 1
    assert tried >= 6 * len(names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_file_of_an_export_cut_off_or_flipped_in_one_bit_is_found_out(
    backend: str, folder: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    export = exported(folder, backend, runs[backend].name, f"export-{backend}")
    config = Config.model_validate(json.loads((runs[backend] / "run.json").read_text())["config"])
    spec = model_spec(config.model)
    HandOver(export, config, spec)
    for name in files(export):
        for content in damages(export / name):
            copy = tmp_path / "export"
            shutil.copytree(export, copy)
            if content is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(content)
            with pytest.raises(UserError, match="damaged"):
                HandOver(copy, config, spec)
            shutil.rmtree(copy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_whose_newest_checkpoint_is_damaged_ends_bit_for_bit_as_if_it_were_not(
    backend: str, folder: Path, runs: dict[str, Path]
) -> None:
    hurt = folder / f"hurt-{backend}"
    trained(folder, backend, hurt.name, *WORDS, "--stop-at-step", "16")
    largest = max((hurt / "checkpoints" / "16").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)

    done = train(folder, backend, hurt.name, *WORDS[1:])
    assert done.returncode == 0, done.stderr
    assert "warning: the checkpoint of step 16 is damaged" in done.stderr and "step 8 to 24" in done.stderr
    assert [record["step"] for record in records(hurt)] == list(range(1, 25))
    assert np.array_equal(losses(hurt), losses(runs[backend]))
    assert (hurt / "checkpoints" / "damaged-16").is_dir() and (hurt / "checkpoints" / "16").is_dir()


@pytest.mark.parametrize("backend", BACKENDS)
def test_loading_a_checkpoint_runs_no_code(backend: str, folder: Path, runs: dict[str, Path]) -> None:
    """A pickle is a program; the interpreter tells of every one that asks for a name to call."""
    script = """
import importlib, sys
from pathlib import Path
from shared.stored_run import open_stored_run
name, path = sys.argv[1:]
framework = getattr(importlib.import_module(f"{name}train.framework"), name.capitalize())()
run = open_stored_run(Path(path), None, framework)
backend = framework.backend(run.config)
asked = []
sys.addaudithook(lambda event, arguments: asked.append(arguments) if event.startswith("pickle") else None)
backend.restore(run.checkpoint.directory)
state = run.state(framework)
for role in state.roles:
    state.read(role, run.spec.parameters[0])
assert not asked, asked
import pickle
pickle.loads(pickle.dumps(Path))
assert asked, "the hook hears nothing"
"""
    command = [sys.executable, "-c", script, backend, str(runs[backend])]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
