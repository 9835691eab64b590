"""A small corpus and configs that read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.config.schema import Config


@pytest.fixture
def texts() -> list[str]:
    """200 documents of 20 to 300 characters, some of them of two bytes."""
    draws = np.random.default_rng(0)
    return ["".join(draws.choice(list("abcdefg äöü"), draws.integers(20, 300))) for _ in range(200)]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """The folder that holds the documents as text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def make_config(tmp_path: Path, corpus: Path) -> Callable[..., Config]:
    """Makes a config that reads the corpus; see :func:`config_of`."""
    return lambda **changes: config_of(**{"corpus": corpus, "cache_dir": str(tmp_path / "cache")} | changes)


def config_of(
    corpus: Path, *, seed: int = 0, vocab_size: int = 300, rows: int = 4, length: int = 16, **data: Any
) -> Config:
    """A config whose data section reads ``corpus``; ``data`` replaces entries of that section."""
    values: dict[str, Any] = {
        "seed": seed,
        "model": {
            "family": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        "data": {
            "source": {"kind": "text", "files": f"{corpus}/*.txt"},
            "tokenizer": {"kind": "bytes"},
            "packing": "stream",
            "held_out_fraction": 0.1,
            **data,
        },
        "optimizer": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None},
        "schedule": {"name": "constant", "steps": 1, "learning_rate": 0.1, "warmup_steps": 0},
        "batch": {"global_batch": rows, "sequence_length": length},
        "precision": "float32",
    }
    return Config.model_validate(values)
