"""The memory of a decode in strips: allocated once, with the share that each layer needs, and the measured peak.

A map in a workspace has spare rows above and below. Above, a layer writes the rows that it carries from the last strip.
Below, it writes the zeros beyond the image's edge. The layer can then read its window without copying the map. The
output of a convolution is always newly allocated, so a convolution computes one piece at a time and copies it into the
workspace.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NamedTuple

import torch

# Elements that a convolution reads or writes at once on a CPU. Few, because the allocator may not return freed memory.
CPU_PIECE = 2**19
# Spare rows below a map, for zeros and for the rows that a layer completes at the end of the image.
BELOW = 2
# Temporary copies of a convolution's weights in oneDNN.
COPIES = 2


class Strip(NamedTuple):
    """Rows `top` to `top` + `size` of `map` [1, C, H, W], a view of one buffer of a workspace."""

    buffer: int
    map: torch.Tensor
    top: int
    size: int

    @property
    def rows(self) -> torch.Tensor:
        return self.map[:, :, self.top : self.top + self.size]


class WorkspaceSize(NamedTuple):
    # Elements of each of the two buffers.
    buffer: int
    # Elements of the rows that layers carry from strip to strip.
    carried: int
    # Spare rows above a map.
    above: int


class Workspace:
    """One allocation with two buffers for maps, and space for the rows that layers carry from strip to strip.

    The windows of the attention stages are in the buffers too, before the first strip.
    """

    def __init__(self, like: torch.Tensor, size: WorkspaceSize) -> None:
        self.memory, self.size = like.new_empty(2 * size.buffer + size.carried), size
        # Elements of the carried rows that are in use. Set it to 0 before a new sequence of layers.
        self.used = 0
        self.piece = piece_elements(size.buffer, like.device.type != "cpu")

    def keep(self, channels: int, height: int, width: int) -> torch.Tensor:
        """Return a map [1, C, H, W] for carried rows. It is valid until `used` is set to 0."""
        self.used, start = self.used + channels * height * width, 2 * self.size.buffer + self.used
        return self.memory[start:][: channels * height * width].view(1, height, width, channels).permute(0, 3, 1, 2)

    def map(self, channels: int, height: int, width: int, buffer: int = 0) -> torch.Tensor:
        """Return a map [1, C, H, W] that begins at the start of buffer number `buffer`."""
        flat = self.memory[buffer * self.size.buffer : 2 * self.size.buffer][: height * width * channels]
        return flat.view(1, height, width, channels).permute(0, 3, 1, 2)

    def strip(self, buffer: int, channels: int, count: int, width: int) -> Strip:
        """Return an uninitialised strip of `count` rows."""
        above = self.size.above
        return Strip(buffer, self.map(channels, above + count + 1, width, buffer), above, count)

    def beside(self, strip: Strip, channels: int, count: int, width: int) -> Strip:
        """Return an uninitialised strip in the buffer that `strip` does not use."""
        return self.strip(1 - strip.buffer, channels, count, width)

    def put(self, rows: torch.Tensor) -> Strip:
        """Return a strip with the values of `rows` [1, C, n, W]."""
        strip = self.strip(0, rows.shape[1], rows.shape[2], rows.shape[3])
        strip.rows.copy_(rows)
        return strip

    def pieces(self, total: int, row: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the pieces of `total` rows that a convolution computes at once. `row`: elements."""
        return chunks(total, max(1, self.piece // row))


def piece_elements(elements: int, accelerator: bool) -> int:
    """Return the elements that a convolution computes at once. `elements`: size of a buffer of the workspace."""
    # Large pieces fill an accelerator.
    return 2 * elements // 3 if accelerator else CPU_PIECE


class LayerShape(NamedTuple):
    """The channels and the scale of a layer, from which its memory is computed."""

    # Channels of the input and of the output.
    inner: int
    outer: int
    # Channels of the convolution's output. 0: the layer has no convolution.
    conv_channels: int
    # Rows (and columns) of the output per row (and column) of the input.
    scale: float = 1
    # Rows of `inner` channels that the layer carries to the next strip.
    carried: int = 0
    interpolates: bool = False

    def largest_map(self, above: int, rows: int, width: int) -> int:
        """Return the elements of the input or the output, whichever is larger. The strip has `rows` x `width` cells."""
        out_rows, out_width = int(rows * self.scale), int(width * self.scale)
        return max(self.inner * (above + rows + BELOW) * width, self.outer * (above + out_rows + BELOW) * out_width)

    def passing(self, rows: int, width: int, piece: int, accelerator: bool) -> int:
        """Return the elements of the temporary tensors, including oneDNN's copies of the weights."""
        weights = 0 if accelerator else COPIES * 9 * self.inner * self.conv_channels
        if self.interpolates:
            count = min(rows, interpolated_rows(2 * width * (self.inner + self.conv_channels), piece))
            return 2 * width * 2 * (self.inner * (count + 1) + self.conv_channels * count) + weights
        if self.scale < 1:
            # The convolution's output, the mean that the shortcut adds to it, and the input of the mean.
            rows, width, row = rows // 2, width // 2, 4 * self.inner * (width // 2)
            return (row + 2 * self.conv_channels * width) * min(rows, max(1, piece // row)) + weights
        return self.conv_channels * width * min(rows, max(1, piece // (self.conv_channels * width or 1))) + weights


def buffer_elements(shapes: Iterable[LayerShape], above: int, rows: int, width: int) -> int:
    """Return the elements of each buffer of a workspace for layers of these shapes, and strips of `rows` x `width`."""
    largest = 0
    for shape in shapes:
        largest = max(largest, shape.largest_map(above, rows, width))
        rows, width = int(rows * shape.scale), int(width * shape.scale)
    return largest


def interpolated_rows(row: int, piece: int) -> int:
    """Return how many rows, and one more for the window, are interpolated at once.

    `row`: elements of an interpolated row and of the convolution's output for it.
    """
    return max(1, piece // (2 * row) - 1)


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive pieces of `size`, the last one smaller."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


SAMPLING_SECONDS = 0.01


def process_bytes() -> int:
    """Return the resident memory of this process, without shared memory where the system reports it."""
    import psutil

    memory = psutil.Process().memory_info()
    # The system loads and drops pages of mapped files at will. Only Linux counts them separately.
    return memory.rss - getattr(memory, "shared", 0)


# Devices for which torch records no peak. The memory in use is sampled repeatedly.
SAMPLERS = {"cpu": process_bytes, "mps": torch.mps.current_allocated_memory}


class PeakMemory:
    """A context that measures the peak memory of a device, beyond the memory in use at its start.

    On the CPU it measures the memory of the process. `bytes` stays None for devices whose memory cannot be measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        module = getattr(torch, device.type, None)
        self.counter = module if hasattr(module, "max_memory_allocated") else None
        self.memory_in_use = SAMPLERS.get(device.type)
        self.ended = threading.Event()

    def __enter__(self) -> PeakMemory:
        if self.counter is not None:
            self.start = self.counter.memory_allocated(self.device)
            self.counter.reset_peak_memory_stats(self.device)
        elif self.memory_in_use is not None:
            self.start, self.bytes = self.memory_in_use(), 0
            self.watcher = threading.Thread(target=self.watch, daemon=True)
            self.watcher.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.counter is not None:
            self.bytes = max(0, self.counter.max_memory_allocated(self.device) - self.start)
        elif self.memory_in_use is not None:
            self.ended.set()
            self.watcher.join()

    def watch(self) -> None:
        assert self.memory_in_use is not None and self.bytes is not None
        while not self.ended.wait(SAMPLING_SECONDS):
            self.bytes = max(self.bytes, self.memory_in_use() - self.start)
