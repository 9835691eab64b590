"""What validation found, told in one line: where it is written, what is wrong, and the nearest valid choice.

Pydantic reports every problem at once, by a location inside the schema (which names the chosen variant of a union too)
and in a programmer's words. Here each becomes a sentence about the user's own keys, at the line or the override that
wrote them. The first in the order of the file is told, and how many more there are.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.config.document import Document, KeyPath, Origin, complaint, describe, shorten
from shared.config.recipe import IDENTITY
from shared.config.schema import Config, Section, TargetOverrides
from shared.errors import UserError, nearest


@dataclass(frozen=True)
class Problem:
    """One mistake, and where it was written."""

    origin: Origin
    path: KeyPath
    kind: str
    """Pydantic's name of the mistake."""
    text: str


def first_problem(mistakes: list[ErrorDetails], document: Document) -> UserError:
    """The error to show for all that validation found in ``document``."""
    problems = [_explain(details, document) for details in mistakes]
    # A misspelled required key is one mistake, though it is reported twice: as unknown and as missing.
    misspelled = [p.path for p in problems if p.kind == "extra_forbidden"]
    problems = [p for p in problems if not (p.kind == "missing" and _is_misspelled(p.path, misspelled))]
    first, *others = sorted(problems, key=lambda p: (p.origin, p.kind == "missing"))
    return complaint(first.origin.location, first.text + (f" (and {len(others)} more)" if others else ""))


def _is_misspelled(missing: KeyPath, unknown: list[KeyPath]) -> bool:
    siblings = [path[-1] for path in unknown if path[:-1] == missing[:-1]]
    return bool(get_close_matches(missing[-1], siblings, n=1))


# ---------------------------------------------------------------------------------------------- places in the schema


@dataclass(frozen=True)
class Spot:
    """A pydantic location in the user's terms."""

    path: KeyPath
    """The keys as the user writes them."""
    parent: type[Section] | None
    """The section that holds the last key; None inside a plain mapping such as ``targets``."""
    tag: str | None
    """The key that chooses the parent among variants (``family``, ``kind``, ``name``), where it is one."""
    field: FieldInfo | None
    """The last key's field, when the parent has it."""


def _find(location: tuple[int | str, ...]) -> Spot:
    """Follow a pydantic location through the schema, leaving out the names of variants that pydantic puts in it."""
    path: KeyPath = ()
    section: type[Section] | None = Config
    spot = Spot((), None, None, None)
    tag: str | None = None
    steps = [str(step) for step in location if step != "[key]"]
    while steps:
        path = (*path, steps.pop(0))
        field = section.model_fields.get(path[-1]) if section else None
        spot = Spot(path, section, tag, field)
        if field is None:
            tag = None  # a name in ``targets``: what follows is inside the section that it holds
            section = TargetOverrides if path[:-1] == ("targets",) else None
            continue
        tag = field.discriminator if isinstance(field.discriminator, str) else None
        variants = _sections(field.annotation)
        if tag is not None:
            chosen = steps.pop(0) if steps else None
            section = next((v for v in variants if chosen in _names(v, tag)), None)
        else:
            section = variants[0] if variants else None
    return spot


def _sections(annotation: Any) -> list[type[Section]]:
    """The section classes in a field's type; none for a mapping of free names."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [s for arg in get_args(annotation) for s in _sections(arg)] if get_origin(annotation) is not dict else []


def _choices(annotation: Any) -> list[str]:
    """The words that a field may be."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for arg in get_args(annotation) for choice in _choices(arg)]


def _words(field: FieldInfo) -> list[str]:
    """The words that may stand for the section that a field holds."""
    return [
        word
        for section in _sections(field.annotation)
        if section.shorthand
        for word in _choices(section.model_fields[section.shorthand].annotation)
    ]


def _names(variant: type[Section], tag: str) -> tuple[str, ...]:
    return get_args(variant.model_fields[tag].annotation)


def _homes(key: str) -> list[str]:
    """Every path of the config, outside ``targets``, at which a field is called ``key``."""
    homes: list[str] = []

    def search(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            if name == key and prefix + name not in homes:
                homes.append(prefix + name)
            for inner in _sections(field.annotation):
                search(inner, f"{prefix}{name}.")

    search(Config, "")
    return homes


# ------------------------------------------------------------------------------------------------------- explanations


def _explain(details: ErrorDetails, document: Document) -> Problem:
    spot = _find(details["loc"])
    if isinstance(document.get(spot.path[:-1]), str):  # a word that stands for its section
        spot = replace(spot, path=spot.path[:-1])
    origin = _origin(document, spot.path)
    kind, context = details["type"], details.get("ctx", {})
    match kind:
        case "extra_forbidden":
            origin, text = _unknown_key(spot, origin, document)
        case "missing":
            origin, text = _missing_key(spot, origin, document)
        case "union_tag_invalid" | "union_tag_not_found":
            origin, text = _wrong_variant(spot, origin, document)
        case "value_error":
            origin, text = _broken_rule(spot, str(context["error"]), document)
        case _:
            value = document.get(spot.path)
            text = f"{_dotted(spot.path)} {_expectation(kind, context, details['msg'])}; got {describe(value)}"
            if kind == "int_type" and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
                text += f"; write {int(value)}"
            if kind == "literal_error" and isinstance(value, str) and spot.field is not None:
                text = f"{_dotted(spot.path)} cannot be {describe_name(value)}; "
                text += nearest(_USUAL_NAMES.get(value, value), _choices(spot.field.annotation))
            if kind == "model_type" and spot.field is not None and (words := _words(spot.field)):
                text = f"{_dotted(spot.path)} must be {_either(words)}, or a section; got {describe(value)}"
            if spot.path[-1:] == ("",):
                text = f"{_dotted(spot.path[:-1])} has an entry without a name"
    return Problem(origin, spot.path, kind, text)


_USUAL_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""What other programs call the formats; by its letters alone, ``fp32`` is nearest to ``tf32``."""


def _origin(document: Document, path: KeyPath) -> Origin:
    """Where ``path`` was written; for a key that is not there, where the section around it was."""
    for depth in range(len(path), 0, -1):
        if (origin := document.origins.get(path[:depth])) is not None:
            return origin
    return Origin((0, sys.maxsize), document.name)


def _dotted(path: KeyPath) -> str:
    return shorten(".".join(path), 120)


def _expectation(kind: str, context: dict[str, Any], message: str) -> str:
    match kind:
        case "int_type":
            return "must be a whole number"
        case "float_type":
            return "must be a number"
        case "finite_number":
            return "must be a finite number"
        case "bool_type":
            return "must be true or false"
        case "string_type":
            return "must be text"
        case "string_unicode":
            return "must be text without half characters (surrogates)"
        case "string_too_short":
            return "must not be empty"
        case "greater_than":
            return f"must be above {context['gt']:,}"
        case "greater_than_equal":
            return f"must be at least {context['ge']:,}"
        case "less_than":
            return f"must be below {context['lt']:,}"
        case "less_than_equal":
            return f"must be at most {context['le']:,}"
        case "literal_error":
            return f"must be {context['expected']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be a section of 'key: value' lines"
        case _:
            return message.replace("Input should be", "must be")


def _unknown_key(spot: Spot, origin: Origin, document: Document) -> tuple[Origin, str]:
    assert spot.parent is not None
    path, key, dotted = spot.path[:-1], spot.path[-1], _dotted(spot.path)
    if spot.parent is TargetOverrides and key in (*IDENTITY, "targets"):
        choices = ", ".join(sorted(TargetOverrides.model_fields))
        return origin, f"{dotted}: a target may not change the run itself, only {choices}"
    variants = _variants(path) if spot.tag else []
    if spot.tag and any(key in variant.model_fields for variant in variants):
        chosen = document.get((*path, spot.tag))
        owners = [name for v in variants if key in v.model_fields for name in _names(v, spot.tag)]
        text = (
            f"{dotted} belongs to {spot.tag} {_either(owners)}, "
            f"but {_dotted((*path, spot.tag))} is {describe_name(chosen)}"
        )
        switch = _origin(document, (*path, spot.tag))
        if switch.on_command_line and not origin.on_command_line:  # the file was right until the override came
            return switch, f"{text}; replace the section: {_replacement(path, spot.parent, document)}"
        return origin, text
    known = list(spot.parent.model_fields)
    close = get_close_matches(key, known, n=1)
    homes = [] if close or path[:1] == ("targets",) else _homes(key)
    hint = f"did you mean {_either(homes)}?" if homes else nearest(key, known)
    return origin, f"{dotted} is not a known key; {hint}"


def _missing_key(spot: Spot, origin: Origin, document: Document) -> tuple[Origin, str]:
    path = spot.path[:-1]
    text = f"{_dotted(spot.path)} is missing"
    if spot.tag is None:
        return origin, text
    switch = _origin(document, (*path, spot.tag))
    text += f"; {spot.tag} {describe_name(document.get((*path, spot.tag)))} needs it"
    return (switch if switch.on_command_line else origin), text


def _wrong_variant(spot: Spot, origin: Origin, document: Document) -> tuple[Origin, str]:
    assert spot.field is not None and isinstance(spot.field.discriminator, str)
    tag = spot.field.discriminator
    section = document.get(spot.path)
    names = [name for variant in _sections(spot.field.annotation) for name in _names(variant, tag)]
    path = (*spot.path, tag)
    if tag in section:
        value = section[tag]
        hint = nearest(value if isinstance(value, str) else "", names)
        return _origin(document, path), f"{_dotted(path)} cannot be {describe_name(value)}; {hint}"
    for wrong in get_close_matches(tag, section, n=1):
        wrong_path = (*spot.path, wrong)
        return _origin(document, wrong_path), f"{_dotted(wrong_path)} is not a known key; did you mean '{tag}'?"
    return origin, f"{_dotted(path)} is missing; valid choices: {', '.join(sorted(names))}"


def _broken_rule(spot: Spot, message: str, document: Document) -> tuple[Origin, str]:
    """A rule between several keys. Its message begins with the key it is about; the place to mend is that key's, or
    that of the first key it names which the command line has set."""
    words = [tuple(word.strip("(),;:").split(".")) for word in message.split()]
    named = [path for word in words if (path := (*spot.path, *word)) in document.origins]
    subject = ".".join((*spot.path, message))
    if not named:
        return _origin(document, spot.path), subject
    origins = [document.origins[path] for path in named]
    overriding = [origin for origin in origins if origin.on_command_line]
    return (overriding or origins)[0], subject


def _variants(path: KeyPath) -> list[type[Section]]:
    """The variants of the section at ``path``, found by any of them."""
    section: type[Section] = Config
    variants: list[type[Section]] = []
    for key in path:
        variants = _sections(section.model_fields[key].annotation)
        section = variants[0]
    return variants


def _replacement(path: KeyPath, variant: type[Section], document: Document) -> str:
    """An override that gives the whole section anew, keeping what ``variant`` understands of it."""
    section, fields = document.get(path), variant.model_fields
    keys = [key for key in section if key in fields]
    keys += [key for key, field in fields.items() if field.is_required() and key not in keys]
    entries = [f"{key}: {_as_yaml(section[key]) if key in section else '...'}" for key in keys]
    return f"'{'.'.join(path)}={{{', '.join(entries)}}}'"


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)


def _either(names: list[str]) -> str:
    *others, last = [f"'{name}'" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def describe_name(value: Any) -> str:
    """A variant's name, or whatever stands in its place."""
    return f"'{shorten(value)}'" if isinstance(value, str) else describe(value)
