"""The decoder-only transformer in flax NNX, for every family that :class:`shared.models.spec.ModelSpec` describes.

The path of each parameter in the module is the name of its slot. Parameters of the blocks are stacked over a leading
layer axis, so one block can be compiled once and scanned over.

Shapes: B rows, T positions, C hidden size, H heads, K key/value heads, D head size, F intermediate size, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.attention import Attend, Attention, mixed_product
from jaxtrain.dropout import Dropout, layer_keys
from jaxtrain.precision import Dtypes
from jaxtrain.remat import rematerialized
from jaxtrain.tensors import named, record
from jaxtrain.weights import slot_shapes
from shared.models.rope import rope_table
from shared.models.spec import ModelSpec
from shared.policies.dropout import EMBEDDING, IN_BLOCKS, dropout_key
from shared.policies.remat import GROUPS, RematPolicy
from shared.recording import scope


@dataclass(frozen=True)
class Execution:
    """How the transformer runs: only the formats and the seed change a number."""

    dtypes: Dtypes
    attention: Attention
    remat: RematPolicy
    scan_layers: bool
    seed: int
    """Of dropout."""


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016), two passes, in the islands' dtype."""

    def __init__(self, spec: ModelSpec, run: Execution, size: int, layers: tuple[int, ...] = ()):
        self.spec, self.run = spec, run
        self.scale = nnx.Param(jnp.ones((*layers, size), run.dtypes.parameters))
        if spec.norm == "layernorm":
            self.bias = nnx.Param(jnp.zeros((*layers, size), run.dtypes.parameters))

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        dtype = self.run.dtypes.islands
        y_BTC = x_BTC.astype(dtype)
        if self.spec.norm == "layernorm":
            y_BTC = y_BTC - jnp.mean(y_BTC, axis=-1, keepdims=True)
        y_BTC = y_BTC * jax.lax.rsqrt(jnp.mean(jnp.square(y_BTC), axis=-1, keepdims=True) + self.spec.norm_eps)
        scale = self.scale[...].astype(dtype)
        y_BTC = y_BTC * (scale + self.spec.norm_offset if self.spec.norm_offset else scale)
        if self.spec.norm == "layernorm":
            y_BTC = y_BTC + self.bias[...].astype(dtype)
        return y_BTC.astype(self.run.dtypes.compute)


class Linear(nnx.Module):
    """x kernel + bias, in the compute dtype."""

    def __init__(self, inputs: int, outputs: int, bias: bool, run: Execution, layers: tuple[int, ...] = ()):
        self.run, self.has_bias = run, bias
        self.kernel = nnx.Param(jnp.zeros((*layers, inputs, outputs), run.dtypes.parameters))
        if bias:
            self.bias = nnx.Param(jnp.zeros((*layers, outputs), run.dtypes.parameters))

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.run.dtypes.compute
        y = x @ self.kernel[...].astype(dtype)
        return y + self.bias[...].astype(dtype) if self.has_bias else y


def side_by_side(x: jax.Array, linears: Sequence[Linear], group: Sequence[str]) -> list[jax.Array]:
    """What several linear layers make of one input, as one matrix product: fewer passes over the activations, which
    takes a fifth off a CPU's time. The weights stay apart, so names and sharding know nothing of it.

    Where remat keeps a part of the group, the products are apart, so that only the others run again."""
    dtype, run = x.dtype, linears[0].run
    if not run.remat.fuses(group):
        return [linear(x) for linear in linears]
    widths = [linear.kernel.shape[-1] for linear in linears]
    y = x @ jnp.concatenate([linear.kernel[...].astype(run.dtypes.compute) for linear in linears], axis=-1)
    if linears[0].has_bias:
        y = y + jnp.concatenate([linear.bias[...].astype(dtype) for linear in linears])
    return jnp.split(y, list(itertools.accumulate(widths))[:-1], axis=-1)


class SelfAttention(nnx.Module):
    """Causal self-attention with grouped queries and, where the family has them, rotary positions."""

    def __init__(self, spec: ModelSpec, run: Execution, layers: tuple[int, ...]):
        self.spec, self.run = spec, run
        query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = Linear(spec.hidden_size, query_size, spec.biases, run, layers)
        self.k = Linear(spec.hidden_size, key_size, spec.biases, run, layers)
        self.v = Linear(spec.hidden_size, key_size, spec.biases, run, layers)
        self.out = Linear(query_size, spec.hidden_size, spec.biases, run, layers)
        if spec.qk_norm:
            self.q_norm = Norm(spec, run, spec.head_dim, layers)
            self.k_norm = Norm(spec, run, spec.head_dim, layers)

    def __call__(self, x_BTC: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        B, T, _ = x_BTC.shape
        q_BTHD, k_BTKD, v_BTKD = (
            named(name, x).reshape(B, T, -1, self.spec.head_dim)
            for name, x in zip("qkv", side_by_side(x_BTC, (self.q, self.k, self.v), GROUPS[0]), strict=True)
        )
        if self.spec.qk_norm:
            q_BTHD, k_BTKD = record("q_norm", self.q_norm(q_BTHD)), record("k_norm", self.k_norm(k_BTKD))
        if rotation is not None:
            q_BTHD, k_BTKD = rotation(q_BTHD), rotation(k_BTKD)
        context_BTHD = record("context", attend(q_BTHD, k_BTKD, v_BTKD))
        return named("out", self.out(context_BTHD.reshape(B, T, -1)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
}


class FeedForward(nnx.Module):
    """SwiGLU or GeGLU (Shazeer 2020), or GELU by name (Hendrycks & Gimpel 2016)."""

    def __init__(self, spec: ModelSpec, run: Execution, layers: tuple[int, ...]):
        self.gated, self.activate = spec.gated, ACTIVATIONS[spec.activation]
        if spec.gated:
            self.gate = Linear(spec.hidden_size, spec.intermediate_size, spec.biases, run, layers)
        self.up = Linear(spec.hidden_size, spec.intermediate_size, spec.biases, run, layers)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, spec.biases, run, layers)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        if self.gated:
            gate_BTF, up_BTF = side_by_side(x_BTC, (self.gate, self.up), GROUPS[1])
            inner_BTF = self.activate(named("gate", gate_BTF)) * named("up", up_BTF)
        else:
            inner_BTF = self.activate(named("up", self.up(x_BTC)))
        return named("down", self.down(inner_BTF))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, run: Execution, layers: tuple[int, ...]):
        self.attention_norm = Norm(spec, run, spec.hidden_size, layers)
        self.attention = SelfAttention(spec, run, layers)
        self.mlp_norm = Norm(spec, run, spec.hidden_size, layers)
        self.mlp = FeedForward(spec, run, layers)

    def __call__(
        self,
        x_BTC: jax.Array,
        rotation: Rotation | None,
        attend: Attend,
        dropout: Dropout | None = None,
        keys: dict[str, jax.Array] | None = None,
    ) -> jax.Array:
        y_BTC = record("attention_norm", self.attention_norm(x_BTC))
        y_BTC = self.attention(y_BTC, rotation, attend)
        x_BTC = x_BTC + (y_BTC if dropout is None or keys is None else dropout(y_BTC, keys["out"]))
        y_BTC = record("mlp_norm", self.mlp_norm(x_BTC))
        y_BTC = self.mlp(y_BTC)
        return x_BTC + (y_BTC if dropout is None or keys is None else dropout(y_BTC, keys["down"]))


class Embedding(nnx.Module):
    """Token table and, where the family has them, learned positions."""

    def __init__(self, spec: ModelSpec, run: Execution):
        self.run, self.scale, self.learned = run, spec.embedding_scale, spec.max_positions is not None
        self.tokens = nnx.Param(jnp.zeros((spec.vocab_size, spec.hidden_size), run.dtypes.parameters))
        if spec.max_positions is not None:
            self.positions = nnx.Param(jnp.zeros((spec.max_positions, spec.hidden_size), run.dtypes.parameters))

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        x_BTC = self.tokens[...][tokens_BT]
        if self.scale != 1.0:
            x_BTC = x_BTC * self.scale
        if self.learned:
            table = self.positions[...]
            x_BTC = x_BTC + (table[: tokens_BT.shape[1]] if positions_BT is None else table[positions_BT])
        return x_BTC.astype(self.run.dtypes.compute)


@jax.tree_util.register_pytree_node_class
class Rotation:
    """Rotary positions of one batch, ready to turn queries and keys; see :mod:`shared.models.rope`."""

    def __init__(self, cos_BTD: jax.Array, sin_BTD: jax.Array):
        self.cos_BTD, self.sin_BTD = cos_BTD, sin_BTD

    @classmethod
    def of(cls, spec: ModelSpec, length: int, positions_BT: jax.Array | None, dtype: Any) -> Rotation | None:
        """The rotation for a batch of that length; None for a family without rotary positions."""
        if spec.rope_theta is None:
            return None
        tables = rope_table(length, spec.head_dim, spec.rope_theta, spec.rope_scaling)
        cos, sin = (jnp.asarray(table, dtype) for table in tables)
        if positions_BT is None:
            return cls(cos[None], sin[None])
        return cls(cos[positions_BT], sin[positions_BT])

    def __call__(self, x_BTHD: jax.Array) -> jax.Array:
        first, second = jnp.split(x_BTHD.astype(self.cos_BTD.dtype), 2, axis=-1)
        cos, sin = self.cos_BTD[:, :, None], self.sin_BTD[:, :, None]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHD.dtype)

    def tree_flatten(self) -> tuple[tuple[jax.Array, jax.Array], None]:
        return (self.cos_BTD, self.sin_BTD), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array, jax.Array]) -> Rotation:
        return cls(*children)


class Transformer(nnx.Module):
    """Tokens to logits."""

    def __init__(self, spec: ModelSpec, run: Execution):
        self.spec, self.run = spec, run
        self.embedding = Embedding(spec, run)
        self.layers = Block(spec, run, (spec.num_layers,))
        self.final_norm = Norm(spec, run, spec.hidden_size)
        if not spec.tied:
            self.head = Linear(spec.hidden_size, spec.vocab_size, False, run)

    def __call__(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Logits [B, T, V]."""
        return record("logits", self.logits(self.hidden(tokens_BT, segments_BT, positions_BT, dropout)))

    def hidden(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """What the output head reads, [B, T, C] in the compute dtype."""
        x_BTC = self.embedding(tokens_BT, positions_BT)
        if dropout is not None:
            x_BTC = dropout(x_BTC, dropout_key(self.run.seed, EMBEDDING))
        x_BTC = record("embedding", x_BTC)
        rotation = Rotation.of(self.spec, tokens_BT.shape[1], positions_BT, self.run.dtypes.islands)
        return record("final_norm", self.final_norm(self._blocks(x_BTC, rotation, segments_BT, dropout)))

    def logits(self, x_BTC: jax.Array) -> jax.Array:
        """Logits [B, T, V], from operands in the compute dtype."""
        head_VC = self.head_matrix().astype(x_BTC.dtype)
        if self.run.dtypes.logits != x_BTC.dtype:
            return mixed_product("btc,vc->btv", x_BTC, head_VC, self.run.dtypes.logits)
        return jnp.einsum("btc,vc->btv", x_BTC, head_VC) if self.spec.tied else self.head(x_BTC)

    def head_matrix(self) -> jax.Array:
        """The output head, [V, C]: the table of the embedding where the family ties them."""
        return self.embedding.tokens[...] if self.spec.tied else self.head.kernel[...].T

    def _blocks(
        self, x_BTC: jax.Array, rotation: Rotation | None, segments_BT: jax.Array | None, dropout: Dropout | None
    ) -> jax.Array:
        graph, weights = nnx.split(self.layers)
        keys = None if dropout is None else layer_keys(self.run.seed, IN_BLOCKS, self.spec.num_layers)
        stacked = weights, keys

        def attend(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array) -> jax.Array:
            return self.run.attention(q_BTHD, k_BTKD, v_BTKD, segments_BT)

        def apply(x_BTC: jax.Array, one_layer: Any) -> jax.Array:
            weights, keys = one_layer
            return nnx.merge(graph, weights)(x_BTC, rotation, attend, dropout, keys)

        def several(x_BTC: jax.Array, layers: Any, first: int, count: int, in_scan: bool) -> jax.Array:
            for layer, one_layer in enumerate(_unstack(layers, count), start=first):
                recomputed = self.run.remat.recomputes(layer)
                one = rematerialized(apply, self.run.remat, in_scan) if recomputed else apply
                with scope(f"layers.{layer}"):
                    x_BTC = record("output", one(x_BTC, one_layer))
            return x_BTC

        scanned, period = 0, self.run.remat.every or 1
        if self.run.scan_layers:
            # One turn of the loop is one period of the remat policy; what does not fill one comes after the loop.
            turns = self.spec.num_layers // period
            scanned = turns * period
            groups = jax.tree.map(lambda x: x[:scanned].reshape(turns, period, *x.shape[1:]), stacked)
            x_BTC, _ = jax.lax.scan(lambda x, group: (several(x, group, 0, period, True), None), x_BTC, groups)
            if scanned == self.spec.num_layers:
                return x_BTC
        rest = jax.tree.map(lambda x: x[scanned:], stacked) if scanned else stacked
        return several(x_BTC, rest, scanned, self.spec.num_layers - scanned, False)


def _unstack(stacked: Any, count: int) -> list[Any]:
    """The layers one by one. A split, because its gradient is one concatenation; that of indexing is a sum of
    ``count`` arrays that are zero everywhere else."""
    leaves, structure = jax.tree.flatten(stacked)
    parts = [[part[0] for part in jnp.split(leaf, count)] for leaf in leaves]
    return [jax.tree.unflatten(structure, layer) for layer in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Architecture:
    """A transformer without its numbers, to be bound to a dict of slots."""

    graph: Any
    variables: dict[str, Any]

    @classmethod
    def of(cls, spec: ModelSpec, run: Execution) -> Architecture:
        graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(spec, run)))
        variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
        shapes = {slot: variable.shape for slot, variable in variables.items()}
        assert shapes == slot_shapes(spec), f"the module's parameters are not the spec's slots: {shapes}"
        return cls(graph, variables)

    def bind(self, slots: dict[str, jax.Array]) -> Transformer:
        """The module whose parameters are these arrays."""
        flat = [(tuple(slot.split(".")), variable.replace(slots[slot])) for slot, variable in self.variables.items()]
        return nnx.merge(self.graph, nnx.from_flat_state(flat))
