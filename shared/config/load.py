"""From a file, a target and the command line to one validated config.

Later words win: the file, then the file's ``targets:`` entry for this accelerator, then ``key.path=value`` on the
command line. All three are merged as plain values, key by key, before anything is validated, so an override that sets
``execution.attention`` leaves the rest of ``execution`` alone; and every value keeps the place it was written in, so
that an error names the line or the override to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.config.document import Document, KeyPath, Origin, complaint, describe, parse, read_document, shorten
from shared.errors import nearest

if TYPE_CHECKING:
    from shared.config.schema import Config

WHOLE: tuple[KeyPath, ...] = (("remat",),)
"""Sections of which one setting excludes another: what a target gives replaces what the file gives as a whole."""

SHORTHANDS: dict[KeyPath, str] = {("precision",): "preset", ("nonfinite",): "policy"}
"""Sections that an override may complete where the file has a word: ``precision: bfloat16`` and then
``precision.logits=float32``."""


@dataclass(frozen=True)
class Resolved:
    """A config ready to run."""

    config: Config
    """The file with the target's overrides and the command line's merged in."""
    target: str | None
    """The entry of ``targets`` that was merged, or None."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    target: str | None = None,
    detect: Callable[[], str] | None = None,
) -> Resolved:
    """Read, merge and validate a config.

    Args:
        path: the YAML file.
        overrides: ``key.path=value`` words of the command line, applied in order.
        target: the entry of ``targets`` to apply; it must exist.
        detect: names this machine's accelerator. Called only when the config has targets and ``target`` is None; a
            name without an entry applies nothing.

    Raises:
        UserError: with one line naming the file and line, or the override, that is wrong.
    """
    document = read_document(path)
    edits = [_parse_override(text, number) for number, text in enumerate(overrides)]
    edits_of_targets = [edit for edit in edits if edit.path[0] == "targets"]
    edits_of_the_run = [edit for edit in edits if edit.path[0] != "targets"]
    document = _edited(document, edits_of_targets)
    # A mistake in the file is told on every machine, whatever its target would put in the place, and before the
    # accelerator is looked for, which takes seconds. Rules between sections wait: the target may be there for them.
    _check_sections(_edited(document, edits_of_the_run))
    name = _choose_target(document, target, detect)
    if name is not None:
        _merge(document, source=("targets", name), into=())
    return Resolved(_validate(_edited(document, edits_of_the_run)), name)


@dataclass(frozen=True)
class _Edit:
    """One ``key.path=value`` of the command line."""

    path: KeyPath
    value: Any
    origins: dict[KeyPath, Origin]

    def apply(self, document: Document) -> None:
        for depth in range(1, len(self.path)):
            section, key = self.path[:depth], ".".join(self.path[:depth])
            value = document.get(section)
            if isinstance(value, str) and (word := SHORTHANDS.get(section)):
                document.set((*section, word), value, {(*section, word): document.origins[section]})
                continue
            if not isinstance(value, dict | None):
                location = self.origins[self.path].location
                raise complaint(location, f"{key} is {describe(value)}, not a section; set it with {key}=VALUE")
        document.set(self.path, deepcopy(self.value), self.origins)


def _parse_override(text: str, number: int) -> _Edit:
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    origin = Origin((1, number), f"{shorten(text, 100)} on the command line")
    if not equals or not all(path):
        raise complaint(origin.location, "expected KEY.PATH=VALUE, such as schedule.steps=100")
    value = value.strip()
    if not value:
        raise complaint(origin.location, "a value is missing after '='; an empty one is written null")
    if value.startswith("*"):  # a glob, not an alias: there is nothing in an override that one could refer to
        return _Edit(path, value, {path: origin})
    parsed, origins = parse(value, lambda _: origin, prefix=path)
    return _Edit(path, parsed, {path: origin} | origins)


def _edited(document: Document, edits: Sequence[_Edit]) -> Document:
    edited = deepcopy(document)
    for edit in edits:
        edit.apply(edited)
    return edited


def _choose_target(document: Document, target: str | None, detect: Callable[[], str] | None) -> str | None:
    targets = document.values.get("targets", {})
    if target is not None:
        if not targets:
            raise complaint(f"--target {target}", f"{document.name} has no targets")
        if target not in targets:
            raise complaint(f"--target {target}", f"not a target of {document.name}; {nearest(target, targets)}")
        return target
    if not targets or detect is None:
        return None
    found = detect()
    return found if found in targets else None


def _merge(document: Document, source: KeyPath, into: KeyPath) -> None:
    """Set each field under ``source`` at its place under ``into``; a whole section given as null overrides nothing."""
    for key, value in document.get(source).items():
        given, path = (*source, key), (*into, key)
        if isinstance(value, dict) and path not in WHOLE:
            _merge(document, given, path)
        elif into or value is not None:
            origins = document.under(given)
            document.set(path, value, {(*path, *inner[len(given) :]): origin for inner, origin in origins.items()})


def _validate(document: Document) -> Config:
    from pydantic import ValidationError

    from shared.config.problems import first_problem
    from shared.config.schema import Config

    try:
        return Config.model_validate(document.values)
    except ValidationError as error:
        raise first_problem(error.errors(), document) from None


def _check_sections(document: Document) -> None:
    """Raise UserError for what is wrong inside a section, but not for a rule between sections."""
    from pydantic import ValidationError

    from shared.config.problems import first_problem
    from shared.config.schema import Config

    try:
        Config.model_validate(document.values)
    except ValidationError as error:
        mistakes = [details for details in error.errors() if details["loc"]]
        if mistakes:
            raise first_problem(mistakes, document) from None
