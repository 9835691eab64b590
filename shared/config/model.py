"""The ``model`` section: the architecture."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from shared.config.section import Fraction, PositiveInt, Section


class Decoder(Section):
    """What the two families of decoder-only transformers have in common; names are Hugging Face's."""

    vocab_size: PositiveInt
    """Rows of the embedding table; at least the tokenizer's vocabulary."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width inside the feed-forward block."""
    num_hidden_layers: PositiveInt
    """Number of transformer blocks."""
    num_attention_heads: PositiveInt
    """Number of query heads."""
    dropout: Fraction = 0.0
    """Share of elements that training sets to zero in the embedding's output and in what each attention and
    feed-forward layer adds to the residual stream; the others are divided by 1 - dropout."""
    initializer_range: PositiveFloat
    """Standard deviation of the initial weights (of the result, not of a distribution truncated afterwards)."""


class Llama(Decoder):
    """Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    family: Literal["llama"]
    """Model family."""
    num_key_value_heads: PositiveInt
    """Number of key and value heads; divides ``num_attention_heads``."""
    head_dim: PositiveInt | None = None
    """Width of one head; even. Default: hidden_size / num_attention_heads."""
    rms_norm_eps: PositiveFloat
    """Epsilon inside the square root of RMSNorm."""
    rope_theta: PositiveFloat
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool
    """Whether the output head is the embedding table itself."""

    @model_validator(mode="after")
    def _heads(self) -> Llama:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size}), "
                "or head_dim must be given"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            name = "head_dim" if self.head_dim else "hidden_size / num_attention_heads"
            raise ValueError(f"{name} ({head_dim}) must be even: rotary positions turn pairs of elements")
        return self


class GPT2(Decoder):
    """GPT-2: LayerNorm, learned positions, GELU, biases, tied output head."""

    family: Literal["gpt2"]
    """Model family."""
    max_position_embeddings: PositiveInt
    """Rows of the learned position table; at least ``batch.sequence_length``."""
    layer_norm_epsilon: PositiveFloat
    """Epsilon inside the square root of LayerNorm."""
    activation_function: Literal["gelu_new", "gelu"]
    """``gelu_new`` is the tanh form (GPT-2's own), ``gelu`` the exact one with erf."""

    @model_validator(mode="after")
    def _heads(self) -> GPT2:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size})"
            )
        return self


Model = Annotated[Llama | GPT2, Field(discriminator="family")]
