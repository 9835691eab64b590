"""What a decoder-only transformer is, before any framework builds it.

All families (:mod:`shared.models.llama`, :mod:`shared.models.gpt2`) are described by one :class:`ModelSpec`, so a
backend has one transformer that reads it, not one class a family. A family adds only its list of
:class:`Parameter`: the names and layouts under which Hugging Face knows the weights (*canonical*), how each is drawn,
and which *slots* of the backends' transformer its numbers fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.config.schema import RopeScaling

Activation = Literal["silu", "gelu_tanh", "gelu_erf"]


@dataclass(frozen=True)
class Piece:
    """The part of a canonical parameter that fills one slot.

    ``start`` and ``size`` select along the canonical parameter's output axis; parameters that fill one slot have one
    piece covering the whole axis.
    """

    slot: str
    layer: int | None
    start: int
    size: int


@dataclass(frozen=True)
class Parameter:
    """One parameter under its canonical (Hugging Face) name and layout."""

    name: str
    shape: tuple[int, ...]
    std: float | None
    """Standard deviation of its initial normal distribution, or None for a constant."""
    constant: float
    """Its initial value when ``std`` is None."""
    pieces: tuple[Piece, ...]
    output_axis: int
    """Axis of the output features: 0 for a linear layer's [out, in], 1 for GPT-2's Conv1D [in, out]; 0 for vectors
    and embedding tables."""

    @property
    def is_kernel(self) -> bool:
        """Whether it is the matrix of a linear layer, whose orientation a backend may turn."""
        return self.pieces[0].slot.endswith(".kernel")

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: matrices only, as in GPT-2 and Llama; never norms and biases."""
        return len(self.shape) >= 2


@dataclass(frozen=True)
class ModelSpec:
    """Every choice that decides what a decoder-only transformer computes."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    norm_offset: float
    """What is added to a norm's weight before it multiplies."""
    qk_norm: bool
    """Whether each head's queries and keys are normalised before they are turned."""
    embedding_scale: float
    """What the token embeddings are multiplied by."""
    rope_theta: float | None
    """Base of the rotary frequencies, or None for learned positions."""
    rope_scaling: RopeScaling | None
    max_positions: int | None
    """Rows of the learned position table, or None for rotary positions."""
    activation: Activation
    gated: bool
    """Whether the activated half of the feed-forward block multiplies another."""
    biases: bool
    tied: bool
    """Whether the output head is the embedding table."""
    dropout: float
    """Share of elements that training drops; see :mod:`shared.policies.dropout`."""
    parameters: tuple[Parameter, ...]

    @property
    def num_parameters(self) -> int:
        """Numbers in the model; a tied table counts once."""
        total = 0
        for parameter in self.parameters:
            size = 1
            for length in parameter.shape:
                size *= length
            total += size
        return total

    def parameter(self, name: str) -> Parameter:
        """The parameter of that canonical name; StopIteration if there is none."""
        return next(parameter for parameter in self.parameters if parameter.name == name)

    def slots(self) -> dict[str, tuple[int, ...]]:
        """The slots a backend must hold, with the shape of each *per layer*.

        Kernels are given as (in, out). Names: ``embedding.tokens``, ``embedding.positions``, ``layers.X`` for slots
        that exist once in each layer, ``final_norm.scale``, ``head.kernel``.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter in self.parameters:
            for piece in parameter.pieces:
                shape = list(parameter.shape)
                shape[parameter.output_axis] = piece.size
                if parameter.is_kernel and parameter.output_axis == 0:
                    shape.reverse()
                shapes[piece.slot] = tuple(shape)
        return shapes
