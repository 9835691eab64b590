"""The precision policy in PyTorch: explicit casts rather than autocast.

Autocast decides op by op, and differently on a CPU and on a GPU (on a CPU it leaves softmax in low precision). Here
the model casts operands to the compute dtype and raises the islands itself, so the same roles hold on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from shared.policies.precision import PrecisionPolicy


@dataclass(frozen=True)
class Dtypes:
    """The policy's roles as torch dtypes; see :class:`shared.policies.precision.PrecisionPolicy`."""

    parameters: torch.dtype
    compute: torch.dtype
    logits: torch.dtype
    islands: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    optimizer_state: torch.dtype


def dtypes(policy: PrecisionPolicy) -> Dtypes:
    """Look the dtypes up, and forbid shortcuts that nobody asked for: TF32, and half-precision sums in products."""
    torch.set_float32_matmul_precision("high" if policy.matmul == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = policy.matmul == "tf32"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return Dtypes(**{field.name: getattr(torch, getattr(policy, field.name)) for field in fields(Dtypes)})
