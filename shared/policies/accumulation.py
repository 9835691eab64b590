"""Gradient accumulation: one update from several microbatches and replicas, with the same result as from one.

The loss of an update is (sum of the loss over all valid tokens) / (number of valid tokens), over *all* microbatches of
*all* replicas. A mean of means would weigh tokens of short microbatches more. So each microbatch's loss *sum* is
divided by the token count of the whole global batch, which the mask alone decides and which is therefore known before
the first backward pass; gradients are then simply added, in the accumulators' dtype, and summed over replicas, in the
dtype that the precision policy calls ``reduce``: once, after the last microbatch, or after every one.

Replica r of R holds rows r B / R to (r + 1) B / R of the global batch, and its microbatch a of A the rows a, a + A,
a + 2A, ... of these: strided, so that splitting a batch that is already spread over devices moves no row between them.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.config.schema import Config
from shared.errors import TooSmall, UserError


def num_microbatches(rows: int, microbatch: int | str | None) -> int:
    """How many microbatches ``rows`` rows of one replica make.

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


def largest_microbatch(rows: int, fits: Callable[[int], bool]) -> int:
    """The largest divisor of ``rows`` that fits, found in a logarithm of their number of trials: what does not fit does
    not fit larger either. Where ``fits`` raises TooSmall (a budget of the user's), that size does not fit.

    Raises UserError when not even one row does.
    """

    def held(size: int) -> bool:
        try:
            return fits(size)
        except TooSmall:
            if size == 1:
                raise
            return False

    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    below, above = -1, len(divisors)
    while above - below > 1:
        # The largest is the most wished for, and tried first.
        middle = above - 1 if above == len(divisors) else (below + above) // 2
        if held(divisors[middle]):
            below = middle
        else:
            above = middle
    if below < 0:
        raise UserError(
            "accumulation.microbatch=auto: not even one sequence fits this device; try remat=full, "
            "offload.optimizer=host or a shorter batch.sequence_length"
        )
    return divisors[below]


def with_microbatch(config: Config, fits: Callable[[Config], bool]) -> Config:
    """The config with the largest microbatch that fits in the place of ``auto``; ``fits`` judges whole configs."""

    def sized(microbatch: int) -> Config:
        accumulation = config.accumulation.model_copy(update={"microbatch": microbatch})
        return config.model_copy(update={"accumulation": accumulation})

    if config.accumulation.microbatch != "auto":
        return config
    share = config.batch.global_batch // config.parallel.data
    return sized(largest_microbatch(share, lambda microbatch: fits(sized(microbatch))))
