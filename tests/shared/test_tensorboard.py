import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shared.errors import UserError
from shared.tensorboard import EventFile


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.scalars(1, {"train/loss": 2.5, "train/grad_norm": 0.1})
    events.scalars(2, {"train/loss": 2.25})
    assert read(tmp_path) == {  # Before close: a person watches while the run goes on.
        "train/loss": [(1, 2.5), (2, 2.25)],
        "train/grad_norm": [(1, float(np.float32(0.1)))],  # TensorBoard keeps float32.
    }
    events.close()


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    first = EventFile(tmp_path)
    for step in (1, 2, 3, 4):
        first.scalars(step, {"train/loss": 10.0 + step})
    first.close()
    resumed = EventFile(tmp_path, start_step=2)
    for step in (3, 4, 5):
        resumed.scalars(step, {"train/loss": 20.0 + step})
    resumed.close()
    assert read(tmp_path)["train/loss"] == [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0), (5, 25.0)]


def test_values_beyond_float32_do_not_stop_the_run(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    for step, value in enumerate((1e300, -1e300, float("inf"), float("nan"))):
        events.scalars(step, {"loss": value})
    events.close()
    values = [value for _, value in read(tmp_path)["loss"]]
    largest = float(np.finfo(np.float32).max)
    np.testing.assert_array_equal(values, [largest, -largest, np.inf, np.nan])


def test_two_files_of_one_second_are_two_files(tmp_path: Path) -> None:
    assert EventFile(tmp_path).path != EventFile(tmp_path).path


def test_neither_tensorflow_nor_torch_is_imported(tmp_path: Path) -> None:
    # Both are put within reach, so that an attempt to import one would succeed and show.
    for name in ("tensorflow", "torch"):
        (tmp_path / f"{name}.py").write_text("")
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from shared.tensorboard import EventFile\n"
        "events = EventFile(pathlib.Path(sys.argv[1])); events.scalars(1, {'loss': 1.0}); events.close()\n"
        "assert 'tensorboard' in sys.modules\n"
        "print(sorted({'tensorflow', 'torch', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_tensorboard_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(UserError, match=r"pip install tensorboard, or set logging\.tensorboard=false"):
        EventFile(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: a part of the path is a file"):
        EventFile(tmp_path / "file")
