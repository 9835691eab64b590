"""A YAML document that remembers where every value was written.

A person who mistypes a key wants to read ``configs/run.yaml:12``, so the values travel with their origins: a map from
each key's path to the line (or the command-line override) that gave it. The dialect is YAML 1.2's core: ``3e-3`` is a
number, and only ``true`` and ``false`` are booleans (in the older YAML that PyYAML speaks by itself, ``3e-3`` is text
and ``off`` is false). Keys are text and are given once; a value may be shared by an alias, but may not contain itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from shared.errors import UserError

KeyPath = tuple[str, ...]
"""The keys that lead to a value: ``("model", "hidden_size")``."""

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_NUMBER_LENGTH = 64
"""Limits far above any real config: a file beyond them is not one, and must not exhaust this machine."""


@dataclass(frozen=True, order=True)
class Origin:
    """Where a value was written; origins sort as a reader meets them: files by line, then the command line."""

    rank: tuple[int, int]
    """(0, line) in a file; (1, n) for the n-th override of the command line."""
    location: str
    """``FILE:LINE``, or the override with "on the command line"."""

    @property
    def on_command_line(self) -> bool:
        return self.rank[0] == 1


Place = Callable[[int], Origin]
"""Gives the origin of a line of the text being read."""


@dataclass
class Document:
    """Plain values (mappings, lists, text, numbers, booleans, null) and the origin of every key among them."""

    name: str
    """What to call the whole document in an error: the file's path."""
    values: Any
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def set(self, path: KeyPath, value: Any, origins: dict[KeyPath, Origin]) -> None:
        """Put ``value`` at ``path``; ``origins`` are those of ``value``'s keys, by their whole path. Sections that
        are missing on the way are made."""
        section = self.values
        for depth, key in enumerate(path[:-1], start=1):
            if not isinstance(section.get(key), dict):
                section[key] = {}
                self.origins[path[:depth]] = origins[path]
            section = section[key]
        section[path[-1]] = value
        self.origins = {p: o for p, o in self.origins.items() if p[: len(path)] != path} | origins

    def get(self, path: KeyPath) -> Any:
        """The value at ``path``, or None."""
        value = self.values
        for key in path:
            if isinstance(value, list):
                value = dict(zip(map(str, range(len(value))), value, strict=True))
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def under(self, path: KeyPath) -> dict[KeyPath, Origin]:
        """The origins of ``path`` and of everything inside it."""
        return {p: o for p, o in self.origins.items() if p[: len(path)] == path}


def complaint(location: str, message: str) -> UserError:
    """The error ``location: message``, on one line whatever the user's keys and values contain."""
    text = f"{location}: {message}"
    return UserError("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def read_document(path: str | Path) -> Document:
    """Read a config file.

    Raises:
        UserError: the file is not there, cannot be read, or is not a mapping of sections in YAML.
    """
    name = str(path)

    def place(line: int) -> Origin:
        return Origin((0, line), f"{name}:{line}")

    values, origins = parse(_read_text(Path(path)), place)
    if values is None:
        raise complaint(name, "the file is empty; see configs/ for examples")
    if not isinstance(values, dict):
        raise complaint(f"{name}:1", f"the file holds {describe(values)} where sections such as 'model:' belong")
    return Document(name, values, origins)


def parse(text: str, place: Place, prefix: KeyPath = ()) -> tuple[Any, dict[KeyPath, Origin]]:
    """Parse YAML into plain values and the origins of all keys; paths in the origins begin with ``prefix``.

    Raises:
        UserError: the text is not YAML of the dialect that this module describes.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be read"
        if problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        hint = "; text that begins with * needs quotes" if "alias" in f"{problem} {error.context}" else ""
        raise complaint(place(mark.line + 1 if mark else 1).location, f"not valid YAML: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise complaint(place(line).location, f"character {_code_point(error)} cannot be in YAML") from None
    except RecursionError:
        raise complaint(place(1).location, f"nested more than {MAX_DEPTH} levels deep") from None
    except (ValueError, OverflowError):  # PyYAML's chr() of an escape such as "\UFFFFFFFF"
        raise complaint(place(1).location, "not valid YAML: an escape in quotes names no character") from None
    builder = _Builder(place)
    return (None if root is None else builder.build(root, prefix)), builder.origins


def describe(value: Any) -> str:
    """A value as an error shows it: short, and with its type where the type is what is wrong."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "a section"
        case list():
            return "a list"
        case str():
            return f"the text {shorten(value)!r}"
        case _:
            return f"the number {value}"


def shorten(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


# ----------------------------------------------------------------------------------------------------------- the file


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise complaint(str(path), f"no such file; {_nearest_file(path)}") from None
    except IsADirectoryError:
        raise complaint(str(path), "is a folder, not a file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise complaint(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise complaint(str(path), f"larger than {MAX_BYTES >> 20} MiB: not a config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise complaint(f"{path}:{line}", f"byte 0x{data[error.start]:02x} is not UTF-8 text") from None


def _nearest_file(path: Path) -> str:
    try:
        names = {entry.stem: entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")}
    except OSError:
        return f"there is no folder {path.parent} either"
    if close := get_close_matches(path.stem, names, n=1):
        return f"did you mean '{names[close[0]]}'?"
    return f"its folder holds {shorten(', '.join(sorted(names.values())), 200) or 'no .yaml file'}"


def _code_point(error: yaml.reader.ReaderError) -> str:
    # PyYAML gives a number for text and bytes for bytes; this module only ever gives it text.
    character = error.character
    return f"U+{character if isinstance(character, int) else ord(character):04X}"


# --------------------------------------------------------------------------------------------------------- the dialect


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and composer with the tags of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as the parent class has it


_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
_SEQ, _MAP = "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"

for _tag, _pattern, _first in (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


class _Builder:
    """Turns PyYAML's nodes into values; nodes know their lines, finished values do not."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.origins: dict[KeyPath, Origin] = {}
        self.open: set[int] = set()  # nodes that contain the present one: meeting one again is a cycle
        self.num_values = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.complain(node, f"more than {MAX_VALUES} values: not a config")
        if id(node) in self.open:
            raise self.complain(node, "an alias makes this value contain itself")
        if len(self.open) >= MAX_DEPTH:
            raise self.complain(node, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if node.tag not in (_SEQ, _MAP):
            raise self.complain(node, f"the tag {_written(node.tag)} is not supported")
        self.open.add(id(node))
        value = self.mapping(node, path) if isinstance(node, yaml.MappingNode) else self.sequence(node, path)
        self.open.remove(id(node))
        return value

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.complain(key_node, "a key must be text, not a list or a section")
            key = self.scalar(key_node)
            if not isinstance(key, str):
                raise self.complain(key_node, f"the key {shorten(key_node.value)} is not text; write it in quotes")
            line = key_node.start_mark.line + 1
            where = ".".join((*path, shorten(key)))
            if key in values:
                raise self.complain(key_node, f"{where} is given twice; first on line {lines[key]}")
            lines[key] = line
            self.origins[(*path, key)] = self.place(line)
            values[key] = self.build(value_node, (*path, key))
        return values

    def sequence(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        return [self.build(item, (*path, str(index))) for index, item in enumerate(node.value)]

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if node.tag == _STR:
            if "\0" in text:
                raise self.complain(node, f"{shorten(text)!r} holds a NUL character")
            return text
        if node.tag in (_INT, _FLOAT) and len(text) > MAX_NUMBER_LENGTH:
            raise self.complain(node, f"a number of {len(text)} characters is longer than any that fits")
        try:
            return _SCALARS[node.tag](text)
        except KeyError:
            raise self.complain(node, f"the tag {_written(node.tag)} is not supported") from None
        except ValueError:
            kind = node.tag.rsplit(":", 1)[-1]
            raise self.complain(node, f"{shorten(text)!r} is not a valid {kind}") from None

    def complain(self, node: yaml.Node, message: str) -> UserError:
        return complaint(self.place(node.start_mark.line + 1).location, message)


def _written(tag: str) -> str:
    return shorten(tag.replace("tag:yaml.org,2002:", "!!"))


def _integer(text: str) -> int:
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_SCALARS: dict[str, Callable[[str], Any]] = {
    _NULL: lambda _: None,
    _BOOL: _boolean,
    _INT: _integer,
    _FLOAT: _float,
}
