import io
import math
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.recorder import Recorder
from shared.run_directory import RunDirectory
from tests.shared.test_tensorboard import read

TRAIN = {"loss": 2.0, "grad_norm": 0.5, "learning_rate": 0.25, "tokens": 64, "tokens_per_s": None, "batch": "ab"}


def test_a_record_reaches_the_file_tensorboard_and_the_person(tmp_path: Path) -> None:
    directory, stream = RunDirectory(tmp_path), io.StringIO()
    with Recorder(directory, 2, tensorboard=True, stream=stream) as recorder:
        recorder.note("hello")
        recorder.train({"step": 1, **TRAIN})
        recorder.train({"step": 2, **TRAIN, "tokens_per_s": 128.0, "loss_scale": 65536.0})
        recorder.evaluation({"step": 2, "held_out_loss": 1.5, "held_out_nats_per_byte": 1.25, "held_out_tokens": 9})
    metrics = directory.read_metrics()
    assert metrics.train[0] == {"kind": "train", "step": 1, **TRAIN}
    assert metrics.evaluation[0]["kind"] == "evaluation"
    assert read(tmp_path) == {
        "train/loss": [(1, 2.0), (2, 2.0)],
        "train/grad_norm": [(1, 0.5), (2, 0.5)],
        "train/learning_rate": [(1, 0.25), (2, 0.25)],
        "train/loss_scale": [(2, 65536.0)],
        "speed/tokens_per_s": [(2, 128.0)],
        "held_out/loss": [(2, 1.5)],
        "held_out/nats_per_byte": [(2, 1.25)],
    }
    first, *_, last = stream.getvalue().splitlines()
    assert first == "hello"
    assert "held-out loss 1.5000" in last


def test_quiet_shows_nothing_and_records_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path)
    with Recorder(directory, 1, tensorboard=False, quiet=True) as recorder:
        recorder.note("hello")
        recorder.train({"step": 1, **TRAIN})
        recorder.evaluation({"step": 1, "held_out_loss": 1.5})
    assert capfd.readouterr() == ("", "")
    assert len(directory.read_metrics().train) == len(directory.read_metrics().evaluation) == 1


def test_the_person_looks_at_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Recorder(RunDirectory(tmp_path), 1, tensorboard=False) as recorder:
        recorder.note("hello")
    assert capfd.readouterr() == ("", "hello\n")


def test_without_tensorboard_no_event_file_is_written(tmp_path: Path) -> None:
    with Recorder(RunDirectory(tmp_path), 1, tensorboard=False, quiet=True) as recorder:
        recorder.train({"step": 1, **TRAIN})
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_reads_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    with Recorder(RunDirectory(tmp_path), 4, tensorboard=True, quiet=True) as recorder:
        for step in (1, 2, 3):
            recorder.train({"step": step, **TRAIN, "loss": 10.0 + step})
    directory = RunDirectory(tmp_path)
    directory.truncate_after(2)
    with Recorder(directory, 4, tensorboard=True, quiet=True, start_step=2) as recorder:
        for step in (3, 4):
            recorder.train({"step": step, **TRAIN, "loss": 20.0 + step})
    expected = [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0)]
    assert [(each["step"], each["loss"]) for each in directory.read_metrics().train] == expected
    assert read(tmp_path)["train/loss"] == expected


def test_a_diverged_run_is_recorded(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with Recorder(directory, 1, tensorboard=True, stream=io.StringIO()) as recorder:
        recorder.train({"step": 1, **TRAIN, "loss": math.nan, "grad_norm": math.inf, "tokens_per_s": 1.0})
        recorder.evaluation({"step": 1, "held_out_loss": math.inf, "held_out_nats_per_byte": math.nan})
    assert math.isnan(directory.read_metrics().train[0]["loss"])
    assert directory.read_metrics().evaluation[0]["held_out_loss"] == math.inf


def test_leaving_by_an_error_frees_the_directory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Recorder(RunDirectory(tmp_path), 1, tensorboard=True, quiet=True):
        raise RuntimeError
    with Recorder(RunDirectory(tmp_path), 1, tensorboard=True, quiet=True):
        pass


def test_two_recorders_of_one_directory_are_refused(tmp_path: Path) -> None:
    with (
        Recorder(RunDirectory(tmp_path), 1, tensorboard=False, quiet=True),
        pytest.raises(UserError, match="another process is training"),
    ):
        Recorder(RunDirectory(tmp_path), 1, tensorboard=False, quiet=True)
