"""Model architectures, stated once for both backends."""

from __future__ import annotations

from shared.config.schema import GPT2, RotaryDecoder
from shared.models.gpt2 import gpt2
from shared.models.llama import llama
from shared.models.spec import ModelSpec, Parameter, Piece

__all__ = ["ModelSpec", "Parameter", "Piece", "model_spec"]


def model_spec(config: RotaryDecoder | GPT2) -> ModelSpec:
    """The spec of the model that a config's ``model`` section describes."""
    return gpt2(config) if isinstance(config, GPT2) else llama(config)
