"""The device mesh in JAX and how arrays lie on it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shared.config.schema import Parallel


class Placement:
    """The mesh of one run: state is replicated, rows are split over ``data``."""

    def __init__(self, parallel: Parallel, devices: Sequence[jax.Device] | None = None):
        """``devices``: those to use, or to compile for; default: this process's."""
        self.mesh = Mesh(np.array((devices or jax.devices())[: parallel.data]), ("data",))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.host = self.replicated.with_memory_kind("pinned_host")
        self.on_device = self.replicated.with_memory_kind("device")
        """``replicated``, but said aloud: what moves something there from host memory."""
