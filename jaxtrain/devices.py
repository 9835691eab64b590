"""Which accelerator JAX sees, and what it is called in a config's ``targets``."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from shared.backend import DeviceReport
from shared.errors import UserError
from shared.hardware import gpu_target, tpu_target


def prefer_existing_platform() -> None:
    """Keep JAX from probing for a TPU on a machine that has none.

    The ``libtpu`` package alone, installed to compile for TPUs ahead of time, makes JAX look for one: with minutes of
    retries against a metadata server and pages of warnings. Must run before the first use of a device.
    """
    has_tpu = any(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists() or "TPU_NAME" in os.environ
    if not has_tpu:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        if "JAX_PLATFORMS" not in os.environ and not any(Path("/dev").glob("nvidia[0-9]*")):
            os.environ["JAX_PLATFORMS"] = "cpu"


def detect_target() -> str:
    """The name in ``targets`` of what this process runs on: ``cpu``, ``v5e-8``, ``a100-80``, ``h100-80x8``."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise UserError(f"JAX finds no device: {str(error).splitlines()[0]}") from None
    platform, kind, count = devices[0].platform, devices[0].device_kind, len(devices)
    if platform == "tpu":
        return tpu_target(kind, count)
    return gpu_target(kind, count) if platform in ("gpu", "cuda", "rocm") else platform


def describe(count: int) -> DeviceReport:
    """The ``count`` devices of a run, and the versions of what drives them."""
    import jax

    devices = jax.devices()
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu", "numpy")
    return DeviceReport(
        kind=devices[0].device_kind,
        target=detect_target(),
        count=count,
        memory_bytes=memory_bytes(devices[0]),
        versions={name: version for name in names if (version := _version(name))},
    )


def memory_bytes(device: object) -> int | None:
    """Memory that a program may use on the device, or None where it does not say: a CPU, or a device that is only
    compiled for."""
    import jax

    try:
        stats = getattr(device, "memory_stats", lambda: None)() or {}
    except jax.errors.JaxRuntimeError:
        return None
    return stats.get("bytes_limit")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
