"""Model architectures, stated once for both backends."""

from __future__ import annotations

from shared.config.schema import GPT2, Llama
from shared.models.gpt2 import gpt2
from shared.models.llama import llama
from shared.models.spec import ModelSpec, Parameter, Piece

__all__ = ["ModelSpec", "Parameter", "Piece", "model_spec"]


def model_spec(config: Llama | GPT2) -> ModelSpec:
    """The spec of the model that a config's ``model`` section describes."""
    return llama(config) if isinstance(config, Llama) else gpt2(config)
