"""What really ran is held against the policy: sound programs pass, a coarser operation is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shared.config.schema import Precision
from shared.policies.observed import Operation, judge
from shared.policies.precision import precision_policy
from tests import backends
from tests.recipes import ADAMW, MODELS, SGD, recipe

BOTH = pytest.mark.parametrize("name", backends.BACKENDS)


def observed(name: str, **sections: Any) -> Counter[Operation]:
    sections = {"batch": {"global_batch": 2, "sequence_length": 8}} | sections
    with backends.make(name, recipe(**sections)) as backend:
        found: Counter[Operation] = backend.observe()
        return found


@BOTH
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("preset", ["float64", "float32", "bfloat16", "float16"])
def test_no_operation_is_coarser_than_the_policy_says(name: str, model: dict[str, Any], preset: str) -> None:
    found = observed(name, model=model, precision=preset, execution={"attention": "reference"})
    policy = precision_policy(recipe(precision=preset).precision)
    assert [operation for operation in found if judge(operation, policy) == "coarser"] == []
    assert {operation.kind for operation in found} >= {"product", "island"}
    products = [operation.operands for operation in found if operation.kind == "product"]
    assert preset in products, "and what was asked for is really there"


@BOTH
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
def test_the_update_is_held_to_its_own_role(name: str, optimizer: dict[str, Any], accumulate: str) -> None:
    """An update in bfloat16 that was asked for is no mistake, and one that was not is."""
    precision = {"preset": "bfloat16", "accumulate": accumulate}
    found = observed(name, precision=precision, optimizer=optimizer)
    updates = [operation for operation in found if operation.kind == "update" and operation.source != "compiled"]
    assert updates and {operation.operands for operation in updates} == {accumulate}
    policy = precision_policy(recipe(precision=precision).precision)
    assert [operation for operation in found if judge(operation, policy) == "coarser"] == []
    wanted = precision_policy(Precision(preset="bfloat16"))
    coarser = {operation.kind for operation in found if judge(operation, wanted) == "coarser"}
    assert coarser == ({"update"} if accumulate == "bfloat16" else set())


@BOTH
def test_the_products_of_a_float32_step_are_exact(name: str) -> None:
    found = observed(name)
    traced = [operation for operation in found if operation.kind == "product" and operation.source != "compiled"]
    assert traced and {operation.exactness for operation in traced} == {"exact"}


def test_the_compiled_program_is_read_too() -> None:
    found = observed("jax")
    compiled = {operation: count for operation, count in found.items() if operation.source == "compiled"}
    traced = sum(count for o, count in found.items() if o.kind == "product" and o.source == "traced")
    # A compiler drops and joins products, but there is no step without any.
    assert 0.5 * traced < sum(count for o, count in compiled.items() if o.kind == "product") <= traced


@pytest.mark.parametrize(
    ("operation", "verdict"),
    [
        (("product", "bfloat16", ""), "as asked"),
        (("product", "float32", "bfloat16"), "finer"),
        (("product", "float16", ""), "finer"),
        (("island", "bfloat16", ""), "coarser"),
        (("island", "float32", ""), "as asked"),
        (("vector gradient", "bfloat16", ""), "as asked"),
        (("sum over replicas", "bfloat16", ""), "coarser"),
        (("update", "bfloat16", ""), "coarser"),
    ],
)
def test_formats_are_held_to_their_role(operation: tuple[Any, str, str], verdict: str) -> None:
    kind, operands, exactness = operation
    policy = precision_policy(Precision(preset="bfloat16"))
    assert judge(Operation(kind, "", operands, operands, exactness, "ran"), policy) == verdict


@pytest.mark.parametrize(
    ("preset", "exactness", "verdict"),
    [
        ("float32", "exact", "as asked"),
        ("float32", "tf32", "coarser"),
        ("float32", "bfloat16", "coarser"),
        ("tf32", "tf32", "as asked"),
        ("tf32", "bfloat16", "coarser"),
    ],
)
def test_float32_products_are_held_to_their_exactness(preset: Any, exactness: str, verdict: str) -> None:
    operation = Operation("product", "", "float32", "float32", exactness, "ran")
    assert judge(operation, precision_policy(Precision(preset=preset))) == verdict


@pytest.mark.parametrize("matmul", ["tf32", "bfloat16"])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_matmul_mode_reaches_the_program_for_the_device(matmul: Any, platform: str) -> None:
    """Lowered for a device that is not here: every product of the gradient names the algorithm."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.precision import matmul_precision

    policy = precision_policy(Precision(preset="float32", matmul=matmul))

    def step(x: jax.Array, w: jax.Array) -> Any:
        with matmul_precision(policy):
            return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    arguments = jnp.zeros((8, 8)), jnp.zeros((8, 8))
    text = jax.jit(step).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 2
    assert all({"tf32": "tf32", "bfloat16": "bf16"}[matmul] in line for line in products)
