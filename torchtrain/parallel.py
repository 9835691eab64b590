"""The processes that train one run together in PyTorch, each with its own device: data-parallel replicas.

Gradients are *summed*, since each replica's share of the loss is already divided by the tokens of the whole batch; and
by hand, in flat buckets: ``DistributedDataParallel`` averages, and adds what it has averaged to what it has not, so
that a reduction after every microbatch would not be exact.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from shared.config.schema import Parallel
from shared.errors import UserError

BUCKET_BYTES = 25 * 2**20
"""Gradients that travel together; as large as makes good use of a link."""


class Replicas:
    """This process's place among those of the run; alone unless ``torch.distributed`` was set up."""

    def __init__(self, parallel: Parallel):
        together = dist.is_available() and dist.is_initialized()
        self.index, self.count = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        if self.count != parallel.data:
            raise UserError(
                f"parallel.data ({parallel.data}) needs as many processes, and there is {self.count}; start them with "
                f"python -m torch.distributed.run --nproc-per-node {parallel.data} -m torchtrain, or set "
                f"parallel.data={self.count}"
            )

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which now holds the sum over all replicas."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients_(self, gradients: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
        """Replace gradients by their sums over all replicas, which are formed in ``dtype``."""
        if self.count == 1:
            return
        for bucket in _buckets(gradients, dtype.itemsize):
            flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view(gradient.shape))

    def any(self, wish: bool, device: torch.device) -> bool:
        """Whether any replica has the wish."""
        if self.count == 1:
            return wish
        return bool(self.sum_(torch.tensor(int(wish), device=device)).item())


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

    Raises UserError when they do not meet within two minutes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=2))
    except (dist.DistError, ValueError) as error:
        rank, world = os.environ.get("RANK", "?"), os.environ["WORLD_SIZE"]
        raise UserError(f"process {rank} of {world} did not meet the others: {str(error).splitlines()[0]}") from None


def leave() -> None:
    """Part from the other processes."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
