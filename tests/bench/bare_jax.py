"""A Llama training loop written by hand in JAX, as someone would who needs only this one model: the yardstick.

No config, no policies, no recording. It computes what ``configs/demo.yaml`` asks for: float32, AdamW, clipping, a
learning-rate table. ``scan`` and ``unroll`` are the two ways to run the layers.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shared.batch import Batch
from shared.config.schema import Config


def rms_norm(x: Any, scale: Any, eps: float) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def forward(params: Any, tokens: Any, m: Any, unroll: bool) -> Any:
    B, T = tokens.shape
    H, K = m.num_attention_heads, m.num_key_value_heads
    D = m.hidden_size // H
    angles = np.arange(T)[:, None] * m.rope_theta ** (-np.arange(0, D, 2) / D)
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[:, None] for f in (np.cos, np.sin))
    causal = jnp.tril(jnp.ones((T, T), bool))

    def block(x: Any, p: Any) -> tuple[Any, None]:
        h = rms_norm(x, p["norm1"], m.rms_norm_eps)
        q = rotate((h @ p["q"]).reshape(B, T, H, D), cos, sin).reshape(B, T, K, H // K, D)
        k = rotate((h @ p["k"]).reshape(B, T, K, D), cos, sin)
        v = (h @ p["v"]).reshape(B, T, K, D)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / math.sqrt(D)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
        x = x + jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(B, T, H * D) @ p["o"]
        h = rms_norm(x, p["norm2"], m.rms_norm_eps)
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    x = params["embedding"][tokens]
    if unroll:
        for layer in params["layers"]:
            x, _ = block(x, layer)
    else:
        x, _ = jax.lax.scan(block, x, params["layers"])
    return rms_norm(x, params["norm"], m.rms_norm_eps) @ params["embedding"].T


def initial(m: Any, unroll: bool) -> Any:
    rng = np.random.default_rng(0)
    C, F = m.hidden_size, m.intermediate_size
    KD = C // m.num_attention_heads * m.num_key_value_heads
    shapes = {"q": (C, C), "k": (C, KD), "v": (C, KD), "o": (C, C), "gate": (C, F), "up": (C, F), "down": (F, C)}

    def layer() -> dict[str, Any]:
        drawn = {k: (rng.standard_normal(s) * m.initializer_range).astype("f4") for k, s in shapes.items()}
        return drawn | {"norm1": np.ones(C, "f4"), "norm2": np.ones(C, "f4")}

    layers: Any = [layer() for _ in range(m.num_hidden_layers)]
    if not unroll:
        layers = jax.tree.map(lambda *x: np.stack(x), *layers)
    embedding = (rng.standard_normal((m.vocab_size, C)) * m.initializer_range).astype("f4")
    return jax.device_put({"embedding": embedding, "layers": layers, "norm": np.ones(C, "f4")})


class BareJax:
    """The loop, ready to be timed."""

    def __init__(self, config: Config, rates: np.ndarray, unroll: bool):
        o, m = config.optimizer, config.model
        assert o.name == "adamw" and m.family == "llama"
        transform = optax.chain(
            optax.clip_by_global_norm(o.clip_norm),
            optax.adamw(
                lambda step: jnp.asarray(rates, jnp.float32)[step],
                o.beta1,
                o.beta2,
                o.eps,
                weight_decay=o.weight_decay,
                mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
            ),
        )
        self.params = initial(m, unroll)
        self.state = transform.init(self.params)

        def loss(params: Any, tokens: Any, targets: Any) -> Any:
            logits = forward(params, tokens, m, unroll)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, tokens, targets)
            updates, state = transform.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        self.step = step

    def run(self, batches: list[Batch]) -> float:
        """Seconds for all batches but the first."""
        for index, batch in enumerate(batches):
            self.params, self.state, value = self.step(self.params, self.state, batch.tokens, batch.targets)
            if index == 0:
                jax.block_until_ready(value)
                start = time.perf_counter()
        jax.block_until_ready(value)
        return time.perf_counter() - start
