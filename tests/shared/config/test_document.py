from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shared.config.document import MAX_DEPTH, Origin, parse, read_document
from shared.errors import UserError


def place(line: int) -> Origin:
    return Origin((0, line), f"f:{line}")


def value_of(text: str) -> Any:
    return parse(text, place)[0]


def read_failure(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_document(path)
    message = str(caught.value)
    assert message.isprintable()
    return message.replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-3", 0.003),
        ("1e5", 1e5),
        ("1E+5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-0.5", -0.5),
        ("-.inf", -math.inf),
        ("12", 12),
        ("-12", -12),
        ("+12", 12),
        ("010", 10),  # decimal in YAML 1.2, octal in 1.1
        ("0o10", 8),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("n", "n"),
        ("~", None),
        ("null", None),
        ("1_000", "1_000"),
        ("12:30", "12:30"),  # sexagesimal 750 in YAML 1.1
        ("2024-01-01", "2024-01-01"),  # a date in YAML 1.1
        ("1e", "1e"),
        ("v5e-1", "v5e-1"),
        ("'3'", "3"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
    ],
)
def test_scalars_are_read_as_yaml_1_2_says(text: str, value: object) -> None:
    read = value_of(text)
    assert read == value and type(read) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(value_of(".nan"))


def test_every_key_keeps_its_own_line() -> None:
    values, origins = parse("a: 1\nb:\n  c: 2\n\n  # why\n  d: {e: 3,\n      f: 4}\n", place)
    assert values == {"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}}
    lines = {".".join(path): origin.rank[1] for path, origin in origins.items()}
    assert lines == {"a": 1, "b": 2, "b.c": 3, "b.d": 6, "b.d.e": 6, "b.d.f": 7}


def test_an_alias_repeats_a_value_without_sharing_it() -> None:
    values = value_of("a: &x {b: 1}\nc: *x")
    assert values == {"a": {"b": 1}, "c": {"b": 1}}
    assert values["a"] is not values["c"]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert read_document(path).values == {"seed": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.yaml: the file is empty; see configs/ for examples"),
        ("# only a comment\n", "config.yaml: the file is empty; see configs/ for examples"),
        ("- a\n", "config.yaml:1: the file holds a list where sections such as 'model:' belong"),
        ("text", "config.yaml:1: the file holds the text 'text' where sections such as 'model:' belong"),
        ("a: 1\nb: 2\na: 3\n", "config.yaml:3: a is given twice; first on line 1"),
        ("a:\n  b: 1\n  b: 2\n", "config.yaml:3: a.b is given twice; first on line 2"),
        ("a: 1\n2: 3\n", "config.yaml:2: the key 2 is not text; write it in quotes"),
        ("true: 3\n", "config.yaml:1: the key true is not text; write it in quotes"),
        ("? [a]\n: 3\n", "config.yaml:1: a key must be text, not a list or a section"),
        ("a: b: c\n", "config.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n\tb: 2\n", "config.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: *.txt\n", "config.yaml:1: not valid YAML: expected alphabetic or numeric character, but found '.'; text "
         "that begins with * needs quotes"),
        ("a: 1\nb: *c\n", "config.yaml:2: not valid YAML: found undefined alias 'c'; text that begins with * needs "
         "quotes"),
        ("a: 1\n---\nb: 2\n", "config.yaml:2: not valid YAML: expected a single document in the stream, but found "
         "another document"),
        ("a: &x\n  b: *x\n", "config.yaml:1: an alias makes this value contain itself"),
        ("a: !!python/name:os.system x\n", "config.yaml:1: the tag !!python/name:os.system is not supported"),
        ("a: !!set {b, c}\n", "config.yaml:1: the tag !!set is not supported"),
        ("a: !!int b\n", "config.yaml:1: 'b' is not a valid int"),
        ("a: " + "9" * 5000, "config.yaml:1: a number of 5000 characters is longer than any that fits"),
        ('a: 1\nb: "x\\0y"\n', "config.yaml:2: 'x\\x00y' holds a NUL character"),
        ('a: "\\UFFFFFFFF"\n', "config.yaml:1: not valid YAML: an escape in quotes names no character"),
        ("a: 1\nb: \x07\n", "config.yaml:2: character U+0007 cannot be in YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused_at_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert read_failure(path) == message


@pytest.mark.parametrize("depth", [MAX_DEPTH, 5_000], ids=["beyond our limit", "beyond the parser's recursion"])
def test_deep_nesting_is_refused(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: " + "[" * depth + "]" * depth)
    assert read_failure(path) == f"config.yaml:1: nested more than {MAX_DEPTH} levels deep"


def test_nesting_up_to_the_limit_is_read() -> None:
    depth = MAX_DEPTH
    nested = value_of("[" * depth + "]" * depth)
    for _ in range(depth - 1):
        (nested,) = nested
    assert nested == []


def test_aliases_that_multiply_do_not_exhaust_memory(tmp_path: Path) -> None:
    lines = ["x0: &x0 [1]"] + [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 20)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines))
    assert read_failure(path).endswith("more than 10000 values: not a config")


def test_bytes_that_are_not_utf_8_are_refused_at_their_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"seed: 1\n# caf\xe9\n")
    assert read_failure(path) == "config.yaml:2: byte 0xe9 is not UTF-8 text"


def test_a_missing_file_is_answered_with_the_nearest_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").touch()
    (tmp_path / "large.yaml").touch()
    assert read_failure(tmp_path / "dem.yaml") == "dem.yaml: no such file; did you mean 'demo.yaml'?"
    assert read_failure(tmp_path / "q.yaml") == "q.yaml: no such file; its folder holds demo.yaml, large.yaml"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    assert read_failure(folder / "a.yaml") == f"a.yaml: no such file; there is no folder {folder} either"


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    assert read_failure(tmp_path / "configs") == "configs: is a folder, not a file"


def test_an_endless_file_is_not_read_to_its_end() -> None:
    assert read_failure(Path("/dev/zero")) == "zero: larger than 1 MiB: not a config"


def test_a_path_no_file_can_have_is_refused_on_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in read_failure(tmp_path / "a\0b")
    assert "cannot be read" in read_failure(tmp_path / ("x" * 300))
    assert "no such file" in read_failure(tmp_path / "a\nb.yaml")
