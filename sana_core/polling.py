"""How long work is cancelled: it calls a function again and again, which raises to end it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

Poll = Callable[[], None]


def no_poll() -> None:
    """What polls nobody."""


class Polled(TorchFunctionMode):
    """A context in which `poll` is called before each of torch's functions that this thread calls: for forwards of the
    library, which know of no cancelling."""

    def __init__(self, poll: Poll) -> None:
        super().__init__()
        self.poll = poll

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.poll()
        return function(*args, **(kwargs or {}))
