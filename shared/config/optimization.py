"""The ``optimizer``, ``schedule``, ``batch`` and ``precision`` sections: what an update is."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, WithJsonSchema, model_validator

from shared.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class Optimizer(Section):
    """What every optimiser has."""

    weight_decay: NonNegativeFloat
    """Decay of parameters with two or more dimensions; vectors (norms, biases) are never decayed."""
    clip_norm: PositiveFloat | None
    """Largest global gradient norm, or null for no clipping."""
    ema_decay: Fraction | None = None
    """Decay of an exponential moving average of the parameters, kept beside them; null for none."""


class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019): decay is decoupled and multiplied by the scheduled learning rate."""

    name: Literal["adamw"]
    """Optimiser name."""
    beta1: Fraction
    """Decay of the first moment."""
    beta2: Fraction
    """Decay of the second moment."""
    eps: PositiveFloat
    """Added to the square root of the bias-corrected second moment."""


class SGD(Optimizer):
    """Stochastic gradient descent; decay is added to the gradient (L2), before the momentum."""

    name: Literal["sgd"]
    """Optimiser name."""
    momentum: Fraction
    """Momentum; 0 for none. The buffer is buf = momentum * buf + gradient, without dampening."""
    nesterov: bool = False
    """Nesterov's form: the step is gradient + momentum * buf."""

    @model_validator(mode="after")
    def _nesterov(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


AnyOptimizer = Annotated[AdamW | SGD, Field(discriminator="name")]


class Schedule(Section):
    """The learning rate of every update, as one table computed once; see :mod:`shared.schedule`."""

    steps: Annotated[int, Field(gt=0, le=100_000_000)]
    """Number of training steps (global batches)."""
    learning_rate: PositiveFloat
    """The peak."""
    warmup_steps: NonNegativeInt
    """Steps of linear warm-up; update k of the warm-up uses (k + 1) / warmup_steps of the peak."""

    @model_validator(mode="after")
    def _warmup(self) -> Schedule:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        return self


class ConstantSchedule(Schedule):
    """Constant after the warm-up."""

    name: Literal["constant"]
    """Schedule name."""


class CosineSchedule(Schedule):
    """Half a cosine from the peak to the final rate (Loshchilov & Hutter 2017)."""

    name: Literal["cosine"]
    """Schedule name."""
    final_learning_rate: NonNegativeFloat
    """The rate at the end."""


class WSDSchedule(Schedule):
    """Warm-up, stable, decay (Hu et al. 2024): constant, then linear to the final rate."""

    name: Literal["wsd"]
    """Schedule name."""
    decay_steps: NonNegativeInt
    """Steps of the linear decay at the end."""
    final_learning_rate: NonNegativeFloat
    """The rate at the end."""

    @model_validator(mode="after")
    def _decay(self) -> WSDSchedule:
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) together must not exceed "
                f"steps ({self.steps})"
            )
        return self


AnySchedule = Annotated[ConstantSchedule | CosineSchedule | WSDSchedule, Field(discriminator="name")]


class Batch(Section):
    """The global batch: what one optimiser update sees."""

    global_batch: Annotated[
        PositiveInt, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})
    ]
    """Sequences in one update, over all devices and microbatches; or tokens, as ``65536 tokens``."""
    sequence_length: PositiveInt
    """Tokens in one sequence."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_to_sequences(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(length := value.get("sequence_length"), int) or length < 1:
            return value
        found = re.fullmatch(r"([0-9]+) ?tokens", str(value.get("global_batch")))
        if found is None:
            return value
        sequences, rest = divmod(int(found[1]), length)
        if rest or not sequences:
            nearest = max(1, round(int(found[1]) / length)) * length
            raise ValueError(
                f"global_batch ({found[1]} tokens) must be a multiple of sequence_length ({length}); nearest valid: "
                f"{nearest} tokens"
            )
        return value | {"global_batch": sequences}
