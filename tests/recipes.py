"""Tiny recipes and batches that the tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.batch import Batch
from shared.config.schema import Config

LLAMA: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
GPT2: dict[str, Any] = {
    "family": "gpt2",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "initializer_range": 0.1,
}
QWEN3: dict[str, Any] = LLAMA | {"family": "qwen3"}
GEMMA: dict[str, Any] = LLAMA | {"family": "gemma", "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": QWEN3, "gemma": GEMMA, "gpt2": GPT2}
"""One of each family."""
ADAMW: dict[str, Any] = {
    "name": "adamw",
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}
SGD: dict[str, Any] = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 1.0}
SPEECHES: dict[str, Any] = {
    "source": {"kind": "speeches"},
    "tokenizer": {"kind": "bytes"},
    "packing": "stream",
    "held_out_fraction": 0.1,
}


def recipe(**sections: Any) -> Config:
    """A valid config of a tiny run; a keyword replaces a whole section."""
    return Config.model_validate(
        {
            "seed": 0,
            "model": LLAMA,
            "data": SPEECHES,
            "optimizer": ADAMW,
            "schedule": {"name": "constant", "steps": 10, "learning_rate": 1e-2, "warmup_steps": 0},
            "batch": {"global_batch": 8, "sequence_length": 16},
            "precision": "float32",
            **sections,
        }
    )


def random_batch(config: Config, seed: int = 0, ragged: bool = False, segments: bool = False) -> Batch:
    """A batch of random tokens; ``ragged`` leaves out a random share of each row's targets, one row's all."""
    rng = np.random.default_rng(seed)
    shape = config.batch.global_batch, config.batch.sequence_length
    tokens, targets = rng.integers(0, config.model.vocab_size, (2, *shape), dtype=np.int32)
    mask = np.ones(shape, bool)
    if ragged:
        mask = rng.random(shape) < rng.random((shape[0], 1))
        mask[0] = False
    if not segments:
        return Batch(tokens, np.where(mask, targets, 0), mask)
    starts = rng.random(shape) < 0.2
    starts[:, 0] = False
    segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, np.arange(shape[1]), 0), axis=1)
    positions = (np.arange(shape[1]) - first).astype(np.int32)
    return Batch(tokens, np.where(mask, targets, 0), mask, segment_ids, positions)
