"""Between ``config.json`` of Hugging Face's libraries and a recipe's ``model`` section.

What would change what the model computes and has no counterpart here is refused, and not left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config.schema import GPT2, Llama, RotaryDecoder
from shared.errors import UserError, nearest
from shared.run_directory import reason

ACTIVATIONS = {"llama": "silu", "qwen3": "silu", "gemma": "gelu_pytorch_tanh"}
"""``hidden_act`` of each family with rotary positions."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

_ROTARY = {
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
"""Settings that both call alike, with the default of Hugging Face's classes."""

_GPT2 = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("n_embd", None),
    "num_hidden_layers": ("n_layer", None),
    "num_attention_heads": ("n_head", None),
    "max_position_embeddings": ("n_positions", 1024),
    "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
    "activation_function": ("activation_function", "gelu_new"),
    "initializer_range": ("initializer_range", 0.02),
}
"""What GPT-2's configuration calls each, with its default."""

_LLAMA3 = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_settings(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder. Raises UserError where it cannot be read."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: is not a model's configuration")
    return settings


def model_section(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The ``model`` section of the model that these settings describe. Raises UserError, which begins with ``where``,
    for what cannot be trained here."""
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UserError(f"{where}: model_type {family!r} is not known here; {nearest(str(family), ARCHITECTURES)}")
    if settings.get("quantization_config") is not None:
        raise UserError(f"{where}: the weights are quantised (quantization_config); give the unquantised checkpoint")
    try:
        return _gpt2(settings, where) if family == "gpt2" else _rotary(family, settings, where)
    except KeyError as error:
        raise UserError(f"{where}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a setting has a value of another kind than it should: {error}") from None


def _gpt2(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key, plain in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        _require(settings, key, plain, where)
    _require(settings, "tie_word_embeddings", True, where)
    section = {"family": "gpt2"} | {ours: _setting(settings, theirs, d) for ours, (theirs, d) in _GPT2.items()}
    if section["activation_function"] == "gelu_pytorch_tanh":
        section["activation_function"] = "gelu_new"
    return section | {"intermediate_size": settings.get("n_inner") or 4 * settings["n_embd"]}


def _rotary(family: str, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "use_bidirectional_attention"):
        _require(settings, key, False, where)
    activation = settings.get("hidden_activation") or settings.get("hidden_act", ACTIVATIONS[family])
    if activation != ACTIVATIONS[family]:
        raise UserError(f"{where}: hidden_act is {activation}, and a {family} here has {ACTIVATIONS[family]}")
    if settings.get("num_nextn_predict_layers") or set(settings.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"{where}: layer_types has layers that are not full_attention, which are not known here")
    heads = settings["num_attention_heads"]
    default_width = {"qwen3": 128, "gemma": 256}.get(family) or settings["hidden_size"] // heads
    section = {"family": family} | {key: _setting(settings, key, default) for key, default in _ROTARY.items()}
    section |= {
        "num_key_value_heads": settings.get("num_key_value_heads") or heads,
        "head_dim": settings.get("head_dim") or default_width,
        "tie_word_embeddings": settings.get("tie_word_embeddings", family == "gemma"),
    }
    return section | _rope(family, settings, where)


def _rope(family: str, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Base and scaling of the rotary positions; transformers 5 has both in ``rope_parameters``."""
    scaling = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    section: dict[str, Any] = {"rope_theta": float(scaling.pop("rope_theta", settings.get("rope_theta", 10000.0)))}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3" and family == "llama":
        return section | {"rope_scaling": {"rope_type": kind} | {key: scaling[key] for key in _LLAMA3[1:]}}
    if kind != "default" or scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{where}: rotary positions of the type {kind} are not known here for {family}")
    return section


def _setting(settings: Mapping[str, Any], key: str, default: Any) -> Any:
    return settings[key] if default is None else settings.get(key, default)


def _require(settings: Mapping[str, Any], key: str, expected: bool, where: str) -> None:
    if settings.get(key) not in (None, expected):
        raise UserError(f"{where}: {key} is {settings[key]}, and only {key}={expected} is known here")


def settings_of(model: RotaryDecoder | GPT2, dtype: str, max_positions: int, end_of_text: int | None) -> dict[str, Any]:
    """The content of ``config.json`` for a model.

    dtype: as PyTorch calls it, such as ``float32``. max_positions: longest sequence to promise, for rotary positions.
    end_of_text: id of the token that ends a text.
    """
    common = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "initializer_range": model.initializer_range,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
    }
    if isinstance(model, GPT2):
        named = {theirs: getattr(model, ours) for ours, (theirs, _) in _GPT2.items()}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return common | named | off | {"n_inner": model.intermediate_size, "tie_word_embeddings": True}
    scaling = model.rope_scaling.model_dump() if isinstance(model, Llama) and model.rope_scaling else None
    return common | {
        **{key: getattr(model, key) for key in _ROTARY},
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.width_of_head,
        "hidden_act": ACTIVATIONS[model.family],
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        # Until version 4 transformers read the first two of these, and from version 5 on the third.
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta},
    }
