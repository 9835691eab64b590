from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared.config.example import failure

GPT2 = """\
  family: gpt2
  vocab_size: 320
  hidden_size: 128
  intermediate_size: 384
  num_hidden_layers: 4
  num_attention_heads: 4
  max_position_embeddings: 128
  layer_norm_epsilon: 1e-5
  activation_function: gelu_new
"""
LLAMA = """\
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
"""


FAMILIES = "valid choices: gemma, gpt2, llama, qwen3"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size", "hiden_size", "6: model.hiden_size is not a known key; did you mean 'hidden_size'?"),
        ("precision:", "precison:", "34: precison is not a known key; did you mean 'precision'?"),
        ("seed: 1\n", "", ": seed is missing"),
        ("  beta1: 0.9\n", "", "20: optimizer.beta1 is missing; name 'adamw' needs it"),
        (
            "  beta1: 0.9\n",
            "  momentum: 0.9\n",
            "20: optimizer.beta1 is missing; name 'adamw' needs it (and 1 more)",
        ),
        ("family: llama", "family: lama", "4: model.family cannot be 'lama'; did you mean 'llama'?"),
        ("family: llama", "family: 3", f"4: model.family cannot be the number 3; {FAMILIES}"),
        ("family: llama", "famly: llama", "4: model.famly is not a known key; did you mean 'family'?"),
        ("  family: llama\n", "", f"3: model.family is missing; {FAMILIES}"),
        ("kind: bytes", "kind: byte", "17: data.tokenizer.kind cannot be 'byte'; did you mean 'bytes'?"),
        ("{kind: bytes}", "bytes", "17: data.tokenizer must be a section of 'key: value' lines; got the text 'bytes'"),
        ("hidden_size: 128", "hidden_size: '128'", "6: model.hidden_size must be a whole number; got the text '128'"),
        ("hidden_size: 128", "hidden_size: 128.5", "6: model.hidden_size must be a whole number; got the number 128.5"),
        ("hidden_size: 128", "hidden_size: true", "6: model.hidden_size must be a whole number; got true"),
        ("hidden_size: 128", "hidden_size: 0", "6: model.hidden_size must be above 0; got the number 0"),
        ("hidden_size: 128", "hidden_size:", "6: model.hidden_size must be a whole number; got null"),
        ("beta1: 0.9", "beta1: 1.0", "22: optimizer.beta1 must be below 1.0; got the number 1.0"),
        ("weight_decay: 0.1", "weight_decay: -1", "25: optimizer.weight_decay must be at least 0.0; got the number -1"),
        ("rope_theta: 10000", "rope_theta: .inf", "12: model.rope_theta must be a finite number; got the number inf"),
        ("embeddings: true", "embeddings: yes", "13: model.tie_word_embeddings must be true or false; got the text "
         "'yes'"),
        ("corpus/*.txt", "''", "16: data.source.files must not be empty; got the text ''"),
        ("corpus/*.txt", "[a, b]", "16: data.source.files must be text; got a list"),
        ("precision: float32", "precision: fp32", "34: precision cannot be 'fp32'; did you mean 'float32'?"),
        ("precision: float32", "precision: 7", "34: precision must be 'float64', 'float32', 'tf32', 'bfloat16' or "
         "'float16', or a section; got the number 7"),
        ("precision: float32", "precision: {preset: float32, compute: bf16}", "34: precision.compute cannot be 'bf16'; "
         "did you mean 'bfloat16'?"),
        ("precision: float32", "precision: {compute: float32}", "34: precision.preset is missing"),
        ("global_batch: 16", "global_batch: 1000 tokens", "33: batch.global_batch (1000 tokens) must be a multiple of "
         "sequence_length (256); nearest valid: 1024 tokens"),
        ("    remat: full", "    remat: {every: 2, names: [q]}", "43: targets.v5e-1.remat.policy, every, names or "
         "budget: exactly one is to be given, not every and names"),
        ("    remat: full", "    remat: {budget: 2 GB}", "43: targets.v5e-1.remat.budget must be a number of bytes, "
         "such as 500 MiB or 2 GiB; got the text '2 GB'"),
        ("    remat: full", "    remat: {names: [z]}", "43: targets.v5e-1.remat.names.0 must be 'q', 'k', 'v', "
         "'context', 'out', 'gate', 'up' or 'down'; got the text 'z'"),
        ("packing: stream", "packing: streem", "18: data.packing cannot be 'streem'; did you mean 'stream'?"),
        ("batch: {global_batch: 16, sequence_length: 256}", "batch: [1]", "33: batch must be a section of 'key: value' "
         "lines; got a list"),
        ("batch: {", "batch: {microbatch: 2, ", "33: batch.microbatch is not a known key; did you mean "
         "'accumulation.microbatch'?"),
        ("  eps: 1e-8", "  eps: 1e-8\n  every: 5", "25: optimizer.every is not a known key; did you mean "
         "'remat.every', 'checkpoint.every', 'evaluation.every' or 'logging.every'?"),
        ("  eps: 1e-8", "  eps: 1e-8\n  momentum: 0.9", "25: optimizer.momentum belongs to name 'sgd', but "
         "optimizer.name is 'adamw'"),
        ("    remat: full", "", "42: targets.v5e-1 must be a section of 'key: value' lines; got null"),
        ("  v5e-1:", "  '':", "42: targets has an entry without a name"),
        ("    remat: full", "    execution: {torch: {compil: true}}", "43: targets.v5e-1.execution.torch.compil is not "
         "a known key; did you mean 'compile'?"),
        ("num_key_value_heads: 2", "num_key_value_heads: 3", "10: model.num_key_value_heads (3) must divide "
         "num_attention_heads (4)"),
        ("hidden_size: 128", "hidden_size: 12", "6: model.hidden_size / num_attention_heads (3) must be even: rotary "
         "positions turn pairs of elements"),
        ("hidden_size: 128", "hidden_size: 128\n  head_dim: 33", "7: model.head_dim (33) must be even: rotary "
         "positions turn pairs of elements"),
        ("warmup_steps: 40", "warmup_steps: 601", "31: schedule.warmup_steps (601) must not exceed steps (600)"),
        (LLAMA, GPT2, "32: batch.sequence_length (256) must not exceed model.max_position_embeddings (128)"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_where_and_what_is_valid(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    where = "config.yaml" if message.startswith(":") else "config.yaml:"
    assert failure(tmp_path, replace=(old, new)) == where + message


def test_mistakes_are_counted_and_the_first_in_the_file_is_told(tmp_path: Path) -> None:
    several = "precision: float33\nseeed: 2\nremat: 3"
    assert failure(tmp_path, "schedule.steps=x", replace=("precision: float32", several)) == (
        "config.yaml:34: precision cannot be 'float33'; did you mean 'float32'? (and 3 more)"
    )


def test_a_misspelled_required_key_is_one_mistake(tmp_path: Path) -> None:
    assert "more)" not in failure(tmp_path, replace=("  beta2", "  beta_2"))


def test_keys_and_values_that_break_lines_are_shown_escaped(tmp_path: Path) -> None:
    message = failure(tmp_path, replace=("seed: 1", '"se\\ned": 1\n"\\x1b[31mred": 2'))
    assert message.startswith("config.yaml:2: se\\ned is not a known key;") and message.isprintable()


def test_long_values_are_shortened(tmp_path: Path) -> None:
    assert len(failure(tmp_path, replace=("seed: 1", f"seed: {'x' * 5000}"))) < 200
