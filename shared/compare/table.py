"""The comparison for a person: a table of both runs, what must be equal, and how far apart they ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.compare.comparison import Comparison, FieldDifference
from shared.compare.losses import JUDGED_STEPS
from shared.compare.runs import FINGERPRINTS, HeldOut, Run
from shared.compare.verdict import figure, names, reasons, rounded, sentence
from shared.progress import short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GOOD, _BAD = "[green]{}[/]", "[bold red]{}[/]"


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the whole comparison; the last line is the verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    for name in names(comparison):
        table.add_column(Text(name), overflow="fold")
    table.add_column("")
    for section in (_runs, _settings, _fingerprints, _losses, _held_out, _speed):
        section(comparison, table)
    console.print()
    console.print(table)
    console.print()
    for note in _notes(comparison):
        console.print(note, style="dim", markup=False, highlight=False)
    # One line however long, so that a program can take the last line.
    style = "bold red" if reasons(comparison) else "bold green"
    console.print(sentence(comparison), style=style, markup=False, highlight=False, soft_wrap=True)


def _runs(comparison: Comparison, table: Table) -> None:
    _row(table, "directory", *(run.directory for run in comparison.runs))
    _row(table, "framework", *(f"{run.backend} {run.version or ''}".strip() for run in comparison.runs))
    _row(table, "device", *(f"{run.num_devices} x {run.device}" for run in comparison.runs))
    _row(table, "steps", *(_steps(run) for run in comparison.runs))


def _settings(comparison: Comparison, table: Table) -> None:
    if comparison.recipe_differences:
        _heading(table, "What differs in the recipe")
        _fields(table, comparison.recipe_differences, _BAD.format("differs"))
    if comparison.execution_differences:
        _heading(table, "Set differently, which must not matter")
        _fields(table, comparison.execution_differences, "")


def _fingerprints(comparison: Comparison, table: Table) -> None:
    _heading(table, "Must be equal")
    for key, name in FINGERPRINTS.items():
        values = (run.fingerprints[key] or "not recorded" for run in comparison.runs)
        equal = comparison.fingerprint_equal(key)
        missing = any(run.fingerprints[key] is None for run in comparison.runs)
        verdict = _GOOD.format("equal") if equal else _BAD.format("unknown" if missing else "differ")
        _row(table, name, *values, verdict)
    batches = comparison.batches
    if batches.equal:
        verdict = _GOOD.format("equal")
    elif batches.num_compared:
        verdict = _BAD.format(f"{len(batches.differing)} differ, first at step {batches.differing[0]}")
    else:
        verdict = _BAD.format("unknown")
    _row(table, f"{batches.num_compared} batches in both", "", "", verdict)


def _losses(comparison: Comparison, table: Table) -> None:
    loss = comparison.loss
    _heading(table, f"Training loss, {len(loss.differences)} steps in both")
    common = comparison.first.losses.keys() & comparison.second.losses.keys()
    if common:
        last = max(common)
        _row(table, f"at step {last}", *(f"{run.losses[last]:.6f}" for run in comparison.runs))
    if loss.mean is not None and loss.max is not None:
        _row(table, "mean difference", rounded(loss.mean))
        _row(table, "largest difference", rounded(loss.max), f"at step {loss.max_at_step}")
    if loss.judged_value is not None:
        kind = "largest relative" if loss.limit.relative_maximum else "mean"
        limit = figure(loss.limit.value)
        verdict = _GOOD.format(f"within {limit}") if loss.within_limit else _BAD.format(f"over {limit}")
        _row(table, f"{kind}, to step {JUDGED_STEPS}", rounded(loss.judged_value), "", verdict)
    if loss.first_step_over_limit is not None:
        _row(table, "first step over limit", str(loss.first_step_over_limit))


def _held_out(comparison: Comparison, table: Table) -> None:
    pair = comparison.held_out
    if pair is not None:
        _heading(table, f"Held-out loss, step {comparison.held_out_step}")
        _row(table, "nats per token", *(f"{each.loss:.6f}" for each in pair), f"{pair[1].loss - pair[0].loss:+.1e}")
        if all(each.nats_per_byte is not None for each in pair):
            _row(table, "nats per byte", *(f"{each.nats_per_byte:.6f}" for each in pair))
    elif any(run.held_out for run in comparison.runs):
        _heading(table, "Held-out loss, never at the same step")
        _row(table, "last", *(_last_held_out(run) for run in comparison.runs))


def _speed(comparison: Comparison, table: Table) -> None:
    if all(run.tokens_per_s is None for run in comparison.runs):
        return
    _heading(table, "Speed, median")
    ratio = comparison.throughput_ratio
    speeds = ("not recorded" if run.tokens_per_s is None else short(run.tokens_per_s) for run in comparison.runs)
    _row(table, "tokens per second", *speeds, "" if ratio is None else f"{ratio:.2f}x")


def _notes(comparison: Comparison) -> list[str]:
    notes = []
    for run, name in zip(comparison.runs, names(comparison), strict=True):
        if not run.finished:
            notes.append(f"{name} is still running or was stopped: it has no summary.")
        if run.num_damaged:
            notes.append(f"{name}: {run.num_damaged} damaged line(s) of metrics.jsonl left out.")
    loss = comparison.loss
    if loss.not_finite:
        notes.append(f"Neither loss is finite at {len(loss.not_finite)} step(s), first at step {loss.not_finite[0]}.")
    pair = comparison.held_out
    if pair is not None and _rows_differ(pair):
        notes.append("The held-out losses were measured on different amounts of text (see evaluation.max_rows).")
    coarse = [run.precision for run in comparison.runs if run.precision in ("tf32", "bfloat16", "float16")]
    if coarse and not reasons(comparison):
        notes.append(f"In {coarse[0]}, rounding hides small mistakes; a float32 run tells more.")
    return notes


# ------------------------------------------------------------------------------------------------------------- cells


def _row(table: Table, *cells: str) -> None:
    from rich.markup import escape

    # The last column is ours and has colours; the others hold what was read from files.
    table.add_row(*map(escape, cells[:3]), *cells[3:])


def _heading(table: Table, text: str) -> None:
    table.add_row()
    table.add_row(f"[not dim bold]{text}[/]")


def _fields(table: Table, differences: tuple[FieldDifference, ...], verdict: str) -> None:
    for item in differences:
        _row(table, item.field, figure(item.first), figure(item.second), verdict)


def _steps(run: Run) -> str:
    return f"{run.num_steps} of {run.total_steps}" if run.total_steps else str(run.num_steps)


def _last_held_out(run: Run) -> str:
    if not run.held_out:
        return "none"
    step = max(run.held_out)
    return f"{run.held_out[step].loss:.6f} at step {step}"


def _rows_differ(pair: tuple[HeldOut, HeldOut]) -> bool:
    return None not in (pair[0].tokens, pair[1].tokens) and pair[0].tokens != pair[1].tokens
