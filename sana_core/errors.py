"""Every error that a user can meet, by what they can do about it.

The rule for sana_core and nodes: raise one of these, never a bare ValueError or OSError. The message is one line of
ASCII words, "field or file: got X, expected Y; remedy", without the remedy where Y says it, and is whole without a
traceback. Each class is also the built-in kind that it stands for, so `except ValueError` and `except
FileNotFoundError` keep what they catch. Errors of others pass as they are where their kind has a meaning to the caller:
out of memory and interruption above all. docs/errors.md has each message; tests/unit/test_errors.py
holds both to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    import torch


class SanaError(Exception):
    """Anything that went wrong for a reason that its message names."""

    def __init_subclass__(cls) -> None:
        # ComfyUI names the modules of a pack by the path of its folder, and shows an error's class with its module.
        if "/" in cls.__module__ or "\\" in cls.__module__:
            cls.__module__ = "builtins"


class InputError(SanaError, ValueError):
    """A setting, a prompt, or an input that cannot be used."""


class CheckpointError(SanaError, ValueError):
    """A model's file that is broken, unsafe, or of another model."""


class MissingFileError(SanaError, FileNotFoundError):
    """A file or folder that is not there."""


class ReadError(SanaError, OSError):
    """A file that is there and cannot be read."""


class OutputError(SanaError, OSError):
    """A file that cannot be written."""


class ExistingFileError(OutputError, FileExistsError):
    """A file that would be overwritten."""


class InUseError(OutputError, BlockingIOError):
    """A folder into which another run writes."""


class VersionError(SanaError, RuntimeError):
    """A host, a library or an interpreter of a version that this package does not work with."""


class ClusterError(SanaError, ConnectionError):
    """A cluster that cannot be reached, or that has lost its GPUs."""


class TrainingError(SanaError, RuntimeError):
    """A training run whose loss or gradient is NaN or infinite."""


class FailedImagesError(SanaError, RuntimeError):
    """Some images of a batch failed, for example because of NaN. All other images were generated."""

    # Number of each failed image, in the order of the results: the reason.
    failed: dict[int, str]
    # What generate() would have returned, with NaN in place of the failed images.
    images: torch.Tensor | None
    # The Pick objects of generate_best(), without the failed images.
    picks: list[Any]

    def __init__(self, message: str, failed: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failed, self.images, self.picks = failed or {}, None, []


def first_line(error: BaseException) -> str:
    """Return the class of an error of others and the first line of what it says: torch goes on with advice to
    developers and traces. Triton begins with the kernel's own lines, and has what it says beside them. The number of a
    system error is left out."""
    said = str(getattr(error, "error_message", None) or error).strip()
    if isinstance(error, OSError) and error.strerror:
        # Without the number that Python writes first.
        said = error.strerror if error.filename is None else f"{error.strerror}: {error.filename!r}"
    return f"{type(error).__name__}: {(said.splitlines() or [''])[0]}"
