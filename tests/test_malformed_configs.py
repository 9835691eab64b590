"""Whatever is wrong with what a person gives us, they get one line and exit status 2.

The malformed configs are generated: every key of three valid configs (which together hold every variant of every
section) is misspelled, left out and given values of the wrong type; sizes are made impossible, files unreadable.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.command import main
from shared.config.load import load_config
from shared.config.schema import Config

ROOT = Path(__file__).parents[1]


class NoFramework:
    """A framework that must not be needed to find a mistake in a config."""

    name = "jax"

    def detect_target(self) -> str:
        return "cpu"

    def backend(self, config: Config) -> Any:
        raise AssertionError("a malformed config reached the backend")


# ------------------------------------------------------------------------------------------------------- valid configs

LLAMA = {
    "family": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1.0e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
GPT2 = {
    "family": "gpt2", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "layer_norm_epsilon": 1.0e-5,
    "activation_function": "gelu_new", "initializer_range": 0.02,
}  # fmt: skip
ADAMW = {
    "name": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1.0e-8, "weight_decay": 0.1, "clip_norm": 1.0,
    "ema_decay": 0.9,
}  # fmt: skip
SGD = {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "clip_norm": None}
OVERRIDABLE: dict[str, Any] = {
    "accumulation": {"microbatch": 4}, "remat": "full", "parallel": {"data": 1}, "offload": {"optimizer": "device"},
    "execution": {"attention": "reference", "jax": {"layers": "scan"}, "torch": {"compile": True}},
    "checkpoint": {"every": 5, "keep": 3}, "evaluation": {"every": 5, "max_rows": 8},
    "logging": {"every": 2, "tensorboard": False},
}  # fmt: skip


def config(model: Any, source: Any, tokenizer: Any, optimizer: Any, schedule: Any, **others: Any) -> dict[str, Any]:
    data = {"source": source, "tokenizer": tokenizer, "packing": "stream", "held_out_fraction": 0.1}
    rates = {"steps": 20, "learning_rate": 1.0e-3, "warmup_steps": 2, **schedule}
    batch = {"global_batch": 8, "sequence_length": 16}
    return {
        "seed": 1, "model": model, "data": {**data, "cache_dir": "cache"}, "optimizer": optimizer, "schedule": rates,
        "batch": batch, "precision": "float32", **others,
    }  # fmt: skip


VALID = [
    config(
        LLAMA,
        {"kind": "text", "files": "corpus/*.txt"},
        {"kind": "bytes"},
        ADAMW,
        {"name": "cosine", "final_learning_rate": 1.0e-4},
        **OVERRIDABLE,
        targets={"cpu": OVERRIDABLE},
    ),
    config(
        GPT2,
        {"kind": "jsonl", "files": "corpus/*.jsonl", "field": "body"},
        {"kind": "file", "path": "tokenizer.json", "end_of_text": "<end>"},
        SGD,
        {"name": "wsd", "decay_steps": 5, "final_learning_rate": 0.0},
    ),
    config(
        LLAMA,
        {"kind": "parquet", "files": "corpus/*.parquet", "column": "body"},
        {"kind": "gpt2", "path": "gpt2"},
        ADAMW,
        {"name": "constant"},
    ),
]
HUGGINGFACE = {"kind": "huggingface", "dataset": "some/text", "name": "plain", "split": "train", "column": "body"}
VALID.append(config(LLAMA, HUGGINGFACE, {"kind": "bytes"}, SGD, {"name": "constant"}))


@pytest.mark.parametrize("number", range(len(VALID)))
def test_the_configs_to_be_broken_are_valid(tmp_path: Path, number: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(VALID[number], sort_keys=False))
    assert load_config(path).config


# --------------------------------------------------------------------------------------------------------- breaking one


@dataclass(frozen=True)
class Malformed:
    """One thing that a person might give us."""

    name: str
    text: str
    """The config file."""
    overrides: tuple[str, ...] = ()
    mentions: str = ""
    """A regular expression that the error has to match."""


def keys_of(section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key path below ``section``, and its value."""
    if isinstance(section, dict):
        for key, value in section.items():
            yield (*path, key), value
            yield from keys_of(value, (*path, key))


def edited(valid: dict[str, Any], path: tuple[str, ...], key: str | None, value: Any = None) -> str:
    """The config as YAML after the entry at ``path`` became ``key: value``, in its place, or went."""
    root = json.loads(json.dumps(valid))  # unlike deepcopy, shares nothing between two sections
    section = root
    for step in path[:-1]:
        section = section[step]
    entries = list(section.items())
    section.clear()
    for old_key, old_value in entries:
        if old_key != path[-1]:
            section[old_key] = old_value
        elif key is not None:
            section[key] = value
    return yaml.dump(root, Dumper=_NoAliases, sort_keys=False)


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def line_of(text: str, word: str) -> int:
    (line,) = [number for number, line in enumerate(text.splitlines(), start=1) if word in line]
    return line


def misspelled_keys() -> Iterator[Malformed]:
    for number, valid in enumerate(VALID):
        for path, value in keys_of(valid):
            if path[:-1] == ("targets",):
                continue  # any name is a target's
            wrong = f"{path[-1][:-1]}_{path[-1][-1]}"
            text = edited(valid, path, wrong, value)
            dotted = re.escape(".".join((*path[:-1], wrong)))
            line = line_of(text, f"{wrong}:")
            mentions = rf"config\.yaml:{line}: {dotted} is not a known key; .*'?{path[-1]}'?"
            yield Malformed(f"{number} {'.'.join(path)} misspelled", text, mentions=mentions)


def wrong_types() -> Iterator[Malformed]:
    marker = "wrong type here"
    for number, valid in enumerate(VALID):
        for path, value in keys_of(valid):
            for wrong in ([marker], {marker: 1}) if not isinstance(value, dict) else ([marker], marker):
                text = edited(valid, path, path[-1], wrong)
                mentions = rf"config\.yaml:\d+: {re.escape('.'.join(path))}\b"
                yield Malformed(f"{number} {'.'.join(path)} as {type(wrong).__name__}", text, mentions=mentions)


def missing_keys() -> Iterator[Malformed]:
    from shared.config.reference import json_schema

    schema = json_schema()
    required = {name for section in (schema, *schema["$defs"].values()) for name in section.get("required", ())}
    optional_somewhere = {"name", "every", "path", "data", "optimizer"}  # required in one section, not in another
    for number, valid in enumerate(VALID):
        for path, _ in keys_of(valid):
            if path[-1] not in required or path[0] == "targets" or (path[-1] in optional_somewhere and len(path) > 1):
                continue
            mentions = rf"config\.yaml.*: {re.escape('.'.join(path))} is missing"
            yield Malformed(f"{number} {'.'.join(path)} missing", edited(valid, path, None), mentions=mentions)


def overrides() -> Iterator[Malformed]:
    text = yaml.dump(VALID[0], Dumper=_NoAliases, sort_keys=False)
    impossible = [
        "seed=-1", "seed=9223372036854775808", "seed=1.5", "seed=1e999999", "seed=" + "9" * 5000,
        "model.vocab_size=0", "model.vocab_size=-5", "model.vocab_size=99999999999", "model.hidden_size=0",
        "model.num_hidden_layers=0", "model.num_attention_heads=0", "model.num_attention_heads=3",
        "model.num_key_value_heads=3", "model.num_key_value_heads=8", "model.head_dim=7", "model.head_dim=0",
        "model.rms_norm_eps=0", "model.rms_norm_eps=-1e-5", "model.rope_theta=.inf", "model.rope_theta=.nan",
        "model.initializer_range=0", "model.initializer_range=1e-999", "data.held_out_fraction=1",
        "data.held_out_fraction=-0.1", "data.held_out_fraction=5%", "data.cache_dir=''", 'data.cache_dir="\\0"',
        'data.cache_dir="\\ud800"', "data.source.files=''", "data.packing=tight", "optimizer.beta1=1",
        "optimizer.beta2=1.5", "optimizer.eps=0", "optimizer.weight_decay=-1", "optimizer.clip_norm=0",
        "optimizer.ema_decay=1", "schedule.steps=0", "schedule.steps=1e3", "schedule.steps=1000000000",
        "schedule.warmup_steps=21", "schedule.warmup_steps=-1", "schedule.learning_rate=0",
        "schedule.learning_rate=fast", "schedule.final_learning_rate=-1", "batch.global_batch=0",
        "batch.global_batch=9", "batch.sequence_length=0", "precision=fp16", "precision=null", "remat=some",
        "accumulation.microbatch=3", "accumulation.microbatch=16", "parallel.data=3", "parallel.data=true",
        "offload.optimizer=disk", "execution.attention=flash", "execution.torch.compile=1", "checkpoint.every=0",
        "checkpoint.keep=0", "evaluation.max_rows=0", "logging.every=0", "logging.tensorboard=on",
        "targets.cpu.remat=some", "targets.cpu.batch.global_batch=4", "targets.cpu.accumulation.microbatch=5",
    ]  # fmt: skip
    unreadable = [
        "schedule", "schedule.steps", "=3", "a..b=3", ".=1", "schedule.steps=", "schedule.steps=[", "batch={a",
        "schedule.steps='1", "remat=!!python/none x", "seed=a: b", "remat.full=true", "seed.value=1", "batch=null",
        "schedule.name=wsd", "schedule.name=constant", "optimizer.name=sgd", "optimizer.name=lion", "model=llama",
        "model.family=gpt2", "learning_rate=1", "targets=cpu", "targets={a: 1}", "data.source.kind=speeches",
        "batch={global_batch: 8, global_batch: 8}", "seed=&a 1.5", "x\ny=1", "seed=1\n2",
    ]  # fmt: skip
    for override in impossible + unreadable:
        shown = re.escape(override[:90].replace("\n", r"\n"))
        yield Malformed(override[:40], text, (override,), mentions=shown)


def unreadable_files() -> Iterator[Malformed]:
    texts = {
        "empty": "", "a comment": "# nothing\n", "a list": "- 1\n- 2\n", "a number": "3\n", "a sentence": "train it\n",
        "null": "null\n", "json cut short": '{"seed": 1, "model": {', "tabs": "seed:\n\t1\n", "colons": "a: b: c\n",
        "an open quote": "seed: 'x\n", "an open list": "seed: [1, 2\n", "two documents": "seed: 1\n---\nseed: 2\n",
        "twice the same key": "seed: 1\nseed: 1\n", "a number as key": "1: 2\n", "a list as key": "? [a]\n: 2\n",
        "an unknown alias": "seed: *x\n", "a cycle": "seed: &x\n  y: *x\n", "a python tag": "seed: !!python/tuple []\n",
        "a directive": "%TAG\n", "an escape": 'seed: "\\q"\n', "an impossible character": 'seed: "\\UFFFFFFFF"\n',
        "a control character": "seed: \x07\n", "deep lists": "seed: " + "[" * 3000, "deep maps": "{a: " * 3000,
        "many aliases": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 9)),
        "a merge key": "a: &a {seed: 1}\n<<: *a\n", "bad indentation": "model:\n  family: llama\n seed: 1\n",
        "only a seed": "seed: 1\n", "a web page": "<!DOCTYPE html>\n<html><body>404</body></html>\n",
    }  # fmt: skip
    for name, text in texts.items():
        yield Malformed(name, text, mentions=r"config\.yaml")


MALFORMED = [*misspelled_keys(), *wrong_types(), *missing_keys(), *overrides(), *unreadable_files()]


def the_one_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run the command, which must fail as a user's mistake does; what it said."""
    assert main(list(argv), NoFramework()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    assert err[:-1].isprintable() and "Traceback" not in err and len(err) < 500
    return err[:-1]


def test_there_are_at_least_200_different_malformed_configs() -> None:
    assert len({(case.text, case.overrides) for case in MALFORMED}) >= 200


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
def test_a_malformed_config_is_one_line_and_exit_2(
    case: Malformed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(case.text)
    line = the_one_line(capsys, "--config", "config.yaml", *case.overrides)
    assert re.search(case.mentions, line), line
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"], "a refused run leaves nothing behind"


@pytest.mark.parametrize(
    ("argv", "mentions"),
    [
        ([], "--config"),
        (["--config"], "--config"),
        (["--config", "confg.yaml"], "did you mean 'config.yaml'"),
        (["--config", "nowhere/config.yaml"], "no folder nowhere"),
        (["--config", "."], "folder"),
        (["--config", "x" * 300], "cannot be read"),
        (["--config", "a\nb"], "no such file"),
        (["--config", "latin1.yaml"], "latin1.yaml:2: byte 0xe9"),
        (["--config", "model.safetensors"], "larger than"),
        (["--config", "config.yaml", "--target", "gpu"], "--target gpu"),
        (["--config", "config.yaml", "--traget", "cpu"], "--traget"),
        (["--config", "config.yaml", "--stop-at-step", "soon"], "--stop-at-step"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    argv: list[str],
    mentions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(yaml.dump(VALID[0], Dumper=_NoAliases))
    Path("latin1.yaml").write_bytes(b"seed: 1\n# caf\xe9\n")
    Path("model.safetensors").write_bytes(b"\0" * (2 << 20))
    assert mentions in the_one_line(capsys, *argv)


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ("data.source.files=corpse/*.txt", r"corpse/\*\.txt"),
        ("data.source.files=corpus/latin1.txt", r"latin1\.txt"),
        ("data.source={kind: jsonl, files: corpus/bad.jsonl}", r"bad\.jsonl:2"),
        ("data.source={kind: jsonl, files: corpus/good.jsonl, field: txt}", "did you mean 'text'"),
        ("data.source={kind: parquet, files: corpus/good.jsonl}", r"good\.jsonl"),
        ("data.tokenizer={kind: file, path: tokeniser.json, end_of_text: x}", r"tokeniser\.json"),
        ("data.tokenizer={kind: file, path: corpus/good.jsonl, end_of_text: x}", r"good\.jsonl"),
        ("data.tokenizer={kind: gpt2, path: nowhere}", "nowhere"),
        ("model.vocab_size=100", r"model\.vocab_size \(100\)"),
        ("batch.global_batch=100000", "100,?000"),
        ("data.cache_dir=config.yaml", r"config\.yaml"),
    ],
)
def test_unusable_data_is_one_line_and_exit_2(
    override: str,
    mentions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(yaml.dump({**VALID[0], "accumulation": {}, "targets": {}}, Dumper=_NoAliases))
    Path("corpus").mkdir()
    for number in range(40):
        Path(f"corpus/{number}.txt").write_text(f"Document {number}. " * 20)
    Path("corpus/latin1.txt").write_bytes(b"caf\xe9")
    Path("corpus/bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    Path("corpus/good.jsonl").write_text('{"text": "a"}\n')
    files = () if "files" in override else ("data.source.files=corpus/[0-9]*.txt",)
    assert main(["--config", "config.yaml", *files, override], NoFramework()) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(mentions, errors[0]), errors


@pytest.mark.parametrize("package", ["jaxtrain", "torchtrain"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "configs/demoo.yaml"], "configs/demoo.yaml: no such file; did you mean 'demo.yaml'?"),
        (
            ["--config", "configs/demo.yaml", "schedule.stepz=3"],
            "schedule.stepz=3 on the command line: schedule.stepz is not a known key; did you mean 'steps'?",
        ),
    ],
    ids=["missing file", "unknown key"],
)
def test_the_real_commands_say_the_same(package: str, argv: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", package, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
