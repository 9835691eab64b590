"""The comparison as a picture: both loss curves, their difference against the limit, and the speed of each.

Two curves of one run lie on top of each other, so the first is drawn as a broad light band and the second as a thin
dark line within it: both stay visible, and where they part it shows.
"""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.compare.comparison import Comparison
from shared.compare.losses import JUDGED_STEPS
from shared.compare.verdict import figure, names, reasons, rounded, sentence
from shared.errors import UserError
from shared.progress import short
from shared.run_directory import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIRST, _SECOND = "#e8a33d", "#1f4e79"
"""Amber and navy: apart in hue and in lightness, so also for colour-blind readers and in print."""
_LEFT = 0.075
_INK, _QUIET, _GRID, _LIMIT = "#222222", "#6b6b6b", "#e6e6e6", "#b3261e"


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture as a PNG of 1,800 x 1,160 pixels (made to be shown at half of that).

    Raises UserError when matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"--picture needs matplotlib, which cannot be imported ({error}); pip install matplotlib"
        ) from None
    style: dict[Any, Any] = {
        "font.size": 9.5,
        "text.color": _INK,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _QUIET,
        "xtick.color": _QUIET,
        "ytick.color": _QUIET,
        "axes.spines.top": False,
        "axes.spines.right": False,
        # A directory called $x$ is no formula.
        "text.parse_math": False,
    }
    # A context and no pyplot: whoever draws pictures of their own in this process keeps their settings.
    with rc_context(style):
        page = Figure(figsize=(9, 5.8), dpi=200, facecolor="white")
        FigureCanvasAgg(page)
        _compose(comparison, page)
        content = io.BytesIO()
        page.savefig(content, format="png", dpi=200)
    replace_file(path, content.getvalue())


def _compose(comparison: Comparison, page: Figure) -> None:
    title = _balanced(sentence(comparison))
    colour = _LIMIT if reasons(comparison) else _INK
    page.text(_LEFT, 0.965, title, ha="left", va="top", fontsize=11, linespacing=1.4, color=colour)
    grid = page.add_gridspec(
        2,
        2,
        left=_LEFT,
        right=0.975,
        bottom=0.09,
        top=0.89 - 0.038 * (1 + title.count("\n")),
        width_ratios=(3.7, 1),
        height_ratios=(1.35, 1),
        hspace=0.26,
        wspace=0.07,
    )
    loss = page.add_subplot(grid[0, 0])
    _losses(comparison, loss, page.add_subplot(grid[0, 1]))
    _differences(comparison, page.add_subplot(grid[1, 0], sharex=loss))
    _speeds(comparison, page.add_subplot(grid[1, 1]))


def _losses(comparison: Comparison, axes: Axes, key: Axes) -> None:
    from matplotlib.legend_handler import HandlerTuple

    _frame(axes, "Training loss, nats per token")
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelbottom=False)
    key.set_axis_off()
    if not any(run.losses for run in comparison.runs):
        _say(axes, "nothing recorded yet")
        return
    looks: tuple[dict[str, Any], ...] = (
        {"color": _FIRST, "linewidth": 3.6, "alpha": 0.75, "zorder": 2},
        {"color": _SECOND, "linewidth": 1.0, "zorder": 3},
    )
    markers: tuple[dict[str, Any], ...] = (
        {"color": _FIRST, "markersize": 9, "zorder": 4},
        {"color": _SECOND, "markersize": 4.5, "zorder": 5},
    )
    handles: list[Any] = []
    for run, look in zip(comparison.runs, looks, strict=True):
        # A line needs two neighbours; a few records must show without.
        dot = "." if len(run.losses) < 50 else None
        handles += axes.plot(list(run.losses), _gaps(run.losses), marker=dot, solid_joinstyle="round", **look)
    labels = [_narrow(name) for name in names(comparison)]
    points: list[Any] = []
    for run, look in zip(comparison.runs, markers, strict=True):
        if run.held_out:
            losses = _gaps({step: each.loss for step, each in run.held_out.items()})
            points += axes.plot(
                list(run.held_out), losses, linestyle="none", marker="o", markeredgecolor="white", **look
            )
    if points:
        handles.append(tuple(points))
        labels.append("held-out loss")
    # The key has a cell of its own, where no curve can run into it.
    key.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=1)},
        frameon=False,
        loc="upper left",
        borderaxespad=0,
        labelspacing=0.9,
    )
    last = max(run.num_steps for run in comparison.runs)
    axes.set_xlim(-0.015 * last, 1.015 * last)


def _differences(comparison: Comparison, axes: Axes) -> None:
    loss = comparison.loss
    relative = loss.limit.relative_maximum
    _frame(axes, f"Difference of the losses, {'share of the loss' if relative else 'nats per token'}, log scale")
    axes.set_xlabel("step")
    bounded = loss.bounded
    shown = {step: value for step, value in bounded.items() if 0 < value < math.inf}
    if not shown:
        _say(axes, "equal to the last bit" if bounded and not any(bounded.values()) else "nothing to compare")
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, position: rounded(value))
    axes.tick_params(which="both", length=0)
    limit = loss.limit.value
    smooth = _running_median(shown)
    faint: dict[str, Any] = {"color": _QUIET, "linewidth": 0.7, "alpha": 0.45, "zorder": 2}
    axes.plot(list(shown), list(shown.values()), marker="." if len(shown) < 50 else None, **faint)
    axes.plot(list(smooth), list(smooth.values()), color=_INK, linewidth=1.6, zorder=3)
    # Solid where it decides, dashed where it is for orientation.
    first, last = axes.get_xlim()
    axes.plot((first, min(last, JUDGED_STEPS)), (limit, limit), color=_LIMIT, linewidth=1.3, zorder=4)
    if last > JUDGED_STEPS:
        axes.plot((JUDGED_STEPS, last), (limit, limit), color=_LIMIT, linewidth=1, linestyle=(0, (2, 3)), zorder=4)
    axes.set_xlim(first, last)
    # Room for the limit's label above its line, and for the curve below.
    axes.set_ylim(min(*shown.values(), limit) / 2, max(*shown.values(), limit) * 12)
    axes.annotate(
        f"limit {figure(limit)} for {'each' if relative else 'the mean'} of the first {JUDGED_STEPS} steps",
        (0.012, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 5),
        textcoords="offset points",
        color=_LIMIT,
        fontsize=9,
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
    )


def _speeds(comparison: Comparison, axes: Axes) -> None:
    _frame(axes, "Tokens per second")
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    speeds = [run.tokens_per_s or 0.0 for run in comparison.runs]
    rows = (1.0, 0.0)
    axes.barh(rows, speeds, height=0.32, color=(_FIRST, _SECOND))
    for row, run, name in zip(rows, comparison.runs, names(comparison), strict=True):
        text = "not recorded" if run.tokens_per_s is None else short(run.tokens_per_s)
        axes.annotate(text, (run.tokens_per_s or 0, row), xytext=(5, 0), textcoords="offset points", va="center")
        axes.annotate(
            _narrow(name, 24), (0, row + 0.2), xytext=(0, 2), textcoords="offset points", va="bottom", fontsize=9
        )
    # Room for the figure at the end of the longer bar.
    axes.set_xlim(0, 1.45 * max(speeds) or 1)
    axes.set_ylim(-0.3, 1.75)


# ------------------------------------------------------------------------------------------------------------- parts


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=_QUIET, pad=7)
    axes.grid(True, axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_QUIET)


def _balanced(text: str) -> str:
    """The text on as few lines as fit the page, and these about equally long."""
    few = textwrap.wrap(text, 96, break_on_hyphens=False, max_lines=3, placeholder=" ...")
    for width in range(min(96, len(text) // len(few)), 96):
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
        if len(lines) == len(few):
            return "\n".join(lines)
    return "\n".join(few)


def _narrow(name: str, width: int = 18) -> str:
    return "\n".join(textwrap.wrap(name, width, max_lines=3, placeholder=" ..."))


def _gaps(losses: Mapping[int, float]) -> list[float]:
    # A loss that is not finite leaves a gap; an infinite one would make the axis infinite.
    return [loss if math.isfinite(loss) else math.nan for loss in losses.values()]


def _running_median(values: Mapping[int, float]) -> dict[int, float]:
    """The level of a curve that jumps by orders of magnitude from step to step."""
    steps, all_values = list(values), list(values.values())
    reach = max(1, len(steps) // 40)
    # At most 600 points: more cannot be told apart, and each costs a sort.
    stride = max(1, len(steps) // 600)
    return {
        steps[i]: statistics.median(all_values[max(0, i - reach) : i + reach + 1]) for i in range(0, len(steps), stride)
    }
