"""Gradient accumulation in PyTorch: a loop over microbatches that adds to ``.grad``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from shared.batch import Batch
from shared.config.schema import Config
from shared.errors import UserError
from torchtrain.batch import DeviceBatch


def microbatches(batch: DeviceBatch, count: int) -> Iterator[DeviceBatch]:
    """Microbatch a of ``count`` holds rows a::count."""
    arrays = batch._asdict().items()
    for index in range(count):
        parts: dict[str, Any] = {name: None if array is None else array[index::count] for name, array in arrays}
        yield batch._replace(**parts)


def accumulate(
    share: Callable[[DeviceBatch], torch.Tensor],
    batch: DeviceBatch,
    count: int,
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype,
    over_replicas: Callable[[Iterable[torch.Tensor]], None] = lambda gradients: None,
    sync: Literal["every", "last"] = "last",
) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor]]:
    """(sum of the shares, its gradients in ``dtype``) over the batch's microbatches; the gradients over replicas, too.

    ``share`` must be additive over rows: already divided by a count that does not depend on the microbatch. Autograd
    itself adds to ``.grad``, in the parameter's dtype; only where that is not ``dtype``, or where each microbatch is
    summed over replicas by itself, are there other accumulators. ``over_replicas`` sums in place.
    """
    apart = [p for p in parameters if p.dtype != dtype or (sync == "every" and count > 1)]
    sums = {p: torch.zeros_like(p, dtype=dtype, requires_grad=False) for p in apart}
    total: torch.Tensor | None = None
    for microbatch in microbatches(batch, count):
        part = share(microbatch)
        part.backward()
        total = part.detach() if total is None else total + part.detach()
        parts = {p: p.grad for p in sums if p.grad is not None}
        if sync == "every" and sums:
            parts = {p: gradient.to(dtype) for p, gradient in parts.items()}
            over_replicas(parts.values())
        for parameter, gradient in parts.items():
            sums[parameter] += gradient
            parameter.grad = None
    assert total is not None
    gradients = {p: p.grad for p in parameters if p.grad is not None} | sums
    if sync == "last" or not sums:
        over_replicas(gradients.values())
    return total, gradients


class Trained(Protocol):
    """A backend that can be tried."""

    def create_state(self) -> Any: ...
    def train_step(self, state: Any, batch: Batch) -> tuple[Any, Any]: ...


def fits(
    config: Config,
    device: torch.device,
    made: Callable[[Config], Trained],
    any_replica: Callable[[bool], bool] = lambda wish: wish,
) -> bool:
    """Whether the step of a config's backend, which ``made`` gives, fits every replica: for ``microbatch: auto``.

    Found by trying: two steps on a blank batch, in the second of which the optimiser's state exists. Each replica tries
    by itself (that backend sends nothing), since one that runs out of memory would leave the others waiting; then
    ``any_replica`` says whether any did.

    Raises UserError on a device whose memory has no limit that an allocator would tell of.
    """
    if device.type == "cpu":
        raise UserError("accumulation.microbatch=auto: a CPU does not say when its memory is full; state a number")
    try:
        _take_two_steps(made(config), Batch.blank(config))
        full = False
    except torch.cuda.OutOfMemoryError:
        full = True
    gc.collect()
    torch.cuda.empty_cache()
    return not any_replica(full)


def _take_two_steps(backend: Trained, batch: Batch) -> None:
    state = backend.create_state()
    for _ in range(2):
        state, metrics = backend.train_step(state, batch)
    metrics.read()
