"""The device mesh in JAX and how arrays lie on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shared.config.schema import Parallel
from shared.errors import UserError


class Placement:
    """The mesh of one run: state is replicated, rows are split over ``data``."""

    def __init__(self, parallel: Parallel, devices: Sequence[jax.Device] | None = None):
        """``devices``: those to use, or to compile for; default: this process's."""
        devices = devices or jax.devices()
        if len(devices) < parallel.data:
            raise UserError(
                f"parallel.data ({parallel.data}): JAX sees {len(devices)} device(s) here; nearest valid: "
                f"{len(devices)}"
            )
        self.replicas = parallel.data
        self.mesh = Mesh(np.array(devices[: parallel.data]), ("data",))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.host = self.replicated.with_memory_kind("pinned_host")
        self.on_device = self.replicated.with_memory_kind("device")
        """``replicated``, but said aloud: what moves something there from host memory."""

    def on_each_replica(self, function: Callable[..., Any], gives_rows: bool = False) -> Callable[..., Any]:
        """``function`` run by each replica on its own rows: its last argument is split, the others are the same for
        all. What it returns is the same for all, too, so that it has to sum over replicas itself; or, if it
        ``gives_rows``, split like the argument.

        With one replica it is ``function`` itself. With several no partitioner is asked, which could not split the
        kernel of a fused attention.
        """
        if self.replicas == 1:
            return function
        out_specs = PartitionSpec("data") if gives_rows else PartitionSpec()

        def call(*arguments: Any) -> Any:
            in_specs = (*(PartitionSpec() for _ in arguments[:-1]), PartitionSpec("data"))
            mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            return mapped(*arguments)

        return call

    def sum(self, value: Any) -> Any:
        """The value summed over replicas; inside :meth:`on_each_replica`."""
        return value if self.replicas == 1 else jax.lax.psum(value, "data")

    def sum_gradients(self, sums: tuple[jax.Array, Any], dtype: Any) -> tuple[jax.Array, Any]:
        """A value and gradients summed over replicas, the gradients in ``dtype``; inside :meth:`on_each_replica`."""
        if self.replicas == 1:
            return sums
        value, gradients = sums
        return self.sum(value), jax.tree.map(lambda x: self.sum(x.astype(dtype)).astype(x.dtype), gradients)
