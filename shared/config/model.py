"""The ``model`` section: the architecture."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from shared.config.section import Fraction, PositiveInt, Section


class Decoder(Section):
    """What the families of decoder-only transformers have in common; names are Hugging Face's."""

    family: str
    """Model family."""
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


class RotaryDecoder(Decoder):
    """RMSNorm, rotary positions, grouped-query attention, a gated feed-forward block, no biases."""

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
    def _heads(self) -> RotaryDecoder:
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
        if self.width_of_head % 2:
            name = "head_dim" if self.head_dim else "hidden_size / num_attention_heads"
            raise ValueError(f"{name} ({self.width_of_head}) must be even: rotary positions turn pairs of elements")
        return self

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class RopeScaling(Section):
    """Slower rotation for positions beyond those of the first training; see :mod:`shared.models.rope`."""

    rope_type: Literal["llama3"]
    """The rule: that of Llama 3.1 and later."""
    factor: PositiveFloat
    """How much slower the slow frequencies turn."""
    low_freq_factor: PositiveFloat
    """Frequencies with fewer turns than this within the original length are slowed down by the whole factor."""
    high_freq_factor: PositiveFloat
    """Frequencies with more turns than this are left alone; above ``low_freq_factor``."""
    original_max_position_embeddings: PositiveInt
    """Length of the first training's sequences."""

    @model_validator(mode="after")
    def _between(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor:g}) must be above low_freq_factor ({self.low_freq_factor:g})"
            )
        return self


class Llama(RotaryDecoder):
    """Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    family: Literal["llama"]
    """Model family."""
    rope_scaling: RopeScaling | None = None
    """Llama 3's scaling of the rotary frequencies; null for none."""


class Qwen3(RotaryDecoder):
    """Qwen3: Llama, with an RMSNorm over each head's queries and keys."""

    family: Literal["qwen3"]
    """Model family."""


class Gemma(RotaryDecoder):
    """Gemma (the first): Llama, with a GELU gate, norms whose weights are differences from 1, and embeddings multiplied
    by the square root of ``hidden_size``."""

    family: Literal["gemma"]
    """Model family."""


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


Model = Annotated[Llama | Qwen3 | Gemma | GPT2, Field(discriminator="family")]
