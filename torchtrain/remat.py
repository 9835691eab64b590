"""The remat policy in PyTorch: non-reentrant activation checkpointing around a block, with a store of named tensors.

PyTorch's own selective checkpointing decides by the kind of an operation and, in eager mode, cannot keep a tensor in
host memory. Here two dispatch modes decide by name: in the forward pass one puts what a kept name's product gives into
a store, and when the block runs again the other takes it from there instead of computing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shared.policies.remat import RematPolicy
from torchtrain.offload import HostCopy
from torchtrain.tensors import operation_name

_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""The operations that give named tensors."""


def rematerialized(block: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """``block`` recomputed in its backward pass, from its input and what the policy keeps."""
    if policy.kept or policy.offloaded:
        context = functools.partial(_store_and_replay, policy)
        return functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False, context_fn=context)
    return functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)


def _store_and_replay(policy: RematPolicy) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    store: dict[str, Any] = {}
    return _Store(policy, store), _Replay(store)


class _Store(TorchDispatchMode):
    """Notes what the products of kept names give."""

    def __init__(self, policy: RematPolicy, store: dict[str, Any]):
        super().__init__()
        self.policy, self.store = policy, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = operation_name()
        if name is not None and func in PRODUCTS:
            if name in self.policy.offloaded:
                self.store[name] = tree_map_only(torch.Tensor, HostCopy, out)
            elif name in self.policy.kept:
                self.store[name] = tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), out)
        return out


class _Replay(TorchDispatchMode):
    """Gives what was noted, once, in the place of the products."""

    def __init__(self, store: dict[str, Any]):
        super().__init__()
        self.store = store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation_name()
        if name in self.store and func in PRODUCTS:
            return tree_map_only(HostCopy, HostCopy.restored, self.store.pop(name))
        return func(*args, **(kwargs or {}))
