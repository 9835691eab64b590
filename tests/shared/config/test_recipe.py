from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config.load import load_config
from shared.config.recipe import IDENTITY, recipe_hash, recipe_of
from tests.shared.config.example import TEXT, load

# The canonical JSON of the example's recipe, written by hand from the definition: keys sorted, no spaces, floats as
# the shortest text that reads back as the same number, derived and default values written out, no locations.
CANONICAL = (
    '{"batch":{"global_batch":16,"sequence_length":256},'
    '"data":{"held_out_fraction":0.05,"packing":"stream","source":{"kind":"text"},"tokenizer":{"kind":"bytes"}},'
    '"model":{"dropout":0.0,"family":"llama","head_dim":32,"hidden_size":128,"initializer_range":0.02,"intermediate_size":384,'
    '"num_attention_heads":4,"num_hidden_layers":4,"num_key_value_heads":2,"rms_norm_eps":1e-05,'
    '"rope_theta":10000.0,"tie_word_embeddings":true,"vocab_size":320},'
    '"optimizer":{"beta1":0.9,"beta2":0.95,"clip_norm":1.0,"ema_decay":null,"eps":1e-08,"name":"adamw",'
    '"weight_decay":0.1},'
    '"precision":{"accumulate":"float32","compute":"float32","islands":"float32","logits":"float32","loss_scale":null,'
    '"matmul":"exact","optimizer_state":"float32","parameters":"float32","reduce":"float32"},'
    '"schedule":{"final_learning_rate":0.0001,"learning_rate":0.003,"name":"cosine","steps":600,"warmup_steps":40},'
    '"seed":1}'
)


def hash_of(tmp_path: Path, *overrides: str, target: str | None = None) -> str:
    return recipe_hash(load(tmp_path, *overrides, target=target).config)


def hash_of_text(tmp_path: Path, text: str) -> str:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    return recipe_hash(load_config(path).config)


def shuffled(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: shuffled(value[key], rng) for key in rng.sample(list(value), len(value))}


def test_the_hash_is_sha256_of_the_canonical_json(tmp_path: Path) -> None:
    assert recipe_of(load(tmp_path).config) == json.loads(CANONICAL)
    assert hash_of(tmp_path) == hashlib.sha256(CANONICAL.encode()).hexdigest()[:16]


def test_the_hash_never_changes_from_one_version_to_the_next(tmp_path: Path) -> None:
    # Runs made yesterday are compared with runs made today: a change here needs a reason, and a note in CHANGELOG.md.
    assert hash_of(tmp_path) == "51839ad594fe4e9f"


@pytest.mark.parametrize("seed", range(5))
def test_any_key_order_gives_the_same_hash(tmp_path: Path, seed: int) -> None:
    values = shuffled(load(tmp_path).config.model_dump(mode="json"), random.Random(seed))
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=seed % 2 == 0)
    assert text != TEXT and hash_of_text(tmp_path, text) == hash_of(tmp_path)


def test_comments_spacing_and_line_ends_do_not_change_the_hash(tmp_path: Path) -> None:
    text = TEXT.replace("\n", "   # why\r\n\r\n")
    assert hash_of_text(tmp_path, text) == hash_of(tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        "schedule.learning_rate=0.003",
        "schedule.learning_rate=3.0e-03",
        "optimizer.clip_norm=1",
        "model.rope_theta=1e4",
        "seed=0x1",
        "model.head_dim=null",
        "model.head_dim=32",
        "optimizer.ema_decay=null",
    ],
)
def test_another_way_to_write_the_same_value_gives_the_same_hash(tmp_path: Path, override: str) -> None:
    assert hash_of(tmp_path, override) == hash_of(tmp_path)


def test_negative_zero_is_zero(tmp_path: Path) -> None:
    assert hash_of(tmp_path, "optimizer.weight_decay=-0.0") == hash_of(tmp_path, "optimizer.weight_decay=0")


@pytest.mark.parametrize(
    "override",
    [
        "data.source.files=/mnt/elsewhere/*.txt",
        "data.cache_dir=/tmp/cache",
        "accumulation.microbatch=2",
        "remat=full",
        "parallel.data=2",
        "accumulation.sync=every",
        "offload.optimizer=host",
        "offload.activations=[q]",
        "execution.vocab_chunk=64",
        "execution.attention=fused",
        "execution.jax.layers=auto",
        "execution.torch.compile=true",
        "checkpoint.every=3",
        "evaluation={every: 3, max_rows: 4}",
        "logging={every: 3, tensorboard: false}",
        "targets={}",
    ],
)
def test_where_and_how_fast_a_run_happens_does_not_change_its_hash(tmp_path: Path, override: str) -> None:
    assert hash_of(tmp_path, override) == hash_of(tmp_path)


def test_targets_do_not_change_the_hash(tmp_path: Path) -> None:
    assert len({hash_of(tmp_path, target=target) for target in (None, "cpu", "v5e-1")}) == 1


def test_a_tokenizers_location_is_left_out_and_its_end_of_text_is_not(tmp_path: Path) -> None:
    def tokenizer(path: str, end: str) -> str:
        return hash_of(tmp_path, f"data.tokenizer={{kind: file, path: {path}, end_of_text: {end}}}")

    assert tokenizer("a.json", "<eos>") == tokenizer("b.json", "<eos>") != tokenizer("a.json", "<end>")


IDENTITY_CHANGES = [
    "seed=2",
    "precision=bfloat16",
    "precision.parameters=bfloat16",
    "precision.compute=float16",
    "precision.logits=bfloat16",
    "precision.islands=float64",
    "precision.accumulate=float64",
    "precision.reduce=bfloat16",
    "precision.optimizer_state=bfloat16",
    "precision.matmul=tf32",
    "precision.loss_scale={initial: 8}",
    "model.dropout=0.1",
    "model.vocab_size=321",
    "model.hidden_size=256",
    "model.intermediate_size=385",
    "model.num_hidden_layers=5",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "model.rms_norm_eps=1e-6",
    "model.rope_theta=10001",
    "model.tie_word_embeddings=false",
    "model.initializer_range=0.020000000000000004",  # the next float
    "data.source={kind: speeches}",
    "data.source={kind: jsonl, files: corpus/*.txt}",
    "data.tokenizer={kind: gpt2}",
    "data.packing=pad",
    "data.held_out_fraction=0.06",
    "optimizer={name: sgd, weight_decay: 0.1, clip_norm: 1.0, momentum: 0.9}",
    "optimizer.beta1=0.8",
    "optimizer.beta2=0.96",
    "optimizer.eps=1e-9",
    "optimizer.weight_decay=0",
    "optimizer.clip_norm=null",
    "optimizer.ema_decay=0.9",
    "schedule={name: constant, steps: 600, learning_rate: 3e-3, warmup_steps: 40}",
    "schedule.steps=601",
    "schedule.learning_rate=3e-4",
    "schedule.warmup_steps=41",
    "schedule.final_learning_rate=0",
    "batch.global_batch=32",
    "batch.sequence_length=128",
]


def test_each_field_of_the_recipe_changes_the_hash(tmp_path: Path) -> None:
    hashes = [hash_of(tmp_path), *(hash_of(tmp_path, change) for change in IDENTITY_CHANGES)]
    assert len(set(hashes)) == len(hashes)


def test_a_preset_and_its_roles_written_out_are_one_recipe(tmp_path: Path) -> None:
    roles = "parameters: float32, logits: bfloat16, islands: float32, accumulate: float32, reduce: float32"
    written_out = f"precision={{preset: float32, compute: bfloat16, {roles}, optimizer_state: float32, matmul: exact}}"
    assert (
        hash_of(tmp_path, written_out)
        == hash_of(tmp_path, "precision=bfloat16")
        == hash_of(tmp_path, "precision.compute=bfloat16")
    )


def test_a_batch_in_tokens_is_the_batch_in_sequences(tmp_path: Path) -> None:
    assert hash_of(tmp_path, "batch.global_batch=4096 tokens") == hash_of(tmp_path)


def test_the_changes_above_leave_no_field_of_the_recipe_out(tmp_path: Path) -> None:
    def leaves(value: Any, path: str) -> set[str]:
        if not isinstance(value, dict):
            return {path}
        return {leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}" if path else key)}

    variants = {"model.family", "data.source.kind", "data.tokenizer.kind", "optimizer.name", "schedule.name"}
    changed = {change.split("=")[0] for change in IDENTITY_CHANGES}
    assert leaves(recipe_of(load(tmp_path).config), "") - variants <= changed


def test_the_recipe_holds_the_identity_sections_and_no_locations(tmp_path: Path) -> None:
    recipe = recipe_of(load(tmp_path, "data.tokenizer={kind: gpt2, path: somewhere}").config)
    assert set(recipe) == set(IDENTITY)
    assert "corpus" not in json.dumps(recipe) and "cache" not in json.dumps(recipe)
    assert "somewhere" not in json.dumps(recipe)
