"""JSON that any reader accepts: numbers JSON has no word for are written as the strings "nan", "inf" and "-inf".

A diverged run has such losses, and its records must still be readable by tools that are not Python. Finite floats are
written by ``repr``, which is the shortest text that reads back as the same float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_NAMED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: Any, indent: int | None = None) -> str:
    """``value`` as strict JSON; NumPy scalars become plain numbers, tuples lists. Raises TypeError for the rest."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def number(value: Any) -> Any:
    """A float for "nan", "inf" and "-inf" as :func:`dumps` writes them; any other value as it is."""
    return _NAMED.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        # float() also strips a subclass such as np.float64, whose repr is not JSON.
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} has no place in JSON")
