"""Cross entropy from chunks of the vocabulary: the loss and gradient of all logits at once, without all logits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests import backends
from tests.recipes import LLAMA, random_batch, recipe

BOTH = pytest.mark.parametrize("name", backends.BACKENDS)
CHUNKS = [1, 8, 60, 61, 62, 1000]  # of a vocabulary of 61: dividing it or not, below and above it


@functools.cache
def gradients(name: str, precision: str, tied: bool, chunk: int | None, microbatch: int = 8) -> Any:
    model = LLAMA | {"tie_word_embeddings": tied}
    sections = {"execution": {"vocab_chunk": chunk}, "accumulation": {"microbatch": microbatch}}
    config = recipe(model=model, precision=precision, **sections)
    with backends.make(name, config) as backend:
        return backends.loss_and_gradients(backend, random_batch(config, ragged=True))


@BOTH
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("chunk", CHUNKS)
# Sums over 61 logits in another order: float32 keeps seven digits of them, float64 sixteen.
@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-6), ("float64", 1e-13)])
def test_chunks_give_the_loss_and_gradient_of_all_logits(
    name: str, tied: bool, chunk: int, precision: str, limit: float
) -> None:
    loss, expected = gradients(name, precision, tied, None)
    found_loss, found = gradients(name, precision, tied, chunk)
    assert found_loss == pytest.approx(loss, rel=limit)
    for key, value in expected.items():
        assert np.linalg.norm(found[key] - value) <= limit * np.linalg.norm(value), key


@BOTH
def test_chunks_and_microbatches_go_together(name: str) -> None:
    loss, expected = gradients(name, "float64", True, None)
    found_loss, found = gradients(name, "float64", True, 8, microbatch=2)
    assert found_loss == pytest.approx(loss, rel=1e-13)
    assert all(np.linalg.norm(found[key] - value) <= 1e-13 * np.linalg.norm(value) for key, value in expected.items())


@BOTH
@pytest.mark.parametrize("chunk", [3, 7])
def test_the_chunked_loss_is_the_formula(name: str, chunk: int) -> None:
    """-log softmax(x W^T)[target] and its gradients by hand, in NumPy; logits of 1,000 overflow no exponential."""
    rng = np.random.default_rng(0)
    hidden, head = 300 * rng.standard_normal((2, 3, 4)), rng.standard_normal((7, 4))
    targets, mask = rng.integers(0, 7, (2, 3)), rng.random((2, 3)) < 0.7
    logits = hidden @ head.T
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=-1, keepdims=True)
    logsumexp = logits.max(axis=-1) + np.log(shifted.sum(axis=-1))
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = np.sum((logsumexp - chosen) * mask)
    of_logits = (probabilities - np.eye(7)[targets]) * mask[..., None]
    loss, of_hidden, of_head = chunked(name, hidden, head, targets, mask, chunk)
    assert loss == pytest.approx(expected, rel=1e-13)
    np.testing.assert_allclose(of_hidden, of_logits @ head, atol=1e-13)
    np.testing.assert_allclose(of_head, np.einsum("btv,btc->vc", of_logits, hidden), atol=1e-10)


def chunked(name: str, hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, mask: np.ndarray, chunk: int) -> Any:
    """(loss, gradient of the hidden states, gradient of the head) in float64."""
    if name == "jax":
        import jax
        import jax.numpy as jnp

        from jaxtrain.loss import chunked_cross_entropy_sum

        with backends.make("jax", recipe(precision="float64")):

            def loss(hidden: Any, head: Any) -> Any:
                inputs = jnp.asarray(targets), jnp.asarray(mask), chunk, jnp.float64, jnp.float64
                return chunked_cross_entropy_sum(hidden, head, *inputs)

            value, found = jax.value_and_grad(loss, (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
            return float(value), *map(np.asarray, found)
    import torch

    from torchtrain import loss as in_torch

    leaves = [torch.tensor(x, requires_grad=True) for x in (hidden, head)]
    value = in_torch.chunked_cross_entropy_sum(
        *leaves, torch.tensor(targets), torch.tensor(mask), chunk, torch.float64, torch.float64
    )
    value.backward()
    return value.item(), *(leaf.grad.numpy() for leaf in leaves)  # type: ignore[union-attr]


@BOTH
def test_an_evaluation_has_the_same_loss_from_chunks(name: str) -> None:
    losses = []
    for chunk in (None, 10):
        config = recipe(precision="float64", execution={"vocab_chunk": chunk})
        with backends.make(name, config) as backend:
            losses.append(backend.eval_step(backend.create_state(), random_batch(config, ragged=True)).read().loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)


@pytest.mark.parametrize("chunk", [None, 10])
def test_jax_never_holds_all_logits_when_they_are_chunked(chunk: int | None) -> None:
    import jax

    config = recipe(execution={"vocab_chunk": chunk})
    with backends.make("jax", config) as backend:
        batch = random_batch(config)
        state, rows = backend.create_state(), backend.place(batch)
        program = jax.make_jaxpr(backend.gradients)(state.parameters, rows)
    all_logits = batch.tokens.size * LLAMA["vocab_size"]
    assert (all_logits in set(sizes(program.jaxpr))) is (chunk is None)


def sizes(jaxpr: Any) -> Any:
    """Elements of every value that a traced program computes."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield getattr(variable.aval, "size", 0)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


@pytest.mark.parametrize("chunk", [None, 10])
def test_torch_never_holds_all_logits_when_they_are_chunked(chunk: int | None) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found = set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found.update(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    config = recipe(execution={"vocab_chunk": chunk})
    with backends.make("torch", config) as backend:
        batch = random_batch(config)
        state, rows = backend.create_state(), backend.place(batch)
        with Sizes():
            backend.gradients(state.model, rows)
    assert (batch.tokens.size * LLAMA["vocab_size"] in found) is (chunk is None)


@BOTH
def test_logits_may_come_out_wider_than_what_they_are_made_of(name: str) -> None:
    """With float32 logits the head's sums are not rounded: no element is a bfloat16."""
    shares = {}
    for logits in ("bfloat16", "float32"):
        config = recipe(precision={"preset": "bfloat16", "logits": logits})
        with backends.make(name, config) as backend:
            state = backend.create_state()
            values = dict(backend.trace(state, random_batch(config)))["forward.logits"].astype(np.float32)
        shares[logits] = np.mean(values.view(np.uint32) & 0xFFFF == 0)
    assert shares["bfloat16"] == 1.0 and shares["float32"] < 0.05
