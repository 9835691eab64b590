"""The remat policy in JAX: ``jax.checkpoint`` around a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shared.config.schema import Remat
from shared.policies.remat import recomputes_block


def rematerialized(block: Callable[..., Any], remat: Remat, in_scan: bool) -> Callable[..., Any]:
    """``block`` as the policy runs it.

    Inside a scan the loop itself keeps XLA from merging the two forward passes, so the barrier that
    ``prevent_cse`` puts around them is left out.
    """
    if not recomputes_block(remat, layer=0):
        return block
    return jax.checkpoint(block, prevent_cse=not in_scan)
