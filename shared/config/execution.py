"""The sections that decide where and how fast a run happens: not part of the recipe's identity."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config.section import PositiveInt, Section


class Accumulation(Section):
    """Gradient accumulation: how a global batch is cut into microbatches. Does not change the result."""

    microbatch: PositiveInt | None = None
    """Sequences that a device processes at once; divides its share of the global batch. Default: all of it."""


Remat = Literal["none", "full"]


class Parallel(Section):
    """Sizes of the device mesh. One device for now."""

    data: Annotated[int, Field(ge=1, le=1)] = 1
    """Data-parallel replicas."""


class Offload(Section):
    """What is kept in host memory instead of the device's."""

    optimizer: Literal["device"] = "device"
    """Where the optimiser's moments live."""


class JaxExecution(Section):
    """Choices that only JAX has."""

    layers: Literal["auto", "scan", "unroll"] = "auto"
    """``scan`` compiles one block and loops over it, so compile time does not grow with depth; ``unroll`` compiles
    every block, which is faster on a CPU. ``auto``: unroll on a CPU, scan elsewhere."""


class TorchExecution(Section):
    """Choices that only PyTorch has."""

    compile: bool = False
    """Compile each block with ``torch.compile``: slower to start, faster afterwards on a GPU."""


class Execution(Section):
    """Choices of kernels and compilers that change the speed and not the result."""

    attention: Literal["auto", "reference", "fused"] = "auto"
    """``reference``: plain matrix products, which materialise all scores. ``fused``: splash attention on a TPU,
    scaled_dot_product_attention in PyTorch. ``auto``: fused where it can run."""
    jax: JaxExecution = JaxExecution()
    """For ``python -m jaxtrain``."""
    torch: TorchExecution = TorchExecution()
    """For ``python -m torchtrain``."""


class Checkpoint(Section):
    """When the state is written to the run directory. The state at the end, or at an interrupt, is always written."""

    every: PositiveInt | None = None
    """Steps between checkpoints; null for only the last."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""


class Evaluation(Section):
    """When the held-out loss is measured; it always is at the end."""

    every: PositiveInt | None = None
    """Steps between evaluations; null for only at the end."""
    max_rows: PositiveInt | None = None
    """Rows of the held-out set to use; null for all."""


class Logging(Section):
    """What is recorded while training."""

    every: PositiveInt = 10
    """Steps between records. Only a step that is recorded synchronises with the device, one step late."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
