"""How much memory PyTorch's tensors take, counted as they come and go: on a CPU no allocator tells."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Living(TorchDispatchMode):
    """Bytes of the storages that operations inside have made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((arguments, keywords)) if isinstance(x, torch.Tensor)}
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given:
                self.made(tensor.untyped_storage())
        return result

    def made(self, storage: torch.UntypedStorage) -> None:
        """Count it until it is gone."""
        key, size = id(storage), storage.nbytes()
        if key in self.storages:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: Any) -> None:
            self.now -= size
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, gone)
