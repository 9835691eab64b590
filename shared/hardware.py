"""What accelerators are called in a config's ``targets``."""

from __future__ import annotations

import re


def gpu_target(kind: str, count: int = 1) -> str:
    """The name for GPUs that call themselves ``kind``: ``NVIDIA A100-SXM4-80GB`` is ``a100-80``, ``Tesla T4`` ``t4``.

    The memory is part of the name where it is part of the kind's: what a driver reports free varies.
    """
    model = re.search(r"\b[a-z]+\d+[a-z]*", kind.lower())
    memory = re.search(r"(\d+) ?GB", kind)
    name = (model[0] if model else "gpu") + (f"-{memory[1]}" if memory else "")
    return f"{name}x{count}" if count > 1 else name


def tpu_target(kind: str, count: int = 1) -> str:
    """The name for TPU chips that call themselves ``kind``: ``TPU v5 lite`` is ``v5e-1``, ``TPU v5`` is ``v5p-1``."""
    generation = kind.lower().removeprefix("tpu").strip()
    generation = "v5p" if generation == "v5" else generation.replace(" lite", "e").replace(" ", "")
    return f"{generation}-{count}"
