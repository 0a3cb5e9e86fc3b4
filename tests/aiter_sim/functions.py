"""Functions that check their arguments as those of a release do, and aiter's enums."""

from __future__ import annotations

import enum
import functools
import inspect
from typing import Any

import torch


class ActivationType(enum.Enum):
    """Members:"""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(enum.Enum):
    """Members:"""

    No = 0
    per_Tensor = 1  # noqa: N815 - aiter's name
    per_Token = 2  # noqa: N815
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


def function(name: str, parameters: str, body: Any) -> Any:
    """A function of this name and these parameters, given as text, that hands all of them to `body` by keyword."""
    names = {"ActivationType": ActivationType, "QuantType": QuantType, "torch": torch}
    signature = inspect.signature(eval(f"lambda {parameters}: None", names))  # the text is in this folder

    @functools.wraps(body)
    def call(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        return body(**bound.arguments)

    call.__name__ = call.__qualname__ = name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
