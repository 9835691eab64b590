"""Nothing that a framework would choose for itself has a default."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from shared.config.schema import (
    GPT2,
    SGD,
    AdamW,
    Batch,
    Config,
    CosineSchedule,
    Gemma,
    Llama,
    Qwen3,
    RopeScaling,
    WSDSchedule,
)

# What may be left out, because leaving it out means "none", or has one answer that no framework gives.
OPTIONAL = {"head_dim", "rope_scaling", "ema_decay", "nesterov", "dropout"}


@pytest.mark.parametrize(
    "section", [Llama, Qwen3, Gemma, RopeScaling, GPT2, AdamW, SGD, CosineSchedule, WSDSchedule, Batch]
)
def test_every_hyperparameter_must_be_stated(section: type[BaseModel]) -> None:
    optional = {name for name, field in section.model_fields.items() if not field.is_required()}
    assert optional <= OPTIONAL


def test_the_sections_that_decide_numbers_must_be_there() -> None:
    required = {name for name, field in Config.model_fields.items() if field.is_required()}
    assert required == {"seed", "model", "data", "optimizer", "schedule", "batch", "precision"}
