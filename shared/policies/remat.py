"""Rematerialisation (activation checkpointing): trade compute for memory in the backward pass.

``none`` keeps every activation that the backward pass reads. ``full`` keeps only the input of each transformer block
and runs the block's forward pass again when its backward pass needs the rest (Chen et al. 2016, arXiv:1604.06174):
one extra forward pass of the blocks for activation memory that no longer grows with a block's inner width. All
settings give the same gradients.
"""

from __future__ import annotations

from shared.config.schema import Remat

NAMES = ("q", "k", "v", "context", "out", "gate", "up", "down")
"""The tensors of a block that have names, in the order in which it computes them. q, k and v are named before their
rotation; ``context`` is what attention gives and ``out`` its projection."""


def recomputes_block(remat: Remat, layer: int) -> bool:
    """Whether the block's forward pass runs again in its backward pass."""
    return remat.policy == "full"
