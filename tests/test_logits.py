"""Each backend computes what transformers computes, from the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.config.schema import Config, Llama, RotaryDecoder
from shared.initialization import initial_value
from shared.models import model_spec
from tests import backends
from tests.recipes import GPT2, LLAMA, QWEN3, random_batch, recipe
from tests.recipes import MODELS as FAMILIES

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
MODELS: dict[str, dict[str, Any]] = FAMILIES | {
    "llama-tied-eps": LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "llama-theta": LLAMA | {"rope_theta": 100.0, "num_key_value_heads": 4},
    "llama-scaled": LLAMA | {"rope_theta": 10.0, "rope_scaling": SCALING},
    "qwen3-eps": QWEN3 | {"rms_norm_eps": 1e-2},
    "gpt2-erf-eps": GPT2 | {"activation_function": "gelu", "layer_norm_epsilon": 1e-2},
}


def oracle(config: Config) -> Any:
    """The transformers model of the same recipe, holding its initial weights, in float32."""
    import torch
    import transformers

    model = config.model
    if isinstance(model, RotaryDecoder):
        scaling = model.rope_scaling.model_dump() if isinstance(model, Llama) and model.rope_scaling else {}
        of_family = {"llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma"}[model.family]
        own = getattr(transformers, f"{of_family}Config")(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_hidden_layers=model.num_hidden_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            rms_norm_eps=model.rms_norm_eps,
            rope_theta=model.rope_theta,
            rope_parameters={"rope_type": "default", **scaling, "rope_theta": model.rope_theta},
            tie_word_embeddings=model.tie_word_embeddings,
            initializer_range=model.initializer_range,
            # Gemma's class leaves the row of token 0 without a gradient otherwise.
            pad_token_id=None,
            attn_implementation="eager",
        )
        oracle = getattr(transformers, f"{of_family}ForCausalLM")(own)
    else:
        own = transformers.GPT2Config(
            vocab_size=model.vocab_size,
            n_embd=model.hidden_size,
            n_inner=model.intermediate_size,
            n_layer=model.num_hidden_layers,
            n_head=model.num_attention_heads,
            n_positions=model.max_position_embeddings,
            layer_norm_epsilon=model.layer_norm_epsilon,
            activation_function=model.activation_function,
            initializer_range=model.initializer_range,
            attn_implementation="eager",
        )
        oracle = transformers.GPT2LMHeadModel(own)
    spec = model_spec(model)
    named = dict(oracle.named_parameters())
    assert sorted(named) == sorted(parameter.name for parameter in spec.parameters)
    with torch.no_grad():
        for parameter in spec.parameters:
            named[parameter.name].copy_(torch.from_numpy(initial_value(parameter, config.seed)))
    return oracle.eval()


@pytest.mark.parametrize("attention", ["reference", "fused"])
@pytest.mark.parametrize("model", MODELS)
def test_torch_logits_equal_those_of_transformers(model: str, attention: str) -> None:
    _check("torch", recipe(model=MODELS[model], execution={"attention": attention}))


@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("model", MODELS)
def test_jax_logits_equal_those_of_transformers(model: str, layers: str) -> None:
    _check("jax", recipe(model=MODELS[model], execution={"jax": {"layers": layers}}))


def _check(name: str, config: Config) -> None:
    import torch

    batch = random_batch(config)
    with backends.make(name, config) as backend:
        ours = backends.logits(backend, batch)
    theirs = oracle(config)(torch.from_numpy(batch.tokens).long()).logits.detach().numpy()
    assert theirs.std() > 0.1, "the logits must vary for the comparison to mean anything"
    # float32 rounding over two layers; a wrong epsilon, base or GELU moves them by more than 1e-4.
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", backends.BACKENDS)
@pytest.mark.parametrize("model", FAMILIES)
def test_packed_documents_get_the_logits_they_get_alone(name: str, model: str) -> None:
    config = recipe(model=MODELS[model])
    batch = random_batch(config, segments=True)
    assert batch.segments is not None
    with backends.make(name, config) as backend:
        packed = backends.logits(backend, batch)
        for row in range(3):
            for segment in np.unique(batch.segments[row]):
                where = np.flatnonzero(batch.segments[row] == segment)
                alone = np.zeros((config.batch.global_batch, config.batch.sequence_length), np.int32)
                alone[0, : len(where)] = batch.tokens[row, where]
                expected = backends.logits(backend, type(batch)(alone, alone, alone > 0))[0, : len(where)]
                # Masked positions contribute exact zeros; only the order of float32 sums differs.
                np.testing.assert_allclose(packed[row, where], expected, atol=1e-5, rtol=0)
