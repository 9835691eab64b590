"""A train state on disk in the format of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write


def save(tensors: dict[str, Any], directory: Path) -> None:
    """Write the tensors into ``directory``; returns when they are on disk."""
    with _quiet():
        write(tensors, checkpoint_id=directory / "dcp", no_dist=True)


def restore(tensors: dict[str, Any], directory: Path) -> None:
    """Fill the tensors, in place, from what ``save`` wrote."""
    with _quiet():
        load(tensors, checkpoint_id=directory / "dcp", no_dist=True)


class _quiet(warnings.catch_warnings):
    """DCP warns that it runs without a process group: here one process is all there is."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        return entered
