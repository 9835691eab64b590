"""Set-up that must happen before a framework is imported."""

from __future__ import annotations

import os
from pathlib import Path

# Compiled programs are kept between tests, processes and runs: most of a JAX test's time is compilation.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# One thread a process: the tests themselves run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Four devices of JAX for the tests of replicas; the others use the first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
