"""What every section of a config is, and the kinds of numbers that its fields hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # sizes index int32 arrays
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # keys 64-bit counters
NonEmpty = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A strict, immutable part of the config whose field documentation is the docstring below each field."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
