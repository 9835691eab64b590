"""The precision policy in JAX: which dtype, and which kind of matrix product.

In JAX a float32 product means one bfloat16 pass on a TPU and TF32 on an A100 unless a precision is asked for, so
float32 and float64 ask for the highest. Products of bfloat16 and float16 operands accumulate in float32 in the
hardware and need nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from shared.errors import UserError
from shared.policies.precision import PrecisionPolicy, refusal


@dataclass(frozen=True)
class Dtypes:
    """The policy's roles as JAX dtypes; see :class:`shared.policies.precision.PrecisionPolicy`."""

    parameters: Any
    compute: Any
    logits: Any
    islands: Any
    accumulate: Any
    reduce: Any
    optimizer_state: Any


def dtypes(policy: PrecisionPolicy) -> Dtypes:
    """Look the dtypes up, and switch JAX to 64 bits where the policy needs them: it demotes float64 silently."""
    names = {field.name: getattr(policy, field.name) for field in fields(Dtypes)}
    if "float64" in names.values():
        jax.config.update("jax_enable_x64", True)
    return Dtypes(**{role: jnp.dtype(name) for role, name in names.items()})


def matmul_precision(policy: PrecisionPolicy) -> Any:
    """A context in which to trace a step: products of the compute dtype are as exact as its name says.

    It must span the differentiation, not the forward pass alone: hand-written gradients are traced in it too.
    """
    if policy.matmul != "exact":
        # Names of algorithms, not of wishes: a device that has no such product says so.
        return jax.default_matmul_precision({"tf32": "TF32_TF32_F32", "bfloat16": "BF16_BF16_F32"}[policy.matmul])
    return jax.default_matmul_precision("highest" if policy.compute in ("float32", "float64") else "default")


def require_precision(policy: PrecisionPolicy, device: jax.Device) -> None:
    """Raise UserError when the device cannot honour the policy."""
    capability = getattr(device, "compute_capability", None)
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    numbers: tuple[int, int] | None = None
    if platform == "gpu" and capability:
        major, minor = str(capability).split(".")
        numbers = int(major), int(minor)
    if why := refusal(policy, platform, numbers):
        raise UserError(why)
