"""Whether two runs are the same run, in words.

They are when they did the same thing (equal recipe, data, initial weights, learning rates and batches) with the same
outcome (losses within the limit of :mod:`shared.compare.losses`). Everything that speaks against it is a reason, and no
reason means the same run. What was not recorded cannot be vouched for, so it is a reason too.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from shared.compare.comparison import Comparison
from shared.compare.losses import JUDGED_STEPS
from shared.compare.runs import FINGERPRINTS

_NAMED_FIELDS = 3
"""Fields that a sentence names before it says "and N more"; the table has them all."""


def names(comparison: Comparison) -> tuple[str, str]:
    """What to call the two runs: "jax on cpu", with the directory where that alone does not tell them apart."""
    first, second = comparison.runs
    if first.label != second.label:
        return first.label, second.label
    if first.name != second.name:
        return f"{first.label} ({first.name})", f"{second.label} ({second.name})"
    return f"{first.label} ({first.directory})", f"{second.label} ({second.directory})"


def short_names(comparison: Comparison) -> tuple[str, str]:
    """The shortest names that tell the two runs apart."""
    first, second = comparison.runs
    for pair in ((first.backend, second.backend), (first.name, second.name)):
        if pair[0] != pair[1]:
            return pair
    return first.directory, second.directory


def reasons(comparison: Comparison) -> list[str]:
    """Why these are not shown to be the same run; empty when they are."""
    return [*_fingerprint_reasons(comparison), *_record_reasons(comparison)]


def sentence(comparison: Comparison) -> str:
    """The verdict in one plain sentence."""
    against = reasons(comparison)
    if against:
        return f"Not the same run: {'; '.join(against)}."
    if comparison.itself:
        return f"Same run: both are one directory, {comparison.first.directory}, compared with itself."
    first, second = names(comparison)
    parts = [f"Same run: {first} and {second} read the same batches and {_outcome(comparison)}"]
    if faster := speed(comparison):
        parts.append(faster)
    return "; ".join(parts) + "."


def speed(comparison: Comparison) -> str | None:
    """Which run is faster, or None when that was not recorded."""
    ratio = comparison.throughput_ratio
    if ratio is None:
        return None
    # Medians of one program on one machine repeat within about 2%.
    if 0.98 < ratio < 1.02:
        return "both are equally fast"
    first, second = short_names(comparison)
    return f"{second} is {_times(ratio)} faster" if ratio > 1 else f"{first} is {_times(1 / ratio)} faster"


def figure(value: Any) -> str:
    """A value as a person writes it, exactly: 1e-4, 0.95, true, null."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        return f"{Decimal(repr(value)).normalize():e}".replace("e+", "e")
    return "null" if value is None else str(value)


def rounded(value: float) -> str:
    """A measured value in two digits: 2.1e-6, 0.013."""
    return figure(float(f"{value:.2g}"))


# ------------------------------------------------------------------------------------------------------------- parts


def _fingerprint_reasons(comparison: Comparison) -> list[str]:
    found = []
    for key, name in FINGERPRINTS.items():
        silent = [run for run in comparison.runs if run.fingerprints[key] is None]
        if silent:
            found.append(f"{_list(_who(comparison, silent))} did not record the fingerprint of the {name}")
        elif not comparison.fingerprint_equal(key):
            found.append(f"the {'recipes' if key == 'recipe' else name} differ{_which_fields(comparison, key)}")
    return found


def _which_fields(comparison: Comparison, key: str) -> str:
    if key != "recipe":
        return ""
    fields = comparison.recipe_differences
    if not fields:
        return " though every field is equal (they were written by different versions of this program)"
    texts = [f"{item.field} is {figure(item.first)} and {figure(item.second)}" for item in fields[:_NAMED_FIELDS]]
    more = len(fields) - len(texts)
    return f" ({', '.join(texts)}{f', and {more} more' if more else ''})"


def _record_reasons(comparison: Comparison) -> list[str]:
    empty = [run for run in comparison.runs if not run.losses]
    if empty:
        have = "has" if len(empty) == 1 else "have"
        return [f"{_list(_who(comparison, empty))} {have} no training records yet"]
    if not comparison.first.losses.keys() & comparison.second.losses.keys():
        return ["no step was recorded by both (see logging.every)"]
    return [*_batch_reasons(comparison), *_loss_reasons(comparison)]


def _batch_reasons(comparison: Comparison) -> list[str]:
    batches = comparison.batches
    if not batches.num_compared:
        return ["the batches' hashes were not recorded by both"]
    if batches.differing:
        of = f"{len(batches.differing)} of {batches.num_compared} batches"
        return [f"{of} differ, the first at step {batches.differing[0]}"]
    return []


def _loss_reasons(comparison: Comparison) -> list[str]:
    loss = comparison.loss
    value = loss.judged_value
    if value is None:
        if loss.not_finite:
            return [f"neither loss is finite from step {loss.not_finite[0]} on, which leaves nothing to compare"]
        return [f"no step up to {JUDGED_STEPS} was recorded by both, and later ones cannot be judged"]
    if loss.within_limit:
        return []
    if math.isinf(value):
        step = next(step for step, difference in loss.judged.items() if math.isinf(difference))
        broken = comparison.first if not math.isfinite(comparison.first.losses[step]) else comparison.second
        return [f"the loss of {_who(comparison, [broken])[0]} is {broken.losses[step]} at step {step}"]
    return [f"{_outcome(comparison)}, beyond it first at step {loss.first_step_over_limit}"]


def _outcome(comparison: Comparison) -> str:
    loss = comparison.loss
    value, limit = loss.judged_value, figure(loss.limit.value)
    assert value is not None
    count = len(loss.judged)
    last = max(loss.judged)
    # "the first N steps" only where every one of them was compared.
    span = f"{'' if count == last else f'{count} of '}the first {f'{last} steps' if last > 1 else 'step'}"
    if max(loss.judged.values()) == 0:
        return f"their losses are equal to the last bit over {span}"
    amount = (
        f"by at most {rounded(value)} of their value"
        if loss.limit.relative_maximum
        else f"by {rounded(value)} on average"
    )
    return f"their losses differ {amount} over {span} (limit {limit})"


def _who(comparison: Comparison, some: list[Any]) -> list[str]:
    # By identity: one directory given twice makes two equal runs.
    chosen = {id(run) for run in some}
    return [name for run, name in zip(comparison.runs, names(comparison), strict=True) if id(run) in chosen]


def _list(texts: list[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:.0f}x"
