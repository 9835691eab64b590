"""Accelerators get the names that a config's targets use."""

from __future__ import annotations

import pytest

from shared.hardware import gpu_target, tpu_target


@pytest.mark.parametrize(
    ("kind", "count", "name"),
    [
        ("TPU v5 lite", 1, "v5e-1"),
        ("TPU v5", 8, "v5p-8"),
        ("TPU v6 lite", 8, "v6e-8"),
        ("TPU v4", 4, "v4-4"),
        ("TPU v3", 4, "v3-4"),
    ],
)
def test_tpus_have_the_names_of_targets(kind: str, count: int, name: str) -> None:
    assert tpu_target(kind, count) == name


@pytest.mark.parametrize(
    ("kind", "count", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 1, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 8, "a100-40x8"),
        ("NVIDIA H100 80GB HBM3", 1, "h100-80"),
        ("NVIDIA H200", 1, "h200"),
        ("Tesla T4", 1, "t4"),
        ("NVIDIA L4", 1, "l4"),
        ("Tesla V100-SXM2-16GB", 1, "v100-16"),
    ],
)
def test_gpus_have_the_names_of_targets(kind: str, count: int, name: str) -> None:
    assert gpu_target(kind, count) == name


def test_here_both_backends_find_a_cpu() -> None:
    from jaxtrain import devices
    from torchtrain import devices as torch_devices

    assert devices.detect_target() == torch_devices.detect_target() == "cpu"
    assert devices.describe(1).versions["jax"] and torch_devices.describe(1).versions["torch"]
