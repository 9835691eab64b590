"""A decoder with a cache of keys and values in JAX: one compiled program for the prompt, one for a token."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.attention import attention_where
from jaxtrain.backend import JaxBackend
from jaxtrain.models.transformer import Rotation, Transformer
from jaxtrain.precision import matmul_precision
from jaxtrain.weights import import_slots
from shared.backend import StateSource
from shared.config.schema import Config


class Cache(NamedTuple):
    """Keys and values of every layer, [L, 1, S, K, D] each, turned to their positions."""

    keys: jax.Array
    values: jax.Array


def extend(model: Transformer, tokens_BT: jax.Array, start: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """(logits of the token after the last, [V]; the cache with these tokens). ``start``: tokens that came before."""
    S = cache.keys.shape[2]
    positions_BT = start + jnp.arange(tokens_BT.shape[1])[None]
    visible_BTS = jnp.arange(S) <= positions_BT[..., None]
    islands = model.run.dtypes.islands
    rotation = Rotation.of(model.spec, S, positions_BT, islands)
    graph, weights = nnx.split(model.layers)

    def one_layer(x_BTC: jax.Array, layer: tuple[nnx.State, Cache]) -> tuple[jax.Array, Cache]:
        weights, before = layer
        after = before

        def attend(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array) -> jax.Array:
            nonlocal after
            write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
            after = Cache(write(before.keys, k_BTKD), write(before.values, v_BTKD))
            return attention_where(visible_BTS, q_BTHD, after.keys, after.values, islands)

        return nnx.merge(graph, weights)(x_BTC, rotation, attend), after

    x_BTC = model.embedding(tokens_BT, positions_BT)
    x_BTC, cache = jax.lax.scan(one_layer, x_BTC, (weights, cache))
    return model.logits(model.final_norm(x_BTC)[:, -1:])[0, 0], cache


class CachedDecoder:
    """See :class:`shared.backend.Decoder`."""

    def __init__(self, config: Config, source: StateSource, role: str, length: int):
        backend = JaxBackend(config)
        spec, dtypes = backend.spec, backend.dtypes
        self._parameters = import_slots(spec, functools.partial(source.read, role), dtypes.parameters)
        empty = jnp.zeros((spec.num_layers, 1, length, spec.num_kv_heads, spec.head_dim), dtypes.compute)
        self._cache, self._start = Cache(empty, jnp.copy(empty)), 0

        def step(
            parameters: dict[str, jax.Array], tokens_BT: jax.Array, start: jax.Array, cache: Cache
        ) -> tuple[jax.Array, Cache]:
            with matmul_precision(backend.policy):
                return extend(backend.architecture.bind(parameters), tokens_BT, start, cache)

        self._step = jax.jit(step, donate_argnums=3)

    def extend(self, tokens: np.ndarray) -> np.ndarray:
        tokens_BT = np.asarray(tokens, np.int32)[None]
        logits_V, self._cache = self._step(self._parameters, tokens_BT, np.int32(self._start), self._cache)
        self._start += len(tokens)
        return np.asarray(logits_V).astype(np.float64)
