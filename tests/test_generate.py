"""A trained model continues a text: with a cache that changes nothing, and alike in both backends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.batch import Batch
from shared.config.schema import Config
from shared.data.tokenizers import Bytes
from shared.generate import chooser, continued
from shared.initialization import FirstDraws
from tests import backends
from tests.backends import BACKENDS
from tests.recipes import GPT2, LLAMA, MODELS, recipe
from tests.test_logits import SCALING, oracle
from tests.test_runs import RECIPE, trained, working_folder

LENGTH = 16


def decoder(name: str, config: Config, length: int = LENGTH) -> Any:
    if name == "torch":
        from torchtrain.decoder import CachedDecoder as Torch

        return Torch(config, FirstDraws(config.seed), "parameters", length)
    from jaxtrain.decoder import CachedDecoder as Jax

    return Jax(config, FirstDraws(config.seed), "parameters", length)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("parts", [(1,) * LENGTH, (9, 1, 1, 5), (LENGTH,)], ids=str)
@pytest.mark.parametrize("model", [*MODELS, "scaled"])
def test_the_cache_changes_no_logit(name: str, model: str, parts: tuple[int, ...]) -> None:
    sections = MODELS | {"scaled": LLAMA | {"rope_scaling": SCALING}}
    config = recipe(model=sections[model], precision="float64", batch={"global_batch": 1, "sequence_length": LENGTH})
    tokens = np.random.default_rng(0).integers(0, 61, (1, LENGTH), dtype=np.int32)
    with backends.make(name, config) as backend:
        whole = backends.logits(backend, Batch(tokens, tokens, tokens >= 0))[0]
        cached, start = decoder(name, config), 0
        for part in parts:
            logits = cached.extend(tokens[0, start : start + part])
            start += part
            # float64: the same sums, over keys that lie elsewhere in memory.
            np.testing.assert_allclose(logits, whole[start - 1], atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", BACKENDS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Longer than any sequence of the training, where rotary positions go on."""
    config = recipe(model=LLAMA | {"initializer_range": 0.2}, batch={"global_batch": 1, "sequence_length": 8})
    prompt = np.array([5, 17, 44])
    theirs = oracle(config).generate(
        torch.from_numpy(prompt)[None], max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with backends.make(name, config):
        cached, ours = decoder(name, config, 43), list(prompt)
        logits = cached.extend(prompt)
        for _ in range(40):
            ours.append(chooser(0.0, 0)(logits))
            logits = cached.extend(np.array(ours[-1:])) if len(ours) < 43 else logits
    assert ours == theirs[0].tolist()
    assert len(set(ours[3:])) > 5, "it does not only repeat itself"


def test_of_equal_logits_the_first_is_chosen() -> None:
    assert chooser(0.0, 0)(np.array([1.0, 3.0, 3.0])) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_have_the_frequencies_of_the_softmax(temperature: float) -> None:
    logits = np.array([0.0, 1.0, 2.0, -np.inf])
    choose = chooser(temperature, seed=1)
    counts = np.bincount([choose(logits) for _ in range(20_000)], minlength=4)
    expected = torch.softmax(torch.from_numpy(logits) / temperature, 0).numpy()
    # Five standard errors of a share.
    assert np.all(np.abs(counts / 20_000 - expected) <= 5 * np.sqrt(expected * (1 - expected) / 20_000))
    assert counts[3] == 0


class Spelling:
    """A decoder whose likeliest tokens spell a text, and then end it; rows beyond the vocabulary are likelier still."""

    def __init__(self, text: str):
        self.left = [*text.encode(), Bytes.end_of_text]

    def extend(self, tokens: np.ndarray) -> np.ndarray:
        logits = np.zeros(300)
        logits[self.left.pop(0)] = 1.0
        logits[260] = 2.0
        return logits


def test_characters_of_several_bytes_come_out_whole_and_the_end_of_the_text_ends_it() -> None:
    text = "état → 国家"
    parts = list(continued(Spelling(text), Bytes(), np.array([1]), 100, chooser(0.0, 0)))
    assert "".join(parts) == text and len(parts) == len(text.encode())
    assert not any("\ufffd" in part for part in parts)
    cut_off = Spelling("国家")
    cut_off.left[4:] = [Bytes.end_of_text]
    assert "".join(continued(cut_off, Bytes(), np.array([1]), 100, chooser(0.0, 0))) == "国\ufffd"
    cut = list(continued(Spelling("国家"), Bytes(), np.array([1]), 4, chooser(0.0, 0)))
    assert "".join(cut) == "国\ufffd", "half a character at the end is shown as what it is"


def test_a_space_that_a_tokenizer_leaves_out_where_a_text_begins_is_not_lost() -> None:
    """As those of SentencePiece do, with which many checkpoints come."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from shared.data.tokenizers import Library

    vocabulary = {"▁hello": 0, "▁world": 1, "▁again": 2, "</s>": 3}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Library(made, "</s>", "x")

    class Words(Spelling):
        def __init__(self) -> None:
            self.left = [1, 2, 3]

        def extend(self, tokens: np.ndarray) -> np.ndarray:
            return np.eye(4)[self.left.pop(0)]

    (prompt,) = tokenizer.encode_batch(["hello"])
    parts = list(continued(Words(), tokenizer, prompt, 5, chooser(0.0, 0)))
    assert parts == [" world", " again"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return working_folder(tmp_path_factory.mktemp("generate"), RECIPE | {"precision": "float32"})


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    words = ("--quiet", "--stop-at-step", "200", "checkpoint={every: 100, keep: 2}")
    return {name: trained(folder, name, f"run-{name}", *words) for name in BACKENDS}


def generate(folder: Path, backend: str, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"{backend}train.generate", run, *words]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=120)


def test_both_backends_write_the_same_text(folder: Path, runs: dict[str, Path]) -> None:
    for words in ((), ("--temperature", "0.7", "--seed", "3"), ("--step", "100")):
        done = {
            name: generate(folder, name, run.name, "--prompt", "the union of ", "--max-tokens", "40", *words)
            for name, run in runs.items()
        }
        for result in done.values():
            assert result.returncode == 0, result.stderr
            assert result.stdout.startswith("the union of ") and "tokens" in result.stderr
        assert done["jax"].stdout == done["torch"].stdout
    told = generate(folder, "torch", "run-torch", "--prompt", "the ", "--max-tokens", "5")
    assert "step 200 of run-torch: 5 tokens" in told.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run-torch", "--prompt", ""], "--prompt holds no token"),
        (["run-torch", "--prompt", "a", "--temperature", "-1"], "--temperature must be 0 or above, not -1"),
        (["run-torch", "--prompt", "a", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["run-torch", "--prompt", "a", "--seed", "-1"], "--seed must be 0 or above"),
        (["run-torch", "--prompt", "a", "--step", "7"], "holds no checkpoint of step 7; the nearest is 100"),
        (["run-torch"], "required: --prompt"),
        (["run-jax", "--prompt", "a"], "holds a run of jaxtrain"),
        (["nowhere", "--prompt", "a"], "no such run directory"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, runs: dict[str, Path], words: list[str], complaint: str) -> None:
    done = generate(folder, "torch", *words)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert complaint in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_without_a_checkpoint_or_with_another_tokenizer_is_one_line(
    folder: Path, backend: str, runs: dict[str, Path]
) -> None:
    for name, change in (("empty", None), ("other", "tokenizer")):
        copy = folder / f"{name}-{backend}"
        shutil.copytree(runs[backend], copy)
        if change is None:
            shutil.rmtree(copy / "checkpoints")
        else:
            run = json.loads((copy / "run.json").read_text())
            run["config"]["model"]["vocab_size"] = 100
            (copy / "run.json").write_text(json.dumps(run))
        done = generate(folder, backend, copy.name, "--prompt", "the union")
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert ("holds no checkpoint yet" if change is None else "not the one that it was trained with") in done.stderr


def test_learned_positions_end_where_their_table_ends(folder: Path) -> None:
    model = ", ".join(f"{key}: {value}" for key, value in (GPT2 | {"vocab_size": 257}).items())
    trained(folder, "torch", "gpt2", "--quiet", "--stop-at-step", "1", f"model={{{model}}}")
    done = generate(folder, "torch", "gpt2", "--prompt", "the union", "--max-tokens", "24")
    assert done.returncode == 2 and "the model has 32 positions; nearest valid: 23" in done.stderr
    assert generate(folder, "torch", "gpt2", "--prompt", "the union", "--max-tokens", "23").returncode == 0
    done = generate(folder, "torch", "gpt2", "--prompt", "the union " * 4)
    assert done.returncode == 2 and "shorten it" in done.stderr


@pytest.mark.parametrize("command", ["generate", "export"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_help_imports_no_framework(backend: str, command: str) -> None:
    script = (
        f"import sys, runpy; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module('{backend}train.{command}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'jax', 'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
