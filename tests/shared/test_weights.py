"""Canonical arrays survive the way into slots and back, in both backends' layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared import weights
from shared.initialization import initial_value
from shared.models import Piece, model_spec
from tests import backends
from tests.recipes import GPT2, LLAMA, MODELS, recipe

FAMILIES = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@FAMILIES
def test_slots_put_together_give_the_canonical_array(model: dict[str, Any]) -> None:
    spec = model_spec(recipe(model=model).model)
    slots: dict[Piece, np.ndarray] = {}
    for parameter in spec.parameters:
        for piece in parameter.pieces:
            slots[piece] = weights.part(parameter, initial_value(parameter, 0), piece)
            assert slots[piece].shape == spec.slots()[piece.slot]
    found = dict(weights.canonical_arrays(spec, slots.__getitem__))
    for parameter in spec.parameters:
        assert np.array_equal(found[parameter.name], initial_value(parameter, 0))


def test_gpt2_splits_c_attn_into_query_key_and_value_by_columns() -> None:
    spec = model_spec(recipe(model=GPT2).model)
    parameter = spec.parameter("transformer.h.1.attn.c_attn.weight")
    value = initial_value(parameter, 0)
    parts = [weights.part(parameter, value, piece) for piece in parameter.pieces]
    assert [piece.slot for piece in parameter.pieces] == [f"layers.attention.{x}.kernel" for x in "qkv"]
    for part, expected in zip(parts, np.split(value, 3, axis=1), strict=True):
        assert np.array_equal(part, expected)


@FAMILIES
@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_backend_exports_the_initial_weights_bit_for_bit(name: str, model: dict[str, Any]) -> None:
    config = recipe(model=model)
    with backends.make(name, config) as backend:
        exported = dict(backend.export_arrays(backend.create_state()))
    spec = model_spec(config.model)
    assert exported.keys() == {parameter.name for parameter in spec.parameters}
    for parameter in spec.parameters:
        assert np.array_equal(exported[parameter.name], initial_value(parameter, config.seed))


@FAMILIES
def test_the_number_of_parameters_counts_a_tied_table_once(model: dict[str, Any]) -> None:
    spec = model_spec(recipe(model=model).model)
    sizes = [np.prod(parameter.shape) for parameter in spec.parameters]
    assert spec.num_parameters == sum(sizes)
    untied = model_spec(recipe(model=LLAMA | {"tie_word_embeddings": False}).model)
    tied = model_spec(recipe(model=LLAMA | {"tie_word_embeddings": True}).model)
    assert untied.num_parameters - tied.num_parameters == LLAMA["vocab_size"] * LLAMA["hidden_size"]
