"""Llama's parameters as Hugging Face's ``LlamaForCausalLM`` names and lays them out.

Architecture: Touvron et al. 2023 (arXiv:2302.13971); grouped-query attention: Ainslie et al. 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

from shared.config.schema import Llama
from shared.models.spec import ModelSpec, Parameter, Piece


def llama(config: Llama) -> ModelSpec:
    """The spec of a Llama of that size."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    hidden, std = config.hidden_size, config.initializer_range
    query_size, key_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    parameters: list[Parameter] = []

    def matrix(name: str, rows: int, columns: int, slot: str, layer: int | None = None) -> None:
        parameters.append(Parameter(name, (rows, columns), std, 0.0, (Piece(slot, layer, 0, rows),), 0))

    def scale(name: str, slot: str, layer: int | None = None) -> None:
        parameters.append(Parameter(name, (hidden,), None, 1.0, (Piece(slot, layer, 0, hidden),), 0))

    matrix("model.embed_tokens.weight", config.vocab_size, hidden, "embedding.tokens")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        scale(f"{prefix}.input_layernorm.weight", "layers.attention_norm.scale", layer)
        for short, size in (("q", query_size), ("k", key_size), ("v", key_size)):
            matrix(f"{prefix}.self_attn.{short}_proj.weight", size, hidden, f"layers.attention.{short}.kernel", layer)
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
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm="rmsnorm",
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        max_positions=None,
        activation="silu_gated",
        biases=False,
        tied=config.tie_word_embeddings,
        dropout=config.dropout,
        parameters=tuple(parameters),
    )
