"""Checkpoints of transformers come in and go out, offline, with the same logits."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml

from shared.config.schema import Config
from shared.errors import UserError
from shared.huggingface import Pretrained, model_section, read_settings, write_pretrained
from shared.initialization import FirstDraws
from shared.models import model_spec
from tests import backends
from tests.recipes import GPT2, LLAMA, MODELS, random_batch, recipe
from tests.test_handover import export, exported
from tests.test_logits import SCALING, oracle
from tests.test_runs import RECIPE, losses, train, trained, working_folder

VARIANTS: dict[str, dict[str, Any]] = MODELS | {
    "llama-scaled": LLAMA | {"rope_scaling": SCALING, "tie_word_embeddings": True},
    "gpt2-erf": GPT2 | {"activation_function": "gelu"},
}


def pretrained(config: Config, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A checkpoint of transformers of that model with random weights, norms and biases too; returns the model, read in
    again."""
    model = oracle(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def logits_of(model: Any, config: Config) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(random_batch(config).tokens).long()).logits.numpy()


def imported(name: str, config: Config, folder: Path) -> np.ndarray:
    """The backend's logits with the weights in a folder."""
    with backends.make(name, config) as backend:
        weights = Pretrained(folder, config.model, backend.spec)
        return backends.logits(backend, random_batch(config), weights)


# float32 over two layers with weights of size 0.1: what tests/test_logits.py holds them to, by the logits' size.
def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("name", backends.BACKENDS)
@pytest.mark.parametrize("model", VARIANTS)
def test_what_transformers_saved_gives_its_logits(name: str, model: str, tmp_path: Path) -> None:
    config = recipe(model=VARIANTS[model])
    theirs = pretrained(config, tmp_path)
    assert_close(imported(name, config, tmp_path), logits_of(theirs, config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_several_files_come_in_too(dtype: torch.dtype, tmp_path: Path) -> None:
    config = recipe()
    theirs = pretrained(config, tmp_path, dtype, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for name in backends.BACKENDS:
        assert_close(imported(name, config, tmp_path), logits_of(theirs, config))


@pytest.mark.parametrize("model", VARIANTS)
def test_the_settings_come_back_as_they_were(model: str, tmp_path: Path) -> None:
    """From the recipe to transformers to its file and to the model section again."""
    config = recipe(model=VARIANTS[model])
    pretrained(config, tmp_path)
    section = model_section(read_settings(tmp_path), "config.json")
    again = recipe(model=section)
    assert model_spec(again.model) == model_spec(config.model)
    done = subprocess.run([sys.executable, "-m", "shared.huggingface", tmp_path], text=True, capture_output=True)
    assert done.returncode == 0 and yaml.safe_load(done.stdout) == {"model": section}
    assert f"{model_spec(config.model).num_parameters:,} parameters, F32" in done.stdout


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("model", VARIANTS)
def test_transformers_loads_what_is_written_here(model: str, shard_bytes: int, tmp_path: Path) -> None:
    config = recipe(model=VARIANTS[model])
    spec = model_spec(config.model)
    write_pretrained(tmp_path / "out", config, spec, FirstDraws(0), "parameters", shard_bytes)
    several = (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert several == (shard_bytes == 20_000)
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, local_files_only=True
    )
    assert not any(told.values()), told
    assert type(theirs).__name__ == type(oracle(config)).__name__
    for name in backends.BACKENDS:
        with backends.make(name, config) as backend:
            assert_close(backends.logits(backend, random_batch(config)), logits_of(theirs, config))
    assert_close(logits_of(theirs, config), logits_of(oracle(config), config))
    assert Pretrained(tmp_path / "out", config.model, spec).read("parameters", spec.parameters[0]).shape


def test_gpt2_without_its_prefix_and_with_old_masks_comes_in(tmp_path: Path) -> None:
    """As the files of the first GPT-2 are."""
    from safetensors.torch import load_file, save_file

    config = recipe(model=GPT2)
    theirs = pretrained(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    renamed |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "lm_head.weight": renamed["wte.weight"].clone()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert_close(imported("jax", config, tmp_path), logits_of(theirs, config))


def settings(**changes: Any) -> dict[str, Any]:
    made = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4).to_dict()
    return {key: value for key, value in {**made, **changes}.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral' is not known here; "),
        ({"model_type": "gemma2"}, "did you mean 'gemma'?"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "relu"}, "hidden_act is relu, and a llama here has silu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "type yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "type linear"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "not full_attention"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window is True"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"model_type": "gpt2"}, "tie_word_embeddings is False"),
        ({"model_type": "gpt2", "tie_word_embeddings": True}, "n_embd is missing"),
    ],
)
def test_what_cannot_be_trained_here_is_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        model_section(settings(**changes), "x/config.json")
    assert str(caught.value).startswith("x/config.json: ") and complaint in str(caught.value)


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 0, 1.5, True, [1], {"a": 1}, float("nan")], ids=repr)
def test_a_file_that_holds_anything_at_all_ends_in_one_line(value: Any, tmp_path: Path) -> None:
    """Whatever a setting is, it is understood or refused."""
    for base in (settings(), transformers.GPT2Config().to_dict() | {"tie_word_embeddings": True}):
        for key in base:
            (tmp_path / "config.json").write_text(json.dumps(base | {key: value}))
            with contextlib.suppress(UserError):
                section = model_section(read_settings(tmp_path), "x")
                with contextlib.suppress(ValueError):
                    recipe(model=section)


def test_what_older_versions_wrote_means_the_same() -> None:
    section = model_section(settings(rope_parameters="absent", rope_theta=5e5), "x")
    assert section["rope_theta"] == 5e5 and "rope_scaling" not in section
    older = settings(rope_parameters="absent", rope_theta=5e5, rope_scaling=SCALING)
    assert model_section(older, "x")["rope_scaling"] == SCALING


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = recipe()
    spec = model_spec(config.model)
    pretrained(config, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"

    def complaint(changed: dict[str, torch.Tensor | None]) -> str:
        save_file({k: v for k, v in {**tensors, **changed}.items() if v is not None}, path)
        with pytest.raises(UserError) as caught:
            Pretrained(tmp_path, config.model, spec)
        return str(caught.value)

    assert f"has no tensor {name}" in complaint({name: None})
    assert f"{name} has the shape [40, 23], and the recipe's has [40, 24]" in complaint(
        {name: tensors[name][:, :23].contiguous()}
    )
    assert "has a tensor model.extra, which a llama" in complaint({"model.extra": torch.ones(2)})
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    path.unlink()
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle, which could run code"):
        Pretrained(tmp_path, config.model, spec)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(UserError, match=r"passwd: cannot be read"):
        Pretrained(tmp_path, config.model, spec)
    (tmp_path / "config.json").write_text("{")
    done = subprocess.run([sys.executable, "-m", "shared.huggingface", tmp_path], text=True, capture_output=True)
    assert done.returncode == 2 and "is not JSON" in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sections = {"precision": "float32", "schedule": RECIPE["schedule"] | {"steps": 20, "warmup_steps": 0}}
    return working_folder(tmp_path_factory.mktemp("huggingface"), RECIPE | sections)


def test_a_checkpoint_is_tuned_by_both_backends_and_goes_back_to_transformers(folder: Path) -> None:
    config = Config.model_validate(yaml.safe_load((folder / "recipe.yaml").read_text()))
    pretrained(config, folder / "hub")
    runs = [trained(folder, name, f"tuned-{name}", "--quiet", "--init-from", "hub") for name in backends.BACKENDS]
    # float32, two frameworks: the limit of the ladder for whole runs.
    assert np.mean(np.abs(losses(runs[0]) - losses(runs[1]))) <= 1e-4
    described = [json.loads((run / "run.json").read_text()) for run in runs]
    assert described[0]["fingerprints"] == described[1]["fingerprints"]
    drawn = json.loads((trained(folder, "torch", "drawn", "--quiet", "--stop-at-step", "1") / "run.json").read_text())
    assert drawn["fingerprints"]["initial_weights"] != described[0]["fingerprints"]["initial_weights"]

    for name, run in zip(backends.BACKENDS, runs, strict=True):
        for weights in ("average", "parameters"):
            out = exported(folder, name, run.name, f"{weights}-{name}", "--format", "huggingface", "--weights", weights)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
            assert theirs.config.eos_token_id == 256
            assert_close(imported(name, config, out), logits_of(theirs, config))
    default = exported(folder, "jax", runs[0].name, "default", "--format", "huggingface")
    assert (default / "model.safetensors").read_bytes() == (folder / "average-jax/model.safetensors").read_bytes()


def test_wrong_ways_in_and_out_are_one_line(folder: Path) -> None:
    config = Config.model_validate(yaml.safe_load((folder / "recipe.yaml").read_text()))
    pretrained(config, folder / "other")
    done = train(folder, "jax", "refused", "--init-from", "other", "model.num_hidden_layers=3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "model.num_hidden_layers is 3, and other/config.json says 2" in done.stderr
    trained(folder, "torch", "plain", "--quiet", "--stop-at-step", "1", "optimizer.ema_decay=null")
    done = export(folder, "torch", "plain", "out", "--format", "huggingface", "--weights", "average")
    assert done.returncode == 2 and "the recipe keeps no average" in done.stderr and done.stderr.count("\n") == 1
