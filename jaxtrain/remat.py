"""The remat policy in JAX: ``jax.checkpoint`` around a block, with a policy over named tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shared.policies.remat import RematPolicy


def rematerialized(block: Callable[..., Any], policy: RematPolicy, in_scan: bool) -> Callable[..., Any]:
    """``block`` recomputed in its backward pass, from its input and what the policy keeps.

    Inside a scan the loop itself keeps XLA from merging the two forward passes, so the barrier that
    ``prevent_cse`` puts around them is left out.
    """
    saved = None
    if policy.offloaded:
        saved = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(policy.kept),
            names_which_can_be_offloaded=sorted(policy.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    elif policy.kept:
        saved = jax.checkpoint_policies.save_only_these_names(*sorted(policy.kept))
    return jax.checkpoint(block, prevent_cse=not in_scan, policy=saved)
