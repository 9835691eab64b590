"""The operations of PyTorch's training step, and their formats: see :mod:`shared.policies.observed`.

A dispatch mode notes each operation as it runs, forwards and backwards, in one real step on a blank batch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.batch import Batch
from shared.policies.observed import Kind, Operation

if TYPE_CHECKING:
    from torchtrain.backend import TorchBackend

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}
ISLANDS = {
    "exp",
    "log",
    "rsqrt",
    "sqrt",
    "pow",
    "sum",
    "mean",
    "var",
    "amax",
    "logsumexp",
    "logaddexp",
    "_softmax",
    "_log_softmax",
    "nll_loss_forward",
    "native_layer_norm",
    "_fused_rms_norm",
}
UPDATES = {"_foreach_norm", "linalg_vector_norm", "_fused_adamw_", "_fused_sgd_"}
OVER_REPLICAS = {"allreduce_", "all_reduce", "all_reduce_"}
_EXACTNESS = {"highest": "exact", "high": "tf32", "medium": "bfloat16"}


def observe(backend: TorchBackend) -> Counter[Operation]:
    """Every product and island of the step that this run takes, as it ran."""
    state = backend.create_state()
    with _Recorder() as recorder:
        backend.train_step(state, Batch.blank(backend.config))
    return recorder.found


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Operation] = Counter()
        self.exactness = _EXACTNESS[torch.get_float32_matmul_precision()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        plain = name.removesuffix("_backward_data").removesuffix("_backward").removesuffix("_")
        product = name in PRODUCTS or name.startswith("_scaled_dot_product")
        kind: Kind | None = "product" if product else "island" if plain in ISLANDS else None
        if name in OVER_REPLICAS:
            kind = "sum over replicas"
        operands = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if name in UPDATES:
            kind = "update"
            # The optimisers' counts of steps are scalars in float32, whatever the arithmetic; they work in place.
            operands = [x for x in operands if x.ndim > 0] or operands
            results = results or operands
        if kind is not None and operands and results:
            if plain == "sum" and results[0].squeeze().ndim == 1 < operands[0].ndim:
                kind = "vector gradient"
            coarsest = min((x.dtype for x in operands), key=lambda dtype: -torch.finfo(dtype).eps)
            exactness = self.exactness if kind == "product" and coarsest == torch.float32 else ""
            self.found[Operation(kind, name, _name(coarsest), _name(results[0].dtype), exactness, "ran")] += 1
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
