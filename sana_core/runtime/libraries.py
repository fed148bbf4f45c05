"""Imports of the libraries, and why an import failed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from ..errors import VersionError, first_line
from .text import brief

# transformers imports these packages wherever they are installed, and each of their builds needs a certain torch.
COMPANIONS = {
    "torchaudio": "pip install -U torchaudio, or pip uninstall torchaudio if this ComfyUI starts without it",
    "torchvision": "install torch and torchvision together, with the command of pytorch.org",
}
# The module of a package, if its name differs, and the classes that SANA uses, which are imported when they are used.
PARTS = {
    "pillow": ("PIL",),
    "diffusers": ("diffusers", "AutoencoderDC", "SanaControlNetModel", "SanaTransformer2DModel"),
    "transformers": ("transformers", "Gemma2Model"),
}
# Loggers that warn when diffusers imports torchao, and when torch compiles without a GPU. No user can change that.
NOISY = ("torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer", "torch.utils.cpp_extension")


def installed(name: str) -> str:
    """Return the version of an installed package, or an empty text."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's garbage collector. A third of the time would be searches, if all of many new objects stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_failure(name: str) -> VersionError | None:
    """Import an installed package. Returns an error with the reason and the remedy if that fails.

    The broken package may be another one that it imports.
    """
    module, *classes = PARTS.get(name, (name,))
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        with without_collection():
            imported = import_module(module)
            for part in classes:
                getattr(imported, part)
        return None
    except Exception as error:
        cause: BaseException = error
        # The libraries wrap an import error several times.
        while inner := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__):
            cause = inner
        reason = brief(first_line(cause), 180)
    if name in COMPANIONS:
        return VersionError(
            f"{name}: got {installed(name)}, which cannot be imported with torch {torch.__version__} ({reason}); "
            f"{COMPANIONS[name]}"
        )
    broken = (import_failure(companion) for companion in COMPANIONS if installed(companion))
    return next(filter(None, broken), None) or VersionError(
        f"requirements: {name} cannot be imported ({reason}); pip install -r requirements.txt with the Python that "
        "runs this"
    )
