"""What every section of a config is, and the kinds of numbers that its fields hold."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # sizes index int32 arrays
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # keys 64-bit counters
NonEmpty = Annotated[str, Field(min_length=1)]

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _read_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB|B|)", value)
    if found is None:
        raise PydanticCustomError("bytes", "must be a number of bytes, such as 500 MiB or 2 GiB")
    return int(float(found[1]) * _UNITS[found[2]])


Bytes = Annotated[
    int,
    BeforeValidator(_read_bytes),
    Field(gt=0, lt=2**63),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
"""A number of bytes, or text such as ``2 GiB``."""


class Section(BaseModel):
    """A strict, immutable part of the config whose field documentation is the docstring below each field."""

    shorthand: ClassVar[str | None] = None
    """The field that a bare word stands for where the section belongs: ``remat: full`` is ``remat: {policy: full}``."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        if cls.shorthand:
            words = {key: value for key, value in schema["properties"][cls.shorthand].items() if key != "default"}
            choices = [choice for choice in words.get("anyOf", [words]) if choice.get("type") != "null"]
            schema = {"description": schema["description"], "anyOf": [*choices, schema]}
        return schema
