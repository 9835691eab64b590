"""GPT-2's parameters as Hugging Face's ``GPT2LMHeadModel`` names and lays them out.

Its linear layers are ``Conv1D``: kernels are [in, out], and query, key and value are one matrix. Residual projections
are drawn with std / sqrt(2 * layers) (Radford et al. 2019, section 2.3).
"""

from __future__ import annotations

import math

from shared.config.schema import GPT2
from shared.models.spec import ModelSpec, Parameter, Piece


def gpt2(config: GPT2) -> ModelSpec:
    """The spec of a GPT-2 of that size."""
    hidden, std = config.hidden_size, config.initializer_range
    residual_std = std / math.sqrt(2 * config.num_hidden_layers)
    parameters: list[Parameter] = []

    def linear(name: str, inputs: int, slots: dict[str, int], layer: int, kernel_std: float = std) -> None:
        size = sum(slots.values())
        for kind, shape, axis in (("weight", (inputs, size), 1), ("bias", (size,), 0)):
            pieces, start = [], 0
            for slot, width in slots.items():
                pieces.append(Piece(f"{slot}.{'kernel' if axis else 'bias'}", layer, start, width))
                start += width
            drawn = kernel_std if axis else None
            parameters.append(Parameter(f"{name}.{kind}", shape, drawn, 0.0, tuple(pieces), axis))

    def norm(name: str, slot: str, layer: int | None = None) -> None:
        for kind, part, value in (("weight", "scale", 1.0), ("bias", "bias", 0.0)):
            piece = Piece(f"{slot}.{part}", layer, 0, hidden)
            parameters.append(Parameter(f"{name}.{kind}", (hidden,), None, value, (piece,), 0))

    def table(name: str, rows: int, slot: str) -> None:
        parameters.append(Parameter(name, (rows, hidden), std, 0.0, (Piece(slot, None, 0, rows),), 0))

    table("transformer.wte.weight", config.vocab_size, "embedding.tokens")
    table("transformer.wpe.weight", config.max_position_embeddings, "embedding.positions")
    for layer in range(config.num_hidden_layers):
        prefix = f"transformer.h.{layer}"
        norm(f"{prefix}.ln_1", "layers.attention_norm", layer)
        qkv = {f"layers.attention.{short}": hidden for short in "qkv"}
        linear(f"{prefix}.attn.c_attn", hidden, qkv, layer)
        linear(f"{prefix}.attn.c_proj", hidden, {"layers.attention.out": hidden}, layer, residual_std)
        norm(f"{prefix}.ln_2", "layers.mlp_norm", layer)
        linear(f"{prefix}.mlp.c_fc", hidden, {"layers.mlp.up": config.intermediate_size}, layer)
        linear(f"{prefix}.mlp.c_proj", config.intermediate_size, {"layers.mlp.down": hidden}, layer, residual_std)
    norm("transformer.ln_f", "final_norm")

    return ModelSpec(
        family="gpt2",
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=hidden // config.num_attention_heads,
        norm="layernorm",
        norm_eps=config.layer_norm_epsilon,
        norm_offset=0.0,
        qk_norm=False,
        embedding_scale=1.0,
        rope_theta=None,
        rope_scaling=None,
        max_positions=config.max_position_embeddings,
        activation="gelu_tanh" if config.activation_function == "gelu_new" else "gelu_erf",
        gated=False,
        biases=True,
        tied=True,
        dropout=config.dropout,
        parameters=tuple(parameters),
    )
