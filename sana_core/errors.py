"""All errors that a user can meet, one class for each kind of remedy.

sana_core and nodes raise these classes instead of a bare ValueError or OSError. The message is one line of ASCII words
and values: "field or file: got X, expected Y; remedy". The remedy is left out if Y implies it. The message must be
understandable without a traceback. Each class also derives from a built-in error, so `except ValueError` and `except
FileNotFoundError` work. Errors of other libraries are passed on if callers handle their kind, such as out of memory and
interruption. docs/errors.md contains all messages, and tests/unit/test_errors.py compares it with the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .runtime.text import one_line

if TYPE_CHECKING:
    from typing import Any, TypeVar

    import torch

    T = TypeVar("T")


def without_folder(shown_class: type[T]) -> type[T]:
    """Hide the path of the pack's folder where ComfyUI shows errors or objects of a class as text.

    ComfyUI names the modules of a pack by that path, and Python shows a class with the name of its module.
    """
    if "/" in shown_class.__module__ or "\\" in shown_class.__module__:
        shown_class.__module__ = "builtins"
    return shown_class


class SanaError(Exception):
    """The base class. The message is one line that any log can write, whatever the values in it contain."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))

    def __init_subclass__(cls) -> None:
        without_folder(cls)


class InputError(SanaError, ValueError):
    """A setting, a prompt or an input is not usable."""


class CheckpointError(SanaError, ValueError):
    """A model file is damaged, unsafe, or belongs to another model."""


class MissingFileError(SanaError, FileNotFoundError):
    """A file or folder does not exist."""


class ReadError(SanaError, OSError):
    """A file exists, but cannot be read."""


class OutputError(SanaError, OSError):
    """A file cannot be written."""


class ExistingFileError(OutputError, FileExistsError):
    """A file would be overwritten."""


class InUseError(OutputError, BlockingIOError):
    """Another run is writing into the folder."""


class VersionError(SanaError, RuntimeError):
    """The version of ComfyUI, of a library or of Python is not supported."""


class ClusterError(SanaError, ConnectionError):
    """A cluster cannot be reached, or has lost its GPUs."""


class TrainingError(SanaError, RuntimeError):
    """The loss or the gradient of a training is NaN or infinite, or a rank or memory is lost."""

    # Whether some parameters may hold other weights than the trained ones, so that they must not be saved.
    weights_lost: bool

    def __init__(self, message: str, weights_lost: bool = False) -> None:
        super().__init__(message)
        self.weights_lost = weights_lost


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
    """Return the class and the first line of another library's error.

    The further lines of torch's errors are advice to developers and traces.
    """
    # The text of Triton's errors begins with the kernel's code. Their message is in this attribute.
    text = str(getattr(error, "error_message", None) or error).strip()
    if isinstance(error, OSError) and error.strerror:
        # Without the number that Python writes first.
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename!r}"
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"
