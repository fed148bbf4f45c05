"""Checks of values."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

import torch

from ..errors import InputError

# The remedy for a path that `check_text` refuses.
RENAME = "rename that file or folder"


def check_number(field: str, value: float, low: float, high: float) -> None:
    """Raise InputError unless low <= `value` <= high. NaN is refused."""
    if not (isinstance(value, Real) and low <= value <= high):
        raise InputError(f"{field}: got {value!r:.40}, expected a number from {low} to {high}")


def check_whole(field: str, value: float, low: int, high: int) -> None:
    """Raise InputError unless `value` is a whole number from `low` to `high`. 20.0 counts as whole."""
    if not (isinstance(value, Real) and low <= value <= high and value == int(value)):
        raise InputError(f"{field}: got {value!r:.40}, expected a whole number from {low} to {high}")


def check_name(field: str, value: object, known: Iterable[str]) -> None:
    """Raise InputError unless `value` is one of the names `known`."""
    names = list(known)
    if value not in names:
        raise InputError(f"{field}: got {value!r:.40}, expected one of {', '.join(names)}")


def check_text(field: str, text: str, remedy: str = "write the text again") -> None:
    """Raise InputError for a lone surrogate, which strings in JSON and Python can contain, but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{field}: contains half a character (a lone surrogate) at position {error.start}; {remedy}"
        ) from None


def check_finite(field: str, values: torch.Tensor) -> None:
    """Raise InputError if `values` [B, C, H, W] contain NaN or infinity. The error contains the first position."""
    wrong = ~values.isfinite()
    count = int(wrong.sum())
    if count:
        image, channel, row, column = (int(index) for index in wrong.nonzero()[0])
        raise InputError(
            f"{field}: {count} of {values.numel()} values are NaN or infinite, the first in image {image}, channel "
            f"{channel}, row {row}, column {column}; sample again in bf16 or fp32"
        )
