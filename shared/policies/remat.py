"""Rematerialisation (activation checkpointing): trade compute for memory in the backward pass.

``none`` keeps every activation that the backward pass reads. ``full`` keeps only the input of each transformer block
and runs the block's forward pass again when its backward pass needs the rest (Chen et al. 2016, arXiv:1604.06174):
one extra forward pass of the blocks for activation memory that no longer grows with a block's inner width. Both give
the same gradients.
"""

from __future__ import annotations

from shared.config.schema import Remat

RECOMPUTES_BLOCK: dict[Remat, bool] = {"none": False, "full": True}
