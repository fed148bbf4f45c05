"""What goes wrong while decoding: memory that runs out, and latents that hold no picture."""

from __future__ import annotations

import gc

import torch

from ..accelerator import empty_cache
from ..errors import InputError


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` says that memory ran out, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def forget(error: BaseException) -> BaseException:
    """Return `error` without its frames, whose variables would keep tensors alive, and give their memory back."""
    error.__traceback__ = None
    error.__context__ = None
    gc.collect()
    empty_cache()
    return error


def check_finite(field: str, values: torch.Tensor) -> None:
    """Raise InputError if `values` [B, C, H, W] hold NaN or infinity, saying how many and where the first is."""
    wrong = ~values.isfinite()
    count = int(wrong.sum())
    if count:
        picture, channel, row, column = (int(index) for index in wrong.nonzero()[0])
        raise InputError(
            f"{field}: {count} of {values.numel()} values are NaN or infinite, the first in picture {picture}, channel "
            f"{channel}, row {row}, column {column}; sample again in bf16 or fp32"
        )
