"""Which accelerator PyTorch sees, and what it is called in a config's ``targets``."""

from __future__ import annotations

import os
import shutil

import numpy as np
import torch

from shared.backend import DeviceReport
from shared.errors import UserError
from shared.hardware import gpu_target
from shared.policies.precision import PrecisionPolicy, refusal


def device() -> torch.device:
    """The device this process trains on: its GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def detect_target() -> str:
    """The name in ``targets`` of what this process runs on: ``cpu``, ``a100-80``, ``t4``."""
    return gpu_target(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def require_compiler(device: torch.device) -> None:
    """Raise UserError when ``torch.compile`` could not work here: on a CPU it writes C++."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise UserError(
            "execution.torch.compile=true needs a C++ compiler for this CPU, and neither g++ nor clang++ is found; "
            "install one or leave it false"
        )


def require_precision(policy: PrecisionPolicy, device: torch.device) -> None:
    """Raise UserError when the device cannot honour the policy."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if why := refusal(policy, "gpu" if device.type == "cuda" else device.type, capability):
        raise UserError(why)
    if policy.matmul == "bfloat16":
        # torch.set_float32_matmul_precision("medium") means TensorFloat-32 in cuBLAS, and the run would not say so.
        raise UserError(
            "precision.matmul (bfloat16): PyTorch computes such products in TensorFloat-32; nearest valid: matmul=tf32"
        )


def describe(count: int) -> DeviceReport:
    """The devices of a run, one for each of its ``count`` processes, and the versions of what drives them."""
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    if not torch.cuda.is_available():
        return DeviceReport("cpu", "cpu", count, None, versions)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    properties = torch.cuda.get_device_properties(device())
    return DeviceReport(properties.name, detect_target(), count, properties.total_memory, versions)
