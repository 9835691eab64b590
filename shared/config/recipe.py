"""The recipe: the part of a config that decides the numbers of a run, and its hash.

Two runs with the same recipe, trained on any machine by either framework, are meant to be the same run. So the recipe
leaves out how the work is cut up and placed (microbatch, remat, mesh, kernels, when to log), and where files lie: what
they contain is fingerprinted when they are read. Everything the recipe holds is written out in full, defaults too.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.config.schema import Config

IDENTITY = ("seed", "model", "data", "optimizer", "schedule", "batch", "precision")
"""The sections that make up the recipe. No target may override them."""

LOCATIONS: dict[str, Any] = {"cache_dir": True, "source": {"files"}, "tokenizer": {"path"}}
"""The fields of ``data`` that say where files lie on one machine."""


def recipe_of(config: Config) -> dict[str, Any]:
    """The recipe as plain JSON data."""
    from shared.config.model import RotaryDecoder
    from shared.config.precision import roles

    recipe = config.model_dump(mode="json", include=set(IDENTITY), exclude={"data": LOCATIONS})
    scale = roles(config.precision)["loss_scale"]
    recipe["precision"] = roles(config.precision) | {"loss_scale": scale and scale.model_dump(mode="json")}
    model = recipe["model"]
    if isinstance(config.model, RotaryDecoder):
        model["head_dim"] = config.model.width_of_head
    if model.get("rope_scaling", ...) is None:  # so that recipes from before it have the hash that they had
        del model["rope_scaling"]
    without_signed_zeros: dict[str, Any] = _add_zero(recipe)
    return without_signed_zeros


def recipe_hash(config: Config) -> str:
    """16 hex digits that two configs share exactly when their recipes are equal."""
    canonical = json.dumps(recipe_of(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """Where two recipes part first, as ``batch.global_batch was 16, is 32``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    return f"{path} was {old}, is {new}"


def _add_zero(value: Any) -> Any:
    """-0.0 as 0.0: they train the same run but are written differently."""
    if isinstance(value, dict):
        return {key: _add_zero(inner) for key, inner in value.items()}
    return value + 0.0 if isinstance(value, float) else value
