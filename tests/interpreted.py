"""Triton's interpreter with bf16 as cards have it: rounded to nearest, and multiplied by `tl.dot`.

The interpreter of Triton 3.8 cuts bf16 off where it rounds, and multiplies the bits of bf16 as if they were integers.
It runs in processes that were started with TRITON_INTERPRET=1. Kernels of several threads run one after another: the
interpreter replaces functions of triton.language while a kernel runs.
"""

from __future__ import annotations

import operator
import threading
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

plain_dot, plain_convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float
plain_patch_tensor = interpreter._patch_lang_tensor
plain_run, running = interpreter.GridExecutor.__call__, threading.Lock()


def widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
    return plain_dot(self, widened(a), widened(b), *arguments)


def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    if (source.scalar, target.scalar) != (tl.float32, tl.bfloat16):
        return plain_convert(data, source, target, rounding)
    values = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=np.float32).copy())
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)


def run_alone(self: Any, *arguments: Any, **options: Any) -> None:
    with running:
        plain_run(self, *arguments, **options)


def patch_tensor(tensor: Any, scope: Any) -> None:
    """Convert a tensor of one element to a number. numpy 2.5 needs a squeeze for it, which Triton 3.6 leaves out."""
    plain_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def install() -> None:
    from triton.language.extra.cuda import libdevice

    # The interpreter cannot call libdevice. Kernels ask for these two on NVIDIA, also on the pretended one.
    libdevice.fast_expf = lambda x: tl.exp(x)
    libdevice.fast_dividef = operator.truediv
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch_tensor
    interpreter.GridExecutor.__call__ = run_alone
