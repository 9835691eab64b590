"""Llama's parameters as Hugging Face's ``LlamaForCausalLM`` names and lays them out, and those of its descendants.

Architecture: Touvron et al. 2023 (arXiv:2302.13971); grouped-query attention: Ainslie et al. 2023 (arXiv:2305.13245).
Qwen3: Qwen Team 2025 (arXiv:2505.09388). Gemma: Gemma Team 2024 (arXiv:2403.08295).
"""

from __future__ import annotations

import math

from shared.config.schema import Gemma, Llama, Qwen3, RotaryDecoder
from shared.models.spec import ModelSpec, Parameter, Piece


def llama(config: RotaryDecoder) -> ModelSpec:
    """The spec of a Llama, Qwen3 or Gemma of that size."""
    head_dim = config.width_of_head
    hidden, std = config.hidden_size, config.initializer_range
    query_size, key_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    gemma, qk_norm = isinstance(config, Gemma), isinstance(config, Qwen3)
    norm_offset = 1.0 if gemma else 0.0
    parameters: list[Parameter] = []

    def matrix(name: str, rows: int, columns: int, slot: str, layer: int | None = None) -> None:
        parameters.append(Parameter(name, (rows, columns), std, 0.0, (Piece(slot, layer, 0, rows),), 0))

    def scale(name: str, slot: str, layer: int | None = None, size: int = hidden) -> None:
        parameters.append(Parameter(name, (size,), None, 1.0 - norm_offset, (Piece(slot, layer, 0, size),), 0))

    matrix("model.embed_tokens.weight", config.vocab_size, hidden, "embedding.tokens")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        scale(f"{prefix}.input_layernorm.weight", "layers.attention_norm.scale", layer)
        for short, size in (("q", query_size), ("k", key_size), ("v", key_size)):
            matrix(f"{prefix}.self_attn.{short}_proj.weight", size, hidden, f"layers.attention.{short}.kernel", layer)
        for short in "qk" if qk_norm else "":
            scale(f"{prefix}.self_attn.{short}_norm.weight", f"layers.attention.{short}_norm.scale", layer, head_dim)
        matrix(f"{prefix}.self_attn.o_proj.weight", hidden, query_size, "layers.attention.out.kernel", layer)
        scale(f"{prefix}.post_attention_layernorm.weight", "layers.mlp_norm.scale", layer)
        for short in ("gate", "up"):
            name = f"{prefix}.mlp.{short}_proj.weight"
            matrix(name, config.intermediate_size, hidden, f"layers.mlp.{short}.kernel", layer)
        matrix(f"{prefix}.mlp.down_proj.weight", hidden, config.intermediate_size, "layers.mlp.down.kernel", layer)
    scale("model.norm.weight", "final_norm.scale")
    if not config.tie_word_embeddings:
        matrix("lm_head.weight", config.vocab_size, hidden, "head.kernel")

    return ModelSpec(
        family=type(config).__name__.lower(),
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm="rmsnorm",
        norm_eps=config.rms_norm_eps,
        norm_offset=norm_offset,
        qk_norm=qk_norm,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling if isinstance(config, Llama) else None,
        max_positions=None,
        activation="gelu_tanh" if gemma else "silu",
        gated=True,
        biases=False,
        tied=config.tie_word_embeddings,
        dropout=config.dropout,
        parameters=tuple(parameters),
    )
