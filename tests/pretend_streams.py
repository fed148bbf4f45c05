"""Pretended streams of a pretended GPU, which find races.

All operations run at once, in the order of the program. `Races` records the bytes that each of them reads and writes,
and its stream. A stream is behind all operations of another up to the last event that it waited for. Two operations of
different streams on the same bytes, of which one writes, are a race if the later one is not behind the earlier one.
The host's own reads and writes count as the current stream's, so a missing synchronize is not found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trees import leaves


class Stream:
    """In place of torch.cuda.Stream."""

    def __init__(self, device: Any = None) -> None:
        self.launched = 0
        # Operations of other streams that have ended when the next one of this stream begins.
        self.known: dict[Stream, int] = {}

    def record_event(self) -> dict[Stream, int]:
        return {**self.known, self: self.launched}

    def wait_event(self, event: dict[Stream, int]) -> None:
        for stream, launched in event.items():
            self.known[stream] = max(launched, self.known.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Access(NamedTuple):
    """Bytes from `start` to `stop` that an operation, the `number`th of its stream, reads or writes."""

    start: int
    stop: int
    writes: bool
    stream: Stream
    number: int
    name: str


class Races(TorchDispatchMode):
    """Collects the races as pairs of operations' names."""

    def __init__(self) -> None:
        super().__init__()
        self.accesses: list[Access] = []
        self.races: set[tuple[str, str]] = set()
        self.current = self.default = Stream()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name.startswith("empty"):
            return out
        self.current.launched += 1
        for number, argument in enumerate(args):
            alias = func._schema.arguments[number].alias_info
            self.touch(argument, alias is not None and alias.is_write, name)
        self.touch(kwargs, False, name)
        self.touch(out, True, name)
        return out

    def touch(self, tree: Any, writes: bool, name: str) -> None:
        for tensor in leaves([tree]):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start, stream = tensor.data_ptr(), self.current
            new = Access(start, start + (last + 1) * tensor.element_size(), writes, stream, stream.launched, name)
            for old in self.accesses:
                is_shared = old.start < new.stop and new.start < old.stop and (old.writes or writes)
                if is_shared and old.stream is not stream and stream.known.get(old.stream, 0) < old.number:
                    self.races.add((old.name, name))
            self.accesses.append(new)

    def are_waited_for(self) -> bool:
        """Whether the default stream has waited for all operations of the others, so that it may reuse their memory."""
        streams = {access.stream for access in self.accesses} - {self.default}
        return all(self.default.known.get(stream) == stream.launched for stream in streams)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextlib.contextmanager
def pretend_streams(races: Races) -> Iterator[None]:
    """Inside, torch.cuda has streams, and all memory of the host counts as pinned. `races` is entered by the caller."""
    functions = {"Stream": Stream, "stream": races.stream, "current_stream": lambda device=None: races.default}
    with (
        mock.patch.multiple(torch.cuda, **functions),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: tensor.device.type == "cpu"),
    ):
        yield
