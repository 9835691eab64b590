"""A config whose every line the tests know, and ways to load variations of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config.load import Resolved, load_config
from shared.errors import UserError

TEXT = """\
# A comment.
seed: 1
model:
  family: llama
  vocab_size: 320
  hidden_size: 128
  intermediate_size: 384
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  rms_norm_eps: 1e-5
  rope_theta: 10000
  tie_word_embeddings: true
  initializer_range: 0.02
data:
  source: {kind: text, files: corpus/*.txt}
  tokenizer: {kind: bytes}
  packing: stream
  held_out_fraction: 0.05
optimizer:
  name: adamw
  beta1: 0.9
  beta2: 0.95
  eps: 1e-8
  weight_decay: 0.1
  clip_norm: 1.0
schedule:
  name: cosine
  steps: 600
  learning_rate: 3e-3
  warmup_steps: 40
  final_learning_rate: 1e-4
batch: {global_batch: 16, sequence_length: 256}
precision: float32
execution:
  attention: reference
  jax: {layers: scan}
targets:
  cpu:
    execution: {jax: {layers: unroll}}
    accumulation: {microbatch: 4}
  v5e-1:
    remat: full
"""


def load(
    tmp_path: Path,
    *overrides: str,
    replace: tuple[str, str] = ("", ""),
    target: str | None = None,
    detect: Callable[[], str] | None = None,
) -> Resolved:
    """Load the example from ``config.yaml`` after replacing one piece of its text, which must occur once."""
    old, new = replace
    assert not old or TEXT.count(old) == 1, f"{old!r} must name one place of the example"
    path = tmp_path / "config.yaml"
    path.write_text(TEXT.replace(old, new) if old else TEXT)
    return load_config(path, overrides, target, detect)


def failure(tmp_path: Path, *overrides: str, replace: tuple[str, str] = ("", ""), target: str | None = None) -> str:
    """The message that the variation fails with; ``config.yaml:12: ...`` when the file is to blame."""
    with pytest.raises(UserError) as caught:
        load(tmp_path, *overrides, replace=replace, target=target)
    return str(caught.value).replace(f"{tmp_path}/", "")
