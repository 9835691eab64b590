"""A train state on disk in Orbax's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


def save(state: Any, directory: Path) -> None:
    """Write the state into ``directory``; returns when it is on disk."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "orbax", state)


def restore(abstract_state: Any, directory: Path) -> Any:
    """Read a state of the shapes, dtypes and shardings that ``abstract_state`` gives."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory.absolute() / "orbax", abstract_state)
