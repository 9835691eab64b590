"""Precision: which number format each part of a step uses.

A preset expands to one dtype a role, so nothing is left to a framework's own idea of mixed precision; a recipe may
depart from it role by role. What the presets keep in float32 whatever the compute dtype (the *islands*): norms'
statistics, softmax, rotary angles, the loss; and gradient accumulators and the optimiser beside them. Under
``float64`` everything is float64, islands too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shared.config.precision import LossScale, Precision, roles


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtype of every role in a training step; names are NumPy's plus ``bfloat16``."""

    parameters: str
    """Parameters between updates, and their average."""
    compute: str
    """Activations and the operands of every matrix product."""
    logits: str
    """What the output head's product gives."""
    islands: str
    """Softmax, norm statistics, rotary tables, logits once they enter the loss, the loss."""
    accumulate: str
    """Gradient accumulators, the gradient norm, loss sums, and the arithmetic of the update."""
    reduce: str
    """Gradients while they are summed over replicas."""
    optimizer_state: str
    """The optimiser's moments between updates."""
    matmul: str
    """How products of float32 operands are computed: ``exact``, ``tf32`` or ``bfloat16``."""
    loss_scale: LossScale | None


def precision_policy(precision: Precision) -> PrecisionPolicy:
    """The policy that a preset and its departures stand for."""
    return PrecisionPolicy(**roles(precision))


_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Bits after the point."""


def contradiction(policy: PrecisionPolicy) -> str | None:
    """What two roles of a policy contradict each other in, with the nearest valid choice; None where nothing does."""
    p = policy
    for role in ("islands", "accumulate"):
        if p.compute in ("float64", "float32") and _BITS[getattr(p, role)] < _BITS[p.compute]:
            return (
                f"precision.{role} ({getattr(p, role)}) is coarser than precision.compute ({p.compute}), so what is "
                f"computed finely would be rounded at once; nearest valid: {role}={p.compute}"
            )
    for role, user in (("parameters", "accumulate"), ("optimizer_state", "accumulate"), ("logits", "islands")):
        name, taken_in = getattr(p, role), getattr(p, user)
        if name == "float64" and taken_in != "float64":
            return (
                f"precision.{role} (float64) is rounded to precision.{user} ({taken_in}) wherever it is used; nearest "
                f"valid: {role}={taken_in}"
            )
    if _BITS[p.logits] < _BITS[p.compute]:
        return (
            f"precision.logits ({p.logits}) is coarser than precision.compute ({p.compute}); nearest valid: "
            f"logits={p.compute}"
        )
    if p.matmul != "exact" and p.compute != "float32":
        return (
            f"precision.matmul ({p.matmul}) says how products of float32 are computed, and precision.compute is "
            f"{p.compute}; nearest valid: matmul=exact"
        )
    return None


def refusal(policy: PrecisionPolicy, platform: str, capability: tuple[int, int] | None = None) -> str | None:
    """Why a device cannot honour the policy, with the nearest valid choice; None where it can.

    ``platform`` is ``cpu``, ``gpu`` or ``tpu``; ``capability`` is a GPU's compute capability.
    """
    if found := contradiction(policy):
        return found
    old = platform == "gpu" and capability is not None and capability < (8, 0)
    device = {"cpu": "a CPU", "gpu": "this GPU", "tpu": "a TPU"}.get(platform, platform)
    if old and capability is not None:
        device = f"a GPU of compute capability {capability[0]}.{capability[1]}"
    doubles = [field.name for field in fields(policy) if getattr(policy, field.name) == "float64"]
    if platform == "tpu" and doubles:
        return f"precision.{doubles[0]} (float64): {device} has no float64; nearest valid: precision=float32"
    if platform == "tpu" and policy.compute == "float16":
        return f"precision.compute (float16): {device} computes in bfloat16; nearest valid: precision=bfloat16"
    if old and policy.compute == "bfloat16":
        return f"precision.compute (bfloat16): {device} has no bfloat16; nearest valid: precision=float16"
    if policy.matmul == "tf32" and (platform != "gpu" or old):
        return f"precision.matmul (tf32): {device} has no TensorFloat-32; nearest valid: precision=float32"
    if policy.matmul == "bfloat16" and (platform == "cpu" or old):
        return f"precision.matmul (bfloat16): {device} has no such products; nearest valid: matmul=exact"
    return None
