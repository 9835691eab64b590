"""Gradient accumulation: one update from several microbatches, with the same result as from one.

The loss of an update is (sum of the loss over all valid tokens) / (number of valid tokens), over *all* microbatches.
A mean of microbatch means would weigh tokens of short microbatches more. So each microbatch's loss *sum* is divided by
the token count of the whole global batch, which the mask alone decides and which is therefore known before the first
backward pass; gradients are then simply added, in the accumulators' dtype.

Microbatch a of A holds rows a, a + A, a + 2A, ... of a device's share: strided, so that splitting a batch that is
already spread over devices moves no row between them.
"""

from __future__ import annotations

from shared.errors import UserError


def num_microbatches(rows: int, microbatch: int | str | None) -> int:
    """How many microbatches ``rows`` rows of one device make.

    Raises UserError when the microbatch does not divide the rows.
    """
    if microbatch is None:
        return 1
    assert isinstance(microbatch, int), "auto is resolved before"
    if rows % microbatch:
        raise UserError(
            f"accumulation.microbatch ({microbatch}) must divide the {rows} sequences that each device gets of a "
            "global batch"
        )
    return rows // microbatch
