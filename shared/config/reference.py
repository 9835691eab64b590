"""The schema in other forms: JSON Schema for editors, a Markdown reference for readers.

Both are made from the fields' own documentation in :mod:`shared.config.schema`, so they cannot say anything else; the
committed copies, ``configs/schema.json`` and ``docs/configuration.md``, are compared with it by a test.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shared.config.recipe import IDENTITY
from shared.config.schema import Config

Schema = dict[str, Any]

INTRODUCTION = """\
# Configuration

A run is one YAML file. This page lists every key that it may hold; it is written by
`python -m shared.config --reference docs/configuration.md` from the documentation in `shared/config/schema.py`.

- **Check a file** without training: `python -m shared.config --check configs/demo.yaml`.
- **Override** a key for one run: `python -m jaxtrain --config configs/demo.yaml schedule.steps=100 remat=full`. A value
  is YAML, so a whole section can be given too: `'schedule={name: constant, steps: 100, learning_rate: 1e-3,
  warmup_steps: 0}'`.
- **Targets** hold overrides by accelerator. The file comes first, then its `targets` entry, then the command line, key
  by key.
- **In an editor** with YAML support, `# yaml-language-server: $schema=schema.json` as the first line of a file in
  `configs/` completes and checks keys.

The sections under *Identity* decide the numbers of a run; their hash is the *recipe hash*, which is equal for two runs
that are meant to be the same (where files lie is left out of it). The sections under *Execution* decide only where and
how fast it happens. Keys without a default must be given. The dialect is YAML 1.2: `3e-3` is a number, and only `true`
and `false` are booleans.
"""


def json_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a config file."""
    schema: Schema = _tidy(Config.model_json_schema())
    schema["title"] = "Training run"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def reference_text() -> str:
    """The Markdown reference: a table of fields for every section, in the order of the schema."""
    schema = json_schema()
    identity = {key: value for key, value in schema["properties"].items() if key in IDENTITY}
    execution = {key: value for key, value in schema["properties"].items() if key not in IDENTITY}
    parts = [INTRODUCTION]
    for title, properties in (("Identity", identity), ("Execution", execution)):
        parts.append(f"## {title}\n")
        plain = {key: value for key, value in properties.items() if not _is_section(value)}
        parts.append(_table({"properties": plain, "required": schema["required"]}))
        for key, value in properties.items():
            if _is_section(value):
                parts += _section(schema, key, value, level=3)
    return "\n".join(parts).rstrip() + "\n"


# -------------------------------------------------------------------------------------------------------- JSON Schema


def _tidy(node: Any, names_are_keys: bool = False) -> Any:
    """Drop the titles that only repeat a key, and turn the documentation's markup into Markdown."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {}
    for key, value in node.items():
        if key == "title" and not names_are_keys:
            continue
        if key == "description" and not names_are_keys:
            tidy[key] = _markdown(value)
        else:
            tidy[key] = _tidy(value, names_are_keys=key in ("properties", "$defs") and not names_are_keys)
    return tidy


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text)
    return re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split()))


# ---------------------------------------------------------------------------------------------------------- reference


def _section(schema: Schema, key: str, value: Schema, level: int) -> list[str]:
    """The heading, the description and the tables of the section at ``key``, and then those of its inner sections."""
    heading = f"{'#' * level} `{key}`\n"
    if "oneOf" in value:
        parts = [heading, value["description"] + "\n"]
        tag = value["discriminator"]["propertyName"]
        for choice in value["oneOf"]:
            variant = _resolve(schema, choice["$ref"])
            properties = dict(variant["properties"])
            name = properties.pop(tag)["const"]  # it stands in the heading; the table has the rest
            parts.append(f"**`{tag}: {name}`** - {variant['description']}\n")
            parts += _fields(schema, key, variant | {"properties": properties}, level)
        return parts
    if "additionalProperties" in value:
        keys = ", ".join(f"`{name}`" for name in _resolve(schema, value["additionalProperties"]["$ref"])["properties"])
        rule = f"Each entry is named after an accelerator and may hold, in part or in full: {keys}.\n"
        return [heading, value["description"] + "\n", rule]
    section = _resolve(schema, value["$ref"])
    description = section["description"]
    if "anyOf" in section:
        words = [word for choice in section["anyOf"] for word in choice.get("enum", ())]
        description += "\n\nOne of the words " + ", ".join(f"`{word}`" for word in words) + ", or a section:"
        section = section["anyOf"][-1]
    return [heading, description + "\n", *_fields(schema, key, section, level)]


def _fields(schema: Schema, key: str, section: Schema, level: int) -> list[str]:
    parts = [_table(section)] if section["properties"] else []
    for name, value in section["properties"].items():
        for inner in (value, *value.get("anyOf", ())):
            if _is_section(inner):
                parts += _section(schema, f"{key}.{name}", inner, level + 1)
    return parts


def _table(section: Schema) -> str:
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, value in section["properties"].items():
        if name in section.get("required", ()):
            default = "required"
        elif _is_section(value):
            default = "see below"
        else:
            default = f"`{json.dumps(value['default'], ensure_ascii=False)}`".replace('"', "")
        meaning = value.get("description", "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(value)} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def _is_section(value: Schema) -> bool:
    return "$ref" in value or "oneOf" in value or "additionalProperties" in value


def _type(value: Schema) -> str:
    if _is_section(value):
        return "section"
    if "anyOf" in value:
        return " or ".join(_type(choice) for choice in value["anyOf"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return "list of " + _type(value["items"])
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if value["type"] in ("integer", "number"):
        noun = {"integer": "whole number", "number": "number"}[value["type"]]
        if "minimum" in value and value["minimum"] == value.get("maximum"):
            return f"`{value['minimum']}`"
        low, high = _bound(value, "inimum", ">", "≥"), _bound(value, "aximum", "<", "≤")
        return " ".join([noun, " and ".join(bound for bound in (low, high) if bound)]).rstrip()
    return {"string": "text", "boolean": "`true` or `false`", "null": "`null`"}[value["type"]]


def _bound(value: Schema, suffix: str, strict: str, inclusive: str) -> str:
    for key, sign in ((f"exclusiveM{suffix}", strict), (f"m{suffix}", inclusive)):
        if key in value:
            # Limits of the number format itself say nothing to a reader.
            number = value[key]
            return "" if number >= 2**31 else f"{sign} {int(number) if number == int(number) else number:,}"
    return ""


def _resolve(schema: Schema, reference: str) -> Schema:
    section: Schema = schema["$defs"][reference.rsplit("/", 1)[1]]
    return section
