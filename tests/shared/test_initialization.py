"""Initial weights are a function of the seed and the name alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from shared.initialization import FirstDraws, initial_value, weights_fingerprint
from shared.models import ModelSpec, model_spec
from tests.recipes import GPT2, LLAMA, recipe

SPEC = model_spec(recipe(model=LLAMA | {"hidden_size": 256, "intermediate_size": 512}).model)


def _fingerprint(spec: ModelSpec, seed: int) -> str:
    return weights_fingerprint(spec, partial(FirstDraws(seed).read, "parameters"))


def test_the_numbers_are_the_same_everywhere() -> None:
    """Golden values: a change of NumPy, of the key or of the rounding shows here."""
    value = initial_value(SPEC.parameter("model.layers.1.mlp.up_proj.weight"), seed=0)
    assert value.dtype == np.float32 and value.shape == (512, 256)
    assert value[0, :3].tolist() == pytest.approx(GOLDEN, abs=0)
    assert _fingerprint(model_spec(recipe().model), 0) == GOLDEN_FINGERPRINT


GOLDEN = [-0.11758222430944443, 0.16579684615135193, 0.03411437198519707]
GOLDEN_FINGERPRINT = "93d15514a2de863a"


def test_each_parameter_has_its_own_numbers_whatever_else_is_in_the_model() -> None:
    deeper = model_spec(recipe(model=LLAMA | {"num_hidden_layers": 3}).model)
    shallow = model_spec(recipe().model)
    for parameter in shallow.parameters:
        assert np.array_equal(initial_value(parameter, 0), initial_value(deeper.parameter(parameter.name), 0))
    drawn = [initial_value(p, 0).ravel()[:8].tobytes() for p in deeper.parameters if p.std is not None]
    assert len(set(drawn)) == len(drawn)


def test_the_seed_changes_every_drawn_parameter() -> None:
    for parameter in SPEC.parameters:
        same = np.array_equal(initial_value(parameter, 0), initial_value(parameter, 1))
        assert same == (parameter.std is None)
    assert _fingerprint(SPEC, 0) != _fingerprint(SPEC, 1)


def test_the_standard_deviation_is_that_of_the_result() -> None:
    value = initial_value(SPEC.parameter("model.layers.0.mlp.up_proj.weight"), 0)
    # 131,072 draws: the standard error of their deviation is 0.2 %, of their mean 0.0003.
    assert value.std() == pytest.approx(0.1, rel=0.01)
    assert abs(value.mean()) < 1e-3


def test_norms_start_at_one_and_biases_at_zero() -> None:
    spec = model_spec(recipe(model=GPT2).model)
    for parameter in spec.parameters:
        if parameter.name.endswith(".bias"):
            assert not initial_value(parameter, 0).any()
        elif ".ln_" in parameter.name:
            assert (initial_value(parameter, 0) == 1).all()


def test_gpt2_draws_its_residual_projections_narrower() -> None:
    spec = model_spec(recipe(model=GPT2).model)
    assert spec.parameter("transformer.h.0.mlp.c_fc.weight").std == 0.1
    for name in ("attn.c_proj", "mlp.c_proj"):
        assert spec.parameter(f"transformer.h.1.{name}.weight").std == pytest.approx(0.1 / np.sqrt(2 * 2))
