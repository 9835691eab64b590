"""The remat policy in PyTorch: non-reentrant activation checkpointing around a block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from shared.config.schema import Remat
from shared.policies.remat import recomputes_block


def rematerialized(block: Callable[..., Any], remat: Remat, layer: int) -> Callable[..., Any]:
    """``block`` as the policy runs it."""
    if not recomputes_block(remat, layer):
        return block
    return functools.partial(checkpoint, block, use_reentrant=False)
