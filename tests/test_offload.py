"""State that waits in host memory: the same numbers, and in JAX really another memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import UserError
from tests import backends
from tests.recipes import ADAMW, SGD, random_batch, recipe

BOTH = pytest.mark.parametrize("name", backends.BACKENDS)
OPTIMIZERS = {"adamw": ADAMW | {"ema_decay": 0.5}, "sgd": SGD, "nesterov": SGD | {"nesterov": True}}


def after_steps(name: str, offload: dict[str, Any], **sections: Any) -> tuple[list[Any], dict[str, np.ndarray], float]:
    """(metrics, parameters, held-out loss) after four steps."""
    config = recipe(offload=offload, accumulation={"microbatch": 4}, **sections)
    with backends.make(name, config) as backend:
        state, metrics = backends.steps(backend, [random_batch(config, seed=seed) for seed in range(4)])
        held_out = backend.eval_step(state, random_batch(config)).read().loss
        return metrics, {key: value.copy() for key, value in backend.export_arrays(state)}, held_out


@BOTH
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_moments_in_host_memory_change_no_bit(name: str, optimizer: str, precision: str) -> None:
    sections = {"optimizer": OPTIMIZERS[optimizer], "precision": precision}
    expected, found = (after_steps(name, offload, **sections) for offload in ({}, {"optimizer": "host"}))
    assert found[0] == expected[0] and found[2] == expected[2]
    assert all(np.array_equal(found[1][key], expected[1][key]) for key in expected[1])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_in_host_memory_change_no_bit_in_jax(precision: str) -> None:
    offloads: list[dict[str, Any]] = [{}, {"optimizer": "host", "parameters": "host"}]
    sections = {"optimizer": OPTIMIZERS["adamw"], "precision": precision}
    expected, found = (after_steps("jax", offload, **sections) for offload in offloads)
    assert found[0] == expected[0] and found[2] == expected[2]
    assert all(np.array_equal(found[1][key], expected[1][key]) for key in expected[1])


def test_the_state_of_jax_lies_where_it_was_asked_for() -> None:
    import jax

    config = recipe(offload={"optimizer": "host"}, optimizer=OPTIMIZERS["adamw"])
    with backends.make("jax", config) as backend:
        state, _ = backends.steps(backend, [random_batch(config)])
    kinds = {
        part: {leaf.sharding.memory_kind for leaf in jax.tree.leaves(getattr(state, part))}
        for part in ("parameters", "optimizer", "average")
    }
    assert kinds["optimizer"] == {"pinned_host"}
    assert "pinned_host" not in kinds["parameters"] | kinds["average"]


@BOTH
def test_a_run_with_offload_is_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = recipe(offload={"optimizer": "host"}, optimizer=OPTIMIZERS["adamw"])
    batches = [random_batch(config, seed=seed) for seed in range(4)]
    with backends.make(name, config) as backend:
        straight, resumed = backends.straight_and_resumed(backend, batches, 2, tmp_path)
    assert resumed == straight


def test_torch_refuses_what_one_device_cannot_do() -> None:
    from torchtrain.backend import TorchBackend

    with pytest.raises(UserError, match=r"offload\.parameters=host.*nearest valid: offload\.optimizer=host"):
        TorchBackend(recipe(offload={"parameters": "host"}))
