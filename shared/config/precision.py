"""The ``precision`` section: the number format of every role in a training step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from shared.config.section import PositiveInt, Section


class LossScale(Section):
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), by the rule of PyTorch's GradScaler.

    Gradients are divided by the scale once, after the last microbatch. If any is not finite, the update is skipped
    and the scale is multiplied by ``backoff``; after ``growth_interval`` good updates in a row it is multiplied by
    ``growth``."""

    initial: PositiveFloat = 65536.0
    """The scale of the first step."""
    growth: Annotated[float, Field(ge=1.0)] = 2.0
    """What it is multiplied by after good updates."""
    backoff: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """What it is multiplied by after an overflow."""
    growth_interval: PositiveInt = 2000
    """Good updates in a row until it grows."""


Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class Precision(Section):
    """Number formats: a preset, or a preset and the roles that depart from it. A bare word is the preset.

    ``float32`` means float32 on every device; ``tf32`` asks for TensorFloat-32 products by name. ``bfloat16`` and
    ``float16`` compute in that format and keep parameters, the optimiser and the islands in float32. A device that
    cannot do what is asked refuses it."""

    shorthand = "preset"

    preset: Literal["float64", "float32", "tf32", "bfloat16", "float16"]
    """Gives every role that is not stated."""
    parameters: Literal["float64", "float32", "bfloat16"] | None = None
    """Parameters between updates, and their average."""
    compute: Dtype | None = None
    """Activations and the operands of matrix products."""
    logits: Dtype | None = None
    """What the output head's product gives; no coarser than ``compute``."""
    islands: Literal["float64", "float32"] | None = None
    """Softmax, norms, rotary angles and the loss."""
    accumulate: Literal["float64", "float32", "bfloat16"] | None = None
    """Gradients once they are added over microbatches, their norm, and the arithmetic of the update."""
    reduce: Dtype | None = None
    """Gradients while they are summed over replicas."""
    optimizer_state: Literal["float64", "float32", "bfloat16"] | None = None
    """The optimiser's moments between updates."""
    matmul: Literal["exact", "tf32", "bfloat16"] | None = None
    """How products of float32 operands are computed: exactly, or with operands rounded by the hardware."""
    loss_scale: LossScale | None = None
    """Dynamic loss scaling; null for the preset's, which only ``float16`` has."""


def roles(precision: Precision) -> dict[str, Any]:
    """Every role's value, as stated or from the preset; ``loss_scale`` may be None."""
    preset = precision.preset
    compute = precision.compute or ("float32" if preset == "tf32" else preset)
    wide = "float64" if preset == "float64" else "float32"
    presets = {
        "parameters": wide,
        "compute": compute,
        "logits": compute,
        "islands": wide,
        "accumulate": wide,
        "reduce": wide,
        "optimizer_state": wide,
        "matmul": "tf32" if preset == "tf32" else "exact",
        "loss_scale": LossScale() if preset == "float16" else None,
    }
    return {role: value if (stated := getattr(precision, role)) is None else stated for role, value in presets.items()}
