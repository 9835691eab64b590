import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shared.run_directory
from shared.errors import UserError
from shared.run_directory import RunDirectory
from shared.strict_json import dumps


def record(step: int, **more: object) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": 1.0 / step, **more}


def steps(directory: RunDirectory) -> list[int]:
    return [each["step"] for each in directory.read_metrics().train]


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "runs" / "one")
    made.write_run({"backend": "jax", "summary": None})
    return made


def test_making_the_object_touches_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert not directory.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read_back(directory: RunDirectory) -> None:
    directory.append(record(1))
    directory.append({"kind": "evaluation", "step": 1, "held_out_loss": 2.5})
    directory.append({"kind": "of a later version", "step": 1})
    assert directory.exists()
    assert directory.read_run() == {"format": 1, "backend": "jax", "summary": None}
    metrics = directory.read_metrics()
    assert metrics.train == [record(1)]
    assert metrics.evaluation == [{"kind": "evaluation", "step": 1, "held_out_loss": 2.5}]
    assert metrics.num_damaged == 0


@pytest.mark.parametrize("value", [0.1 + 0.2, 1e-300, 5e-324, 1.7976931348623157e308, -0.0, np.float64(1) / 3])
def test_floats_keep_every_bit(directory: RunDirectory, value: float) -> None:
    directory.append(record(1, grad_norm=value))
    (read,) = directory.read_metrics().train
    assert np.float64(read["grad_norm"]).tobytes() == np.float64(value).tobytes()


def test_numpy_numbers_become_plain_ones() -> None:
    values = {"a": np.float32(0.5), "b": np.int64(3), "c": np.array(2.0), "d": np.bool_(True), "e": (1, None)}
    assert dumps(values) == '{"a": 0.5, "b": 3, "c": 2.0, "d": true, "e": [1, null]}'


def test_numbers_that_json_lacks_are_written_as_strict_json_and_read_back(directory: RunDirectory) -> None:
    directory.append(record(1, grad_norm=math.inf, loss_scale=-math.inf) | {"loss": np.float32("nan")})
    line = json.loads(directory.metrics_file.read_text(), parse_constant=no_constant)
    assert (line["loss"], line["grad_norm"], line["loss_scale"]) == ("nan", "inf", "-inf")
    (read,) = directory.read_metrics().train
    assert math.isnan(read["loss"])
    assert (read["grad_norm"], read["loss_scale"]) == (math.inf, -math.inf)


def test_the_summary_is_added_and_its_numbers_read_back(directory: RunDirectory) -> None:
    directory.write_summary({"steps": 7, "loss": math.nan})
    json.loads(directory.run_file.read_text(), parse_constant=no_constant)
    run = directory.read_run()
    assert run["backend"] == "jax"
    assert run["summary"]["steps"] == 7
    assert math.isnan(run["summary"]["loss"])


def test_a_failed_replacement_leaves_the_old_run_file_and_no_litter(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"run\.json: cannot be written: the disk is full; free some space"):
        directory.write_run({"backend": "torch"})
    assert directory.read_run()["backend"] == "jax"
    assert [file.name for file in directory.path.iterdir()] == ["run.json"]


def test_a_full_disk_is_reported_in_one_line_when_appending(directory: RunDirectory) -> None:
    # /dev/full accepts an open and fails every write with ENOSPC.
    directory.metrics_file.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written: the disk is full; free some space"):
        directory.append(record(1))


# ------------------------------------------------------------------------------------------------------ after a crash


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_is_left_out_by_readers_and_cut_by_the_next_writer(directory: RunDirectory, cut: int) -> None:
    for step in (1, 2, 3):
        directory.append(record(step))
    directory.close()
    os.truncate(directory.metrics_file, directory.metrics_file.stat().st_size - cut)
    metrics = directory.read_metrics()
    assert [each["step"] for each in metrics.train] == [1, 2]
    assert metrics.num_damaged == 1
    directory.append(record(3))
    metrics = directory.read_metrics()
    assert [each["step"] for each in metrics.train] == [1, 2, 3]
    assert metrics.num_damaged == 0


def test_a_torn_line_longer_than_any_buffer_is_cut_whole(directory: RunDirectory) -> None:
    directory.append(record(1))
    directory.close()
    with directory.metrics_file.open("ab") as stream:
        stream.write(b"x" * 200_000)
    directory.append(record(2))
    assert steps(directory) == [1, 2]
    assert directory.metrics_file.stat().st_size < 200


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'"text"',
        b"[" * 100_000,
        b"\0\0\0\0",
        b"\xff\xfe",
        b'{"step": 2, "loss": 1.0}',
        b'{"kind": "train", "loss": 1.0}',
        b'{"kind": "train", "step": "2", "loss": 1.0}',
        b'{"kind": "train", "step": true, "loss": 1.0}',
        b'{"kind": "train", "step": 2, "loss": "high"}',
        b'{"kind": "evaluation", "step": 2}',
    ],
)
def test_a_damaged_line_costs_only_itself(directory: RunDirectory, line: bytes) -> None:
    directory.append(record(1))
    directory.close()
    with directory.metrics_file.open("ab") as stream:
        stream.write(line + b"\n")
    directory.append(record(3))
    metrics = directory.read_metrics()
    assert [each["step"] for each in metrics.train] == [1, 3]
    assert metrics.num_damaged == 1


def test_records_reach_the_file_before_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from shared.run_directory import RunDirectory\n"
        "d = RunDirectory(sys.argv[1]); d.append({'kind': 'train', 'step': 1, 'loss': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False)
    directory = RunDirectory(tmp_path / "run")
    assert steps(directory) == [1]
    directory.append(record(2))  # The lock died with its process.
    assert steps(directory) == [1, 2]


# --------------------------------------------------------------------------------------------------------- resuming


def test_truncation_drops_what_lies_beyond_the_step_and_damaged_lines(directory: RunDirectory) -> None:
    for step in range(1, 8):
        directory.append(record(step))
        directory.append({"kind": "evaluation", "step": step, "held_out_loss": 1.0})
    directory.close()
    with directory.metrics_file.open("ab") as stream:
        stream.write(b'{"kind": "tra')
    directory.truncate_after(4)
    metrics = directory.read_metrics()
    assert [each["step"] for each in metrics.train] == [1, 2, 3, 4]
    assert [each["step"] for each in metrics.evaluation] == [1, 2, 3, 4]
    assert metrics.num_damaged == 0
    directory.append(record(5))
    assert steps(directory) == [1, 2, 3, 4, 5]


def test_truncation_keeps_the_remaining_bytes_as_they_are(directory: RunDirectory) -> None:
    for step in range(1, 4):
        directory.append(record(step))
    before = directory.metrics_file.read_bytes()
    directory.truncate_after(3)
    assert directory.metrics_file.read_bytes() == before
    directory.truncate_after(2)
    assert directory.metrics_file.read_bytes() == b"".join(before.splitlines(keepends=True)[:2])


def test_truncation_of_a_run_without_records_is_fine(directory: RunDirectory) -> None:
    directory.truncate_after(0)
    assert steps(directory) == []


# ------------------------------------------------------------------------------------------------------ one writer


def test_a_second_writer_is_refused_until_the_first_closes(directory: RunDirectory) -> None:
    second = RunDirectory(directory.path)
    with pytest.raises(UserError, match="another process is training into this run directory"):
        second.append(record(1))
    assert second.read_run()["backend"] == "jax"  # Reading is always allowed.
    directory.close()
    second.append(record(1))
    assert steps(second) == [1]


def test_a_directory_that_is_forgotten_is_free_again(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").create()
    RunDirectory(tmp_path / "run").create()


def test_the_context_manager_frees_the_directory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory:
        pass
    with RunDirectory(tmp_path / "run"):
        pass


# ------------------------------------------------------------------------------------------------------ user mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"run: no such run directory$"),
        (lambda path: path.mkdir(), r"run: not a run directory, it has no run\.json$"),
        (lambda path: path.write_text(""), r"run: is a file, not a run directory$"),
        (lambda path: RunDirectory(path.parent / "ruin").write_run({}), r"no such .*; did you mean '.*/ruin'\?$"),
        (lambda path: RunDirectory(path / "inside").write_run({}), r"no run\.json; did you mean '.*/run/inside'\?$"),
    ],
)
def test_what_is_no_run_directory_is_named_with_the_nearest_run(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        RunDirectory(tmp_path / "run").read_run()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": "1"}', "\0"])
def test_a_damaged_run_file_is_named(directory: RunDirectory, content: str) -> None:
    directory.run_file.write_text(content)
    with pytest.raises(UserError, match=r"run\.json: damaged, it is not") as caught:
        directory.read_run()
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused(directory: RunDirectory) -> None:
    directory.run_file.write_text(json.dumps({"format": shared.run_directory.FORMAT + 1}))
    with pytest.raises(UserError, match="has format 2, and this version reads up to 1"):
        directory.read_run()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"runs: cannot be written: a file of that name is in the way"):
        RunDirectory(tmp_path / "runs").create()
    with pytest.raises(UserError, match=r"runs/one: cannot be written: a part of the path is a file"):
        RunDirectory(tmp_path / "runs" / "one").create()


def test_a_place_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by chmod: the tests may run as root, whom no permission stops.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="run: cannot be written: permission denied; choose a place"):
        RunDirectory(tmp_path / "run").create()
