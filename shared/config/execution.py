"""The sections that decide where and how fast a run happens: not part of the recipe's identity."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from shared.config.section import Bytes, NonNegativeInt, PositiveInt, Section


class Accumulation(Section):
    """Gradient accumulation: how a global batch is cut into microbatches. Does not change the result."""

    microbatch: PositiveInt | Literal["auto"] | None = None
    """Sequences that a device processes at once; divides its share of the global batch. ``auto``: the largest that
    fits the device. Default: all of its share."""
    sync: Literal["every", "last"] = "last"
    """How often gradients are summed over the replicas: after ``every`` microbatch, or once, after the ``last``."""


TensorName = Literal["q", "k", "v", "context", "out", "gate", "up", "down"]


class Remat(Section):
    """Rematerialisation (activation checkpointing): what the backward pass recomputes instead of keeping it.

    ``none`` keeps all. ``full`` keeps each block's input and recomputes the rest. ``matmuls`` also keeps what every
    matrix product and attention give, ``alternate`` what every second of them gives. Exactly one of the four settings
    is given; the bare word is short for ``policy``."""

    shorthand = "policy"

    policy: Literal["none", "full", "matmuls", "alternate"] | None = None
    """A policy by name."""
    every: PositiveInt | None = None
    """``full``, but only for every K-th block; the others keep all."""
    names: list[TensorName] | None = None
    """The tensors of a block that are kept, beside its input; all others are recomputed."""
    budget: Bytes | None = None
    """Bytes of activations that the blocks may keep between the passes, on one device: the names that save most
    recomputation within it are kept."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Remat:
        given = [name for name in ("policy", "every", "names", "budget") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"policy, every, names or budget: exactly one is to be given, not {found}")
        return self


class Parallel(Section):
    """Sizes of the device mesh."""

    data: PositiveInt = 1
    """Data-parallel replicas: each processes its share of the rows, and gradients are summed over all."""


class Offload(Section):
    """What is kept in host memory instead of the device's. Does not change the result."""

    optimizer: Literal["host", "device"] = "device"
    """Where the optimiser's moments live between updates."""
    activations: list[TensorName] = Field(default=[])
    """Tensors of each block that wait in host memory for the backward pass."""
    parameters: Literal["host", "device"] = "device"
    """Where the parameters that the optimiser updates live between updates."""


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
    vocab_chunk: PositiveInt | None = None
    """Vocabulary entries whose logits exist at once in the loss; null for all. Chunks are computed twice, and the
    logits of a whole microbatch never exist."""
    jax: JaxExecution = JaxExecution()
    """For ``python -m jaxtrain``."""
    torch: TorchExecution = TorchExecution()
    """For ``python -m torchtrain``."""


class Checkpoint(Section):
    """When the state is written to the run directory, while training goes on. The state at the end, or at an interrupt,
    is always written."""

    every: PositiveInt | None = None
    """Steps between checkpoints; null for none by steps."""
    every_minutes: PositiveFloat | None = None
    """Minutes between checkpoints; null for none by time. May be given beside ``every``."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Keep also those of every step that this divides; null for none."""
    keep_best: NonNegativeInt = 0
    """Keep also so many with the lowest held-out loss, of those saved at a step with an evaluation."""


class Nonfinite(Section):
    """What happens when a loss or a gradient is not finite (and, with loss scaling, more than the scale overflowed).

    Such an update is always left out, and the rows of its batch are written to the run directory. ``stop`` ends the
    run. ``skip`` goes on without the update. ``rewind`` goes back to the newest checkpoint and trains the same steps
    again, which heals a fault of the machine; where the same step fails again, the run stops. The bare word is short
    for ``policy``."""

    shorthand = "policy"

    policy: Literal["stop", "skip", "rewind"] = "stop"
    """What to do."""
    limit: PositiveInt = 10
    """Such updates after which a process stops, whatever the policy."""


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
