"""Host offload in PyTorch: copies in pinned memory of the host.

The optimiser keeps moments there and brings them to the device parameter by parameter (:mod:`torchtrain.optimizer`);
remat keeps activations there by name (:mod:`torchtrain.remat`).
"""

from __future__ import annotations

import torch

from shared.config.schema import Config
from shared.errors import UserError


def require(config: Config) -> None:
    """Raise UserError when something is to live in host memory that cannot here."""
    if config.offload.parameters == "host":
        raise UserError(
            "offload.parameters=host needs sharded parameters in PyTorch (FSDP2's CPUOffloadPolicy), and this runs on "
            "one device; nearest valid: offload.optimizer=host"
        )


def host_zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of that shape in host memory, pinned where a GPU will read them."""
    return torch.zeros(like.shape, dtype=dtype, pin_memory=like.is_cuda)


class HostCopy:
    """A tensor that waits in host memory; the copies overlap with the device's work."""

    def __init__(self, tensor: torch.Tensor):
        self.device = tensor.device
        self.host = host_zeros(tensor, tensor.dtype)
        self.host.copy_(tensor, non_blocking=True)

    def restored(self) -> torch.Tensor:
        """The tensor, on its device again."""
        return self.host.to(self.device, non_blocking=True)
