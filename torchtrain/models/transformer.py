"""The decoder-only transformer in PyTorch, for every family that :class:`shared.models.spec.ModelSpec` describes.

Modules carry the names of the slots; a kernel is a ``weight`` and turned to PyTorch's [out, in].

Shapes: B rows, T positions, C hidden size, H heads, K key/value heads, D head size, F intermediate size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shared.models.rope import rope_table
from shared.models.spec import ModelSpec
from shared.policies.dropout import EMBEDDING, IN_BLOCKS, dropout_key
from shared.policies.remat import RematPolicy
from shared.recording import scope
from torchtrain.attention import Attention, visibility
from torchtrain.dropout import Dropout, drop
from torchtrain.loss import chunked_cross_entropy_sum, head_product
from torchtrain.precision import Dtypes
from torchtrain.remat import rematerialized
from torchtrain.tensors import named, record


@dataclass(frozen=True)
class Execution:
    """How the transformer runs: only the formats and the seed change a number."""

    dtypes: Dtypes
    attention: Attention
    remat: RematPolicy
    compile: bool
    seed: int
    """Of dropout."""


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016), two passes, in the islands' dtype."""

    def __init__(self, spec: ModelSpec, run: Execution, size: int):
        super().__init__()
        self.eps, self.run, self.centred, self.offset = spec.norm_eps, run, spec.norm == "layernorm", spec.norm_offset
        self.scale = nn.Parameter(torch.ones(size, dtype=run.dtypes.parameters))
        if self.centred:
            self.bias = nn.Parameter(torch.zeros(size, dtype=run.dtypes.parameters))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        dtype, shape = self.run.dtypes.islands, x_BTC.shape[-1:]
        x_BTC, scale = x_BTC.to(dtype), self.scale.to(dtype)
        if self.offset:
            scale = scale + self.offset
        if self.centred:
            y_BTC = F.layer_norm(x_BTC, shape, scale, self.bias.to(dtype), self.eps)
        else:
            y_BTC = F.rms_norm(x_BTC, shape, scale, self.eps)
        return y_BTC.to(self.run.dtypes.compute)


class Linear(nn.Module):
    """weight x + bias, in the compute dtype."""

    def __init__(self, name: str, inputs: int, outputs: int, bias: bool, run: Execution):
        super().__init__()
        self.name, self.run = name, run
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=run.dtypes.parameters))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=run.dtypes.parameters)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.run.dtypes.compute
        bias = None if self.bias is None else self.bias.to(dtype)
        return record(self.name, named(self.name, F.linear, x, self.weight.to(dtype), bias))


class SelfAttention(nn.Module):
    """Causal self-attention with grouped queries and, where the family has them, rotary positions."""

    def __init__(self, spec: ModelSpec, run: Execution):
        super().__init__()
        self.spec, self.run = spec, run
        query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = Linear("q", spec.hidden_size, query_size, spec.biases, run)
        self.k = Linear("k", spec.hidden_size, key_size, spec.biases, run)
        self.v = Linear("v", spec.hidden_size, key_size, spec.biases, run)
        self.out = Linear("out", query_size, spec.hidden_size, spec.biases, run)
        if spec.qk_norm:
            self.q_norm = Norm(spec, run, spec.head_dim)
            self.k_norm = Norm(spec, run, spec.head_dim)

    def forward(self, x_BTC: torch.Tensor, rotation: Rotation | None, visible_BTT: torch.Tensor | None) -> torch.Tensor:
        B, T, _ = x_BTC.shape
        q_BTHD, k_BTKD, v_BTKD = (
            project(x_BTC).view(B, T, -1, self.spec.head_dim) for project in (self.q, self.k, self.v)
        )
        if self.spec.qk_norm:
            q_BTHD, k_BTKD = record("q_norm", self.q_norm(q_BTHD)), record("k_norm", self.k_norm(k_BTKD))
        if rotation is not None:
            q_BTHD, k_BTKD = rotate(q_BTHD, rotation), rotate(k_BTKD, rotation)
        context_BTHD = record("context", self.run.attention(q_BTHD, k_BTKD, v_BTKD, visible_BTT))
        return self.out(context_BTHD.reshape(B, T, -1))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
}


class FeedForward(nn.Module):
    """SwiGLU or GeGLU (Shazeer 2020), or GELU by name (Hendrycks & Gimpel 2016)."""

    def __init__(self, spec: ModelSpec, run: Execution):
        super().__init__()
        self.gate = None
        if spec.gated:
            self.gate = Linear("gate", spec.hidden_size, spec.intermediate_size, spec.biases, run)
        self.up = Linear("up", spec.hidden_size, spec.intermediate_size, spec.biases, run)
        self.down = Linear("down", spec.intermediate_size, spec.hidden_size, spec.biases, run)
        self.activate = ACTIVATIONS[spec.activation]

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            return self.down(self.activate(self.gate(x_BTC)) * self.up(x_BTC))
        return self.down(self.activate(self.up(x_BTC)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, run: Execution, layer: int):
        super().__init__()
        self.dropout_keys = {name: dropout_key(run.seed, name, layer) for name in IN_BLOCKS}
        self.attention_norm = Norm(spec, run, spec.hidden_size)
        self.attention = SelfAttention(spec, run)
        self.mlp_norm = Norm(spec, run, spec.hidden_size)
        self.mlp = FeedForward(spec, run)

    def forward(
        self,
        x_BTC: torch.Tensor,
        rotation: Rotation | None,
        visible_BTT: torch.Tensor | None,
        dropout: Dropout | None,
    ) -> torch.Tensor:
        y_BTC = record("attention_norm", self.attention_norm(x_BTC))
        x_BTC = x_BTC + drop(self.attention(y_BTC, rotation, visible_BTT), dropout, self.dropout_keys["out"])
        y_BTC = record("mlp_norm", self.mlp_norm(x_BTC))
        return x_BTC + drop(self.mlp(y_BTC), dropout, self.dropout_keys["down"])


class Embedding(nn.Module):
    """Token table and, where the family has them, learned positions."""

    def __init__(self, spec: ModelSpec, run: Execution):
        super().__init__()
        self.run, self.scale = run, spec.embedding_scale
        self.tokens = nn.Parameter(torch.zeros(spec.vocab_size, spec.hidden_size, dtype=run.dtypes.parameters))
        self.positions = None
        if spec.max_positions is not None:
            table = torch.zeros(spec.max_positions, spec.hidden_size, dtype=run.dtypes.parameters)
            self.positions = nn.Parameter(table)

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None) -> torch.Tensor:
        x_BTC = F.embedding(tokens_BT, self.tokens)
        if self.scale != 1.0:
            x_BTC = x_BTC * self.scale
        if self.positions is not None:
            T = tokens_BT.shape[1]
            x_BTC = x_BTC + (self.positions[:T] if positions_BT is None else F.embedding(positions_BT, self.positions))
        return x_BTC.to(self.run.dtypes.compute)


Rotation = tuple[torch.Tensor, torch.Tensor]
"""(cosines, sines), [B or 1, T, D / 2] each; see :mod:`shared.models.rope`."""


ChunkedLoss = tuple[torch.Tensor, torch.Tensor, int]
"""(targets_BT, mask_BT, vocabulary entries at once)."""


def rotate(x_BTHD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn each head's pairs of elements by their position's angles."""
    cos, sin = (table[:, :, None] for table in rotation)
    first, second = x_BTHD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHD.dtype)


class Transformer(nn.Module):
    """Tokens to logits."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, spec: ModelSpec, run: Execution, sequence_length: int):
        super().__init__()
        self.spec, self.run = spec, run
        self.embedding = Embedding(spec, run)
        self.layers = nn.ModuleList(Block(spec, run, layer) for layer in range(spec.num_layers))
        self.final_norm = Norm(spec, run, spec.hidden_size)
        self.head = None if spec.tied else Linear("logits", spec.hidden_size, spec.vocab_size, False, run)
        if spec.rope_theta is not None:
            tables = rope_table(sequence_length, spec.head_dim, spec.rope_theta, spec.rope_scaling)
            for name, table in zip(("cos", "sin"), tables, strict=True):
                self.register_buffer(name, torch.tensor(table, dtype=run.dtypes.islands), persistent=False)
        blocks = (torch.compile(block) if run.compile else block for block in self.layers)
        self._apply_blocks = [
            rematerialized(block, run.remat) if run.remat.recomputes(layer) else block
            for layer, block in enumerate(blocks)
        ]

    def forward(
        self,
        tokens_BT: torch.Tensor,
        segments_BT: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
        dropout: Dropout | None = None,
        chunked_loss: ChunkedLoss | None = None,
    ) -> torch.Tensor:
        """Logits [B, T, V], or the loss sum that needs no more than a chunk of them at a time.

        The loss is in here because a call with other weights, or one that several processes share, is a call of the
        module.
        """
        hidden_BTC = self.hidden(tokens_BT, segments_BT, positions_BT, dropout)
        if chunked_loss is not None:
            roles = self.run.dtypes.logits, self.run.dtypes.islands
            return chunked_cross_entropy_sum(hidden_BTC, self.head_matrix(), *chunked_loss, *roles)
        return record("logits", self.logits(hidden_BTC))

    def hidden(
        self,
        tokens_BT: torch.Tensor,
        segments_BT: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> torch.Tensor:
        """What the output head reads, [B, T, C] in the compute dtype."""
        x_BTC = self.embedding(tokens_BT, positions_BT)
        x_BTC = record("embedding", drop(x_BTC, dropout, dropout_key(self.run.seed, EMBEDDING)))
        rotation = self._rotation(tokens_BT.shape[1], positions_BT)
        visible_BTT = visibility(segments_BT)
        for layer, block in enumerate(self._apply_blocks):
            with scope(f"layers.{layer}"):
                x_BTC = record("output", block(x_BTC, rotation, visible_BTT, dropout))
        return record("final_norm", self.final_norm(x_BTC))

    def logits(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V], from operands in the compute dtype."""
        return head_product(x_BTC, self.head_matrix(), self.run.dtypes.logits)

    def head_matrix(self) -> torch.Tensor:
        """The output head, [V, C]: the table of the embedding where the family ties them."""
        return self.embedding.tokens if self.head is None else self.head.weight

    def _rotation(self, length: int, positions_BT: torch.Tensor | None) -> Rotation | None:
        if self.spec.rope_theta is None:
            return None
        if positions_BT is None:
            return self.cos[None, :length], self.sin[None, :length]
        return self.cos[positions_BT], self.sin[positions_BT]
