"""Types of manifest values: strict where a silent conversion would hide a mistake."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]


def _number(value: Any) -> Any:
    """true and "3" are not numbers."""
    if isinstance(value, bool | str):
        raise ValueError("not a number")
    return value


def _whole(value: Any) -> Any:
    """1e3 is the whole number 1000."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


MAX_NUMBER = 10**12

Flag = Annotated[bool, Strict()]
Count = Annotated[int, Field(ge=1, le=MAX_NUMBER), BeforeValidator(_whole)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_NUMBER), BeforeValidator(_whole)]
Blocks = Annotated[int, Field(ge=1, le=1000), BeforeValidator(_whole)]
Width = Annotated[int, Field(ge=1, le=100_000), BeforeValidator(_whole)]
Rank = Annotated[int, Field(ge=1, le=256), BeforeValidator(_whole)]
PromptLength = Annotated[int, Field(ge=1, le=512), BeforeValidator(_whole)]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)]
PositiveShare = Annotated[float, Field(gt=0, le=1), BeforeValidator(_number)]
Temperature = Annotated[float, Field(ge=0, le=2), BeforeValidator(_number)]
PositiveNumber = Annotated[float, Field(gt=0, le=MAX_NUMBER), BeforeValidator(_number)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MAX_NUMBER), BeforeValidator(_number)]
Momentum = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)]
Text = Annotated[str, Field(min_length=1)]
JinjaText = Annotated[str, Field(pattern=r"\{[{%]")]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", re.IGNORECASE)
_UNITS = {"gib": 2**30, "gb": 2**30, "mib": 2**20, "mb": 2**20}


def parse_size(text: str) -> int:
    """Bytes of "16GB" or "900 MiB". GB and GiB both mean 2**30, as for the memory of a GPU."""
    match = _SIZE.fullmatch(text.strip())
    if not match or float(match[1]) == 0:
        raise ValueError(f'{text!r} is not a memory size such as "16GB" or "900MiB"')
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("not a size")
    parse_size(value)
    return value


Size = Annotated[str, BeforeValidator(_size), Field(json_schema_extra={"format": "memory-size"})]


class Section(BaseModel):
    """A part of the manifest whose unknown keys are kept as metadata."""

    model_config = ConfigDict(
        frozen=True, extra="allow", use_attribute_docstrings=True, protected_namespaces=()
    )


class StrictSection(Section):
    """A part of the manifest where an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")
