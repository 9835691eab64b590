"""The processes that train one run together in PyTorch, each with its own device: data-parallel replicas.

Gradients are *summed*, since each replica's share of the loss is already divided by the tokens of the whole batch; and
by hand, in flat buckets: ``DistributedDataParallel`` averages, and adds what it has averaged to what it has not, so
that a reduction after every microbatch would not be exact.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shared.config.schema import Parallel
from shared.errors import UserError

BUCKET_BYTES = 25 * 2**20
"""Gradients that travel together; as large as makes good use of a link."""


MEETING = datetime.timedelta(minutes=2)
"""How long a process waits for the others to start."""

WORKING = datetime.timedelta(hours=1)
"""How long it waits in a collective: the others may be waiting for the first, which writes a checkpoint."""


@dataclass(frozen=True)
class Replicas:
    """This process's place among those of the run."""

    index: int = 0
    count: int = 1
    sending: bool = True
    """False for a step that one process tries by itself: its sums take the same memory, and miss the others' parts."""
    group: dist.ProcessGroup | None = None
    """All of them once more, for the threads that write a checkpoint: what they say to each other may not come between
    the collectives of a step. None for one process."""

    @staticmethod
    def of(parallel: Parallel) -> Replicas:
        """The place that ``torch.distributed`` gives; alone where it was not set up.

        Raises UserError when there are not as many processes as replicas.
        """
        together = dist.is_available() and dist.is_initialized()
        index, count = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        if count != parallel.data:
            raise UserError(
                f"parallel.data ({parallel.data}) needs as many processes, and there is {count}; start them with "
                f"python -m torch.distributed.run --nproc-per-node {parallel.data} -m torchtrain, or set "
                f"parallel.data={count}"
            )
        return Replicas(index, count, group=dist.new_group(backend="gloo", timeout=WORKING) if count > 1 else None)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which now holds the sum over all replicas."""
        if self.count > 1 and self.sending:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients_(self, gradients: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
        """Replace gradients by their sums over all replicas, which are formed in ``dtype``."""
        if self.count == 1:
            return
        for bucket in _buckets(gradients, dtype.itemsize):
            flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
            self.sum_(flat)
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view(gradient.shape))

    def any(self, wish: bool) -> bool:
        """Whether any replica has the wish; asked between hosts, so that no accelerator is waited for."""
        return wish if self.count == 1 else bool(self.sum_(torch.tensor(int(wish))).item())

    def gathered(self, text: str) -> list[str]:
        """What every replica says, in their order."""
        if self.count == 1:
            return [text]
        said = [""] * self.count
        dist.all_gather_object(said, text, group=self.group)
        return said


def _buckets(tensors: Iterable[torch.Tensor], itemsize: int) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() * itemsize > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * itemsize
    if bucket:
        yield bucket


def join() -> None:
    """Meet the other processes, when a launcher such as ``torchrun`` has started several.

    Raises UserError when they do not meet in time.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        store, rank, count = next(rendezvous("env://", timeout=MEETING))
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=WORKING)
    except (dist.DistError, ValueError) as error:
        which = f"process {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}"
        raise UserError(f"{which} did not meet the others: {str(error).splitlines()[0]}") from None


def leave() -> None:
    """Part from the other processes."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
