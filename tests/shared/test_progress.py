import io
import itertools
import re

import pytest

from shared.progress import Bar, Lines, Pace, duration, short, view


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "loss": 2.0, "learning_rate": 3e-3, "tokens_per_s": 41234.5, **more}


def lines_of(total_steps: int, seconds_per_step: float, start_step: int = 0) -> list[tuple[float, str]]:
    """The (time, line) pairs of a run that logs every step."""
    stream, clock, found = io.StringIO(), Clock(), []
    lines = Lines(total_steps, start_step, stream, clock)
    for step in range(start_step + 1, total_steps + 1):
        clock.now += seconds_per_step
        before = stream.tell()
        lines.train(record(step))
        if stream.tell() > before:
            found.append((clock.now - 1000.0, stream.getvalue()[before:].rstrip("\n")))
    return found


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines() -> None:
    bar = view(10, stream=Terminal())
    bar.close()
    assert isinstance(bar, Bar)
    assert isinstance(view(10, stream=io.StringIO()), Lines)


def test_a_quick_run_gives_one_line_every_tenth() -> None:
    found = lines_of(total_steps=600, seconds_per_step=0.001)
    assert [int(re.findall(r"\d+", line)[0]) for _, line in found] == list(range(60, 601, 60))


def test_lines_of_a_longer_run_are_five_seconds_apart_at_first_and_a_minute_at_last() -> None:
    found = lines_of(total_steps=20_000, seconds_per_step=1.0)
    times = [time for time, _ in found]
    assert times[:3] == [5.0, 10.0, 15.0]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) == 60.0
    # 50 lines to 250 s, about 50 * ln(3000 / 250) = 124 to 3000 s, 283 a minute apart, and a few tenths between.
    assert 440 < len(found) < 480


def test_the_last_step_always_has_a_line() -> None:
    assert "step 7 of 7" in lines_of(total_steps=7, seconds_per_step=0.001)[-1][1]


def test_a_resumed_run_does_not_repeat_the_tenths_behind_it() -> None:
    found = lines_of(total_steps=100, seconds_per_step=0.001, start_step=55)
    assert [line.split()[1] for _, line in found] == ["60", "70", "80", "90", "100"]


def test_a_line_has_the_figures_a_person_wants() -> None:
    _, line = lines_of(total_steps=600, seconds_per_step=1.0)[1]
    assert line == "step  10 of 600   loss 2.0000   learning rate 3.00e-03   41.2k tokens/s   9:50 min left"


def test_what_is_not_known_yet_is_left_out() -> None:
    stream = io.StringIO()
    Lines(1, 0, stream).train(record(1, tokens_per_s=None, loss=float("nan")))
    assert stream.getvalue() == "step 1 of 1   loss nan   learning rate 3.00e-03\n"


def test_an_evaluation_has_its_own_line() -> None:
    stream = io.StringIO()
    lines = Lines(10, 0, stream)
    lines.evaluation({"step": 5, "held_out_loss": 1.5, "held_out_nats_per_byte": 1.25, "held_out_tokens": 65536})
    lines.evaluation({"step": 6, "held_out_loss": 1.5})
    assert stream.getvalue() == (
        "step 5: held-out loss 1.5000, 1.2500 nats per byte (65,536 tokens)\nstep 6: held-out loss 1.5000\n"
    )


def test_the_bar_shows_loss_speed_held_out_loss_and_time_left() -> None:
    stream, clock = Terminal(), Clock()
    bar = Bar(100, 0, stream, clock)
    for step in range(1, 51):
        clock.now += 1.0
        bar.train(record(step))
        if step == 40:
            bar.evaluation({"step": step, "held_out_loss": 1.875})
    bar.note("a [note] for the person")
    bar.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = plain.split("\r")[-1]
    for text in ("50/100", "loss 2.000", "held-out 1.875", "41.2k tok/s", "50 s left"):
        assert text in last
    assert "a [note] for the person" in plain


def test_the_time_left_follows_the_pace_of_the_last_minute() -> None:
    pace = Pace(total_steps=1000)
    pace.reached(1, 500.0)  # Compilation took 500 s, and is over.
    assert pace.remaining(1) is None
    for step in range(2, 101):
        pace.reached(step, 500.0 + step)
    for step in range(101, 301):
        pace.reached(step, 600.0 + (step - 100) * 2.0)
    assert pace.remaining(300) == pytest.approx(700 * 2.0)


def test_records_far_apart_still_give_a_time_left() -> None:
    pace = Pace(total_steps=30)
    for step in (10, 20):
        pace.reached(step, step * 100.0)
    assert pace.remaining(20) == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.123456, "0.123"),
        (812.3, "812"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (41234.5, "41.2k"),
        (412345.0, "412k"),
        (999_900.0, "1.00M"),
        (1.25e6, "1.25M"),
        (2.5e9, "2.50G"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_rate_is_written_in_three_digits(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (7385, "2:03:05 h")]
)
def test_a_duration_is_written_in_the_units_of_its_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text
