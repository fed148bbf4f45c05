"""Cancel inside the library's own forward, which knows of none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from .rows import Poll


class Polled(TorchFunctionMode):
    """A context in which `poll` is called before each of torch's functions that this thread calls."""

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
