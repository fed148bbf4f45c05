"""Exact decode with AutoencoderKL, which SD, SDXL, SD3, FLUX and PixArt have, in bounded memory of the device.

Its GroupNorms need the mean and the variance of a whole map, so strips alone give other pixels. Here each convolution
runs in strips over its whole input before the next one begins. The strips of its output are stored, on the device or in
RAM, and their means and variances are added up for the next norm. So the device holds a few strips, and the maps that
fit beside them. A GPU copies the next strip from RAM while it computes and stores the present one.

The decoder may be from diffusers or from ComfyUI. Both have the layers in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..errors import InputError
from ..runtime.accelerator import is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_finite
from ..runtime.text import Json
from .workspace import PeakMemory, chunks

Module = Any  # A layer of diffusers or of ComfyUI. Their annotations do not include its layers.
# Elements of the largest map of a strip that are tried, the preferred number first. Large strips fill a GPU. On a CPU,
# a strip should fit into the caches.
ACCELERATOR_STRIPS = tuple(2**exponent for exponent in range(27, 18, -1))
CPU_STRIPS = tuple(2**exponent for exponent in range(22, 18, -1))
# Bytes of a float32, in which means and variances are computed.
FLOAT32 = 4
# Each GroupNorm of these decoders has this many groups.
GROUPS = 32


class Convolution(NamedTuple):
    """A step of a decode: out = conv(silu(norm(x))), or conv(x) without a norm, with x enlarged to twice its sides."""

    conv: Module
    norm: Module = None
    doubles: bool = False
    # Whether x is the input of a residual block, which a later step adds.
    begins: bool = False
    # Whether the input of the residual block is added to the output, through `shortcut` if it has one.
    ends: bool = False
    shortcut: Module = None

    @property
    def widths(self) -> tuple[int, int]:
        """The channels of input and output."""
        return self.conv.in_channels, self.conv.out_channels


class Attention(NamedTuple):
    """A step of a decode: x + project(attention(query, key, value of norm(x))). All of them are for maps."""

    norm: Module
    query: Callable[[torch.Tensor], torch.Tensor]
    key: Callable[[torch.Tensor], torch.Tensor]
    value: Callable[[torch.Tensor], torch.Tensor]
    project: Callable[[torch.Tensor], torch.Tensor]


Step = Convolution | Attention


class NormPlan(NamedTuple):
    """How to decode an image of one size, and the predicted memory, without weights and without the image."""

    # Elements of the largest map of a strip.
    strip: int
    # Maps of at most this many elements stay on the device, larger ones are stored in RAM.
    resident: int
    device_bytes: int
    # Bytes of the two buffers in RAM, which maps use in turn. At most two maps exist at a time.
    buffers: tuple[int, int]

    @property
    def ram_bytes(self) -> int:
        return sum(self.buffers)

    @property
    def words(self) -> str:
        """Describe the plan for users."""
        where = f"{self.ram_bytes / 1e9:.1f} GB of maps in RAM" if self.ram_bytes else "all maps on the device"
        return f"layer by layer in strips; {where}"


def decoder_steps(decoder: Module) -> list[Step] | None:
    """Return the steps of `decoder`, or None if it is not the decoder of an AutoencoderKL for images."""
    try:
        has_more = getattr(decoder, "tanh_out", False) or any(len(level.attn) for level in getattr(decoder, "up", ()))
        steps = list(diffusers_steps(decoder) if hasattr(decoder, "conv_norm_out") else comfyui_steps(decoder))
    except (AttributeError, TypeError, ValueError, IndexError):
        return None
    return None if has_more or not all(map(is_known, steps)) else steps


def is_known(step: Step) -> bool:
    """Whether a step has the layers of images. Decoders of videos have the same names for other layers."""
    norm = step.norm
    if norm is not None and not (isinstance(norm, torch.nn.GroupNorm) and norm.num_groups == GROUPS and norm.affine):
        return False
    if isinstance(step, Attention):
        return True
    # Layers of videos are subclasses with another convolution inside.
    is_plain = isinstance(step.conv, torch.nn.Conv2d) and not any(True for _ in step.conv.children())
    return is_plain and (step.conv.kernel_size, step.conv.padding) == ((3, 3), (1, 1))


def diffusers_steps(decoder: Module) -> Iterator[Step]:
    first, last = decoder.mid_block.resnets
    (attention,) = decoder.mid_block.attentions
    yield Convolution(decoder.conv_in)
    yield from residual_block(first, first.conv_shortcut)
    if attention is not None:
        yield Attention(
            attention.group_norm,
            partial(on_channels, attention.to_q),
            partial(on_channels, attention.to_k),
            partial(on_channels, attention.to_v),
            partial(on_channels, attention.to_out[0]),
        )
    yield from residual_block(last, last.conv_shortcut)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            yield from residual_block(resnet, resnet.conv_shortcut)
        for upsampler in block.upsamplers or ():
            yield Convolution(upsampler.conv, doubles=True)
    yield Convolution(decoder.conv_out, decoder.conv_norm_out)


def comfyui_steps(decoder: Module) -> Iterator[Step]:
    middle, attention = decoder.mid, decoder.mid.attn_1
    yield Convolution(decoder.conv_in)
    yield from residual_block(middle.block_1, getattr(middle.block_1, "nin_shortcut", None))
    yield Attention(attention.norm, attention.q, attention.k, attention.v, attention.proj_out)
    yield from residual_block(middle.block_2, getattr(middle.block_2, "nin_shortcut", None))
    for level in reversed(range(len(decoder.up))):
        for block in decoder.up[level].block:
            yield from residual_block(block, getattr(block, "nin_shortcut", None))
        if level:
            yield Convolution(decoder.up[level].upsample.conv, doubles=True)
    yield Convolution(decoder.conv_out, decoder.norm_out)


def residual_block(block: Module, shortcut: Module) -> Iterator[Step]:
    yield Convolution(block.conv1, block.norm1, begins=True)
    yield Convolution(block.conv2, block.norm2, ends=True, shortcut=shortcut)


def on_channels(layer: Module, x: torch.Tensor) -> torch.Tensor:
    """Return a linear `layer` of the channels of a map [1, C, h, w]."""
    return layer(x.movedim(1, -1)).movedim(-1, 1)


class Map:
    """A stored map [1, C, h, w] with the statistics of its strips. `buffer` is its buffer's number, if it is in RAM."""

    def __init__(self, stored: torch.Tensor, buffer: int | None = None) -> None:
        self.stored, self.buffer = stored, buffer
        # Copies from and to other memory of the host must wait for each other.
        self.is_async = stored.device.type == "cpu" and stored.is_pinned()
        # Means and variances [2, groups, rows] of each strip.
        self.moments: list[torch.Tensor] = []

    def rows(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return rows on `device`: a view of the map if it is there, else a copy."""
        return self.stored[:, :, start:stop].to(device, non_blocking=self.is_async)

    def strips(self, spans: list[tuple[int, int]], device: torch.device) -> Iterator[torch.Tensor]:
        """Yield the rows of each span, as `rows` does. A GPU copies the next strip while it computes with this one.

        Two buffers take turns. A copy waits for the work that was launched before, which reads its buffer.
        """
        if not self.is_async:
            yield from (self.rows(*span, device) for span in spans)
            return
        module, (_, channels, _, width) = torch.get_device_module(device), self.stored.shape
        shape = 1, channels, max(stop - start for start, stop in spans), width
        options: Json = {"dtype": self.stored.dtype, "device": device, "memory_format": torch.channels_last}
        buffers = [torch.empty(shape, **options) for _ in spans[:2]]
        computing, copying = module.current_stream(device), module.Stream(device)

        def copy(number: int) -> tuple[torch.Tensor, Any]:
            start, stop = spans[number]
            rows = buffers[number % 2][:, :, : stop - start]
            copying.wait_stream(computing)
            with module.stream(copying):
                rows.copy_(self.stored[:, :, start:stop], non_blocking=True)
            return rows, copying.record_event()

        try:
            following = copy(0)
            for number in range(len(spans)):
                rows, copied = following
                if number + 1 < len(spans):
                    following = copy(number + 1)
                computing.wait_event(copied)
                yield rows
        finally:
            # After an error or a cancel a copy may still run, and other work could receive its buffer.
            computing.wait_stream(copying)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store rows of the output of a step, and note their mean and variance. `rows` may be overwritten."""
        if self.is_async:
            # Not all of AMD's convolutions return the layout of their input. torch waits for a copy to another one.
            rows = rows.contiguous(memory_format=torch.channels_last)
        self.stored[:, :, start : start + rows.shape[2]].copy_(rows, non_blocking=self.is_async)
        channels = rows.shape[1]
        if channels % GROUPS == 0:
            # By row, because sums of fewer numbers round less.
            variances, means = torch.var_mean(rows.float().unflatten(1, (GROUPS, -1)), (0, 2, 4), correction=0)
            self.moments.append(torch.stack([means, variances]))

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance [groups] of the whole map, float64 on the CPU."""
        means, variances = torch.cat(self.moments, 2).cpu().double()
        mean = means.mean(1)
        return mean, (variances + (means - mean[:, None]) ** 2).mean(1)


class Norm:
    """A GroupNorm and SiLU with the mean and the variance of a whole map."""

    def __init__(self, norm: Module, source: Map, device: torch.device, activates: bool = True) -> None:
        self.eps, self.activates = norm.eps, activates
        repeated = norm.num_channels // norm.num_groups
        values = (*(value.repeat_interleave(repeated) for value in source.statistics()), *weights_of(norm, device))
        self.values = [value.detach().to(device, torch.float32) for value in values]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # A batch norm with given statistics is this operation, in one kernel, computed in float32.
        mean, variance, weight, bias = self.values
        normed = functional.batch_norm(x, mean, variance, weight, bias, eps=self.eps)
        return functional.silu(normed, inplace=True) if self.activates else normed


def weights_of(norm: Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias [C] of a GroupNorm.

    With dynamic VRAM, ComfyUI loads them in the layer's forward alone. There, the norm of 1 and -1 is theirs:
    weight / sqrt(1 + eps) + bias and -weight / sqrt(1 + eps) + bias.
    """
    if not norm.weight.is_meta:
        return norm.weight, norm.bias
    ones = torch.ones(1, norm.num_channels, 1, 1, device=device)
    upper, lower = norm(torch.cat([ones, -ones], 3))[0, :, 0].unbind(1)
    return (upper - lower) * (0.5 * math.sqrt(1 + norm.eps)), (upper + lower) / 2


@dataclass
class Decode:
    """One image that is decoded step by step."""

    plan: NormPlan
    device: torch.device
    dtype: torch.dtype
    poll: Poll
    # Called with the multiplications of a strip.
    progress: Callable[[int], None]
    # Buffers in RAM by number, allocated when they are needed.
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)

    def store(self, channels: int, height: int, width: int, *used: Map | None) -> Map:
        """Return memory for a map, on the device or in the buffer in RAM that no map of `used` has."""
        elements = channels * height * width
        if elements <= self.plan.resident:
            return Map(self.view(torch.empty(elements, device=self.device, dtype=self.dtype), channels, height, width))
        number = free_buffer(*used)
        if number not in self.buffers:
            self.buffers[number] = self.allocate(self.plan.buffers[number] // self.dtype.itemsize)
        return Map(self.view(self.buffers[number], channels, height, width), number)

    def view(self, memory: torch.Tensor, channels: int, height: int, width: int) -> torch.Tensor:
        """Return the first elements of `memory` as a map.

        For a GPU, the rows of a strip are contiguous in it, so that copies from and to pinned memory need not wait. On
        a CPU, convolutions with channels last would round in another way.
        """
        is_cpu, size = self.device.type == "cpu", channels * height * width
        strides = (size, height * width, width, 1) if is_cpu else (size, 1, width * channels, channels)
        return memory.as_strided((1, channels, height, width), strides)

    def allocate(self, elements: int) -> torch.Tensor:
        """Return a buffer in RAM, pinned if the system allows it."""
        if self.device.type not in ("cpu", "mps", "meta"):
            # Systems pin only a part of their memory. Windows pins half of it.
            with suppress(RuntimeError):
                return torch.empty(elements, dtype=self.dtype, pin_memory=True)
        return torch.empty(elements, dtype=self.dtype)

    def run(self, steps: list[Step], latents: torch.Tensor, out: torch.Tensor) -> None:
        """Write the image of `latents` [1, C, h, w], on the device, into `out` [1, 3, H, W]."""
        x, block_input = Map(latents), None
        for number, step in enumerate(steps):
            if isinstance(step, Attention):
                self.attend(step, x)
                continue
            if step.begins:
                block_input = x
            channels, (height, width) = step.widths[1], (side * (1 + step.doubles) for side in x.stored.shape[2:])
            if number == len(steps) - 1:
                target = Map(out)
            elif step.ends and block_input is not None:
                # A strip of the output ends before the input's next strip begins, which may be read already. A part of
                # the channels would not be contiguous, and torch copies such maps through others.
                target = Map(self.view(block_input.stored, channels, height, width), block_input.buffer)
            else:
                target = self.store(channels, height, width, x, block_input)
            self.convolve(step, x, block_input if step.ends else None, target)
            x = target
            if step.ends:
                block_input = None

    def convolve(self, step: Convolution, source: Map, residual: Map | None, target: Map) -> None:
        norm = None if step.norm is None else Norm(step.norm, source, self.device)
        (height, width), scale = source.stored.shape[2:], 1 + step.doubles
        spans = list(chunks(height, strip_rows(step, width, self.plan.strip)))
        windows = source.strips([(max(0, start - 1), min(height, stop + 1)) for start, stop in spans], self.device)
        residuals = repeat(None, len(spans)) if residual is None else residual.strips(spans, self.device)
        # All three end, so that an error of the last copy is raised.
        for (start, stop), window, added in zip(spans, windows, residuals, strict=True):
            self.poll()
            above, below = min(1, start), min(1, height - stop)
            if norm is not None:
                window = norm(window)
            if step.doubles:
                window = functional.interpolate(window, scale_factor=2.0, mode="nearest")
            rows = step.conv(window)
            del window
            # The rows beside the strip have seen zeros in place of their neighbours.
            rows = rows[:, :, scale * above : rows.shape[2] - scale * below]
            if added is not None:
                rows = rows.add_(added if step.shortcut is None else step.shortcut(added))
            target.write(scale * start, rows)
            self.progress(rows.shape[2] * rows.shape[3] * math.prod(step.widths))
            del rows

    def attend(self, step: Attention, x: Map) -> None:
        """Replace `x` by the output of an attention over all its positions, whose keys and values fit the device."""
        norm = Norm(step.norm, x, self.device, activates=False)
        channels, height, width = x.stored.shape[1:]
        shape = 1, 1, height * width, channels
        key, value = (torch.empty(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        for start, stop in chunks(height, max(1, self.plan.strip // (channels * width))):
            self.poll()
            normed = norm(x.rows(start, stop, self.device))
            for buffer, layer in ((key, step.key), (value, step.value)):
                buffer[0, 0, start * width : stop * width] = tokens(layer(normed))
            del normed
        output = Map(x.stored)
        for start, stop in chunks(height, query_rows(width, height, channels, self.plan.strip)):
            self.poll()
            rows = x.rows(start, stop, self.device)
            query = tokens(step.query(norm(rows)))[None, None]
            attended = functional.scaled_dot_product_attention(query, key, value)
            attended = attended.view(1, stop - start, width, channels).movedim(3, 1)
            output.write(start, step.project(attended).add_(rows))
            del rows, query, attended
        x.moments = output.moments


def free_buffer(*used: Map | Stored | None) -> int:
    """Return the number of the buffer in RAM that no map of `used` has."""
    return int(any(stored is not None and stored.buffer == 0 for stored in used))


def tokens(x: torch.Tensor) -> torch.Tensor:
    """Return a map [1, C, h, w] as tokens [h w, C], without a copy if its channels are last in memory."""
    return x[0].movedim(0, 2).flatten(0, 1).contiguous()


def strip_rows(step: Convolution, width: int, strip: int) -> int:
    """Return the rows of the input of `step`, `width` columns wide, whose maps have at most `strip` elements."""
    row = width * max(step.widths) * (4 if step.doubles else 1)
    return max(1, strip // row)


def query_rows(width: int, height: int, channels: int, strip: int) -> int:
    """Return the rows of queries whose maps, and weights if a kernel stores them, have at most `strip` elements."""
    return max(1, strip // (width * max(channels, height * width)))


def outputs_of(steps: list[Step], height: int, width: int) -> Iterator[tuple[Convolution, int, int]]:
    """Yield each convolution with the height and the width of its output, for latents of `height` x `width`."""
    for step in steps:
        if isinstance(step, Convolution):
            height, width = height * (1 + step.doubles), width * (1 + step.doubles)
            yield step, height, width


class Stored(NamedTuple):
    """A map that a plan stores."""

    # The number of its buffer in RAM. None: it is on the device.
    buffer: int | None
    bytes: int

    @property
    def on_device(self) -> bool:
        return self.buffer is None


def predict(steps: list[Step], latents: tuple[int, int, int], element: int, strip: int, resident: int) -> NormPlan:
    """Return the plan for `latents` (channels, height, width), with its memory. `element`: bytes of a number.

    A step needs its maps, two copies of the rows of those in RAM and, in a strip, the largest of: the norm and the
    enlarged map; input and output of the convolution; the output and the shortcut's; the output and its float32 copy.
    """
    on_device, buffers = 0, [0, 0]
    channels, height, width = latents
    x, block_input = Stored(None, element * height * width * channels), None
    for number, step in enumerate(steps):
        if isinstance(step, Attention):
            channels = step.norm.num_channels
            filled = min(height, max(1, strip // (channels * width)))
            asked = min(height, query_rows(width, height, channels, strip))
            # Keys and values. Two maps of the rows that fill them, or four of the rows of queries.
            beside = element * width * channels * (2 * height + max(2 * filled, 4 * asked))
            on_device = max(on_device, x.on_device * x.bytes + beside)
            continue
        if step.begins:
            block_input = x
        scale, (inner, outer) = 1 + step.doubles, step.widths
        rows = min(height, strip_rows(step, width, strip))
        window, output = (element * min(height, rows + 2) * width * channels for channels in (inner, scale**2 * outer))
        normed, enlarged = step.norm is not None and window, step.doubles and 4 * window
        copies, copied, added = min(2, -(-height // rows)), not x.on_device and window, 0
        if step.ends and block_input is not None:
            carried = outer if step.shortcut is None else step.shortcut.in_channels
            copied += not block_input.on_device and element * rows * width * carried
            added = step.shortcut is not None and element * rows * width * outer
        beside = copies * copied + max(
            normed + enlarged,
            (enlarged or normed) + output,
            output + max(added, FLOAT32 * rows * width * scale**2 * outer),
        )
        height, width = scale * height, scale * width
        elements = outer * height * width
        if number == len(steps) - 1:
            target = Stored(None, 0)  # The image is not counted.
        elif step.ends and block_input is not None:
            target = block_input
        elif elements <= resident:
            target = Stored(None, element * elements)
        else:
            buffer = free_buffer(x, block_input)
            target = Stored(buffer, element * elements)
            # torch allocates powers of two of pinned memory.
            buffers[buffer] = max(buffers[buffer], 1 << (target.bytes - 1).bit_length())
        maps = {id(stored): stored for stored in (x, block_input, target) if stored is not None}.values()
        on_device = max(on_device, beside + sum(stored.bytes for stored in maps if stored.on_device))
        x = target
        if step.ends:
            block_input = None
    return NormPlan(strip, resident, on_device, (buffers[0], buffers[1]))


def choose_plan(steps: list[Step], latents: torch.Tensor, max_bytes: float, ram_bytes: float) -> NormPlan:
    """Return the fastest plan for `latents` within `max_bytes` of their device and `ram_bytes` of RAM.

    Maps stay on the device as far as they fit.
    """
    is_cpu, shape = latents.device.type == "cpu", (latents.shape[1], latents.shape[2], latents.shape[3])
    outputs = list(outputs_of(steps, *shape[1:]))
    sizes = {0, *(step.widths[1] * rows * columns for step, rows, columns in outputs)}
    # On a CPU, all maps are in the same memory.
    residents = [max(sizes)] if is_cpu else sorted(sizes, reverse=True)
    strips = CPU_STRIPS if is_cpu else ACCELERATOR_STRIPS
    make = partial(predict, steps, shape, latents.element_size())
    # Small strips take many launches, so rather store more maps in RAM.
    for few in (strips[:-3], strips[-3:]):
        for resident in residents:
            for strip in few:
                plan = make(strip, resident)
                if plan.device_bytes <= max_bytes and plan.ram_bytes <= ram_bytes:
                    return plan
    smallest, (_, rows, columns) = make(strips[-1], residents[-1]), outputs[-1]
    size = f"{columns} x {rows}"
    if smallest.device_bytes > max_bytes:
        least = -(-smallest.device_bytes // 10**6) / 1000
        raise InputError(
            f"budget_gb: got {max_bytes / 1e9:.3g}, expected at least {least} for an image of {size}, or 0"
        )
    raise InputError(
        f"samples: got latents of an image of {size}, whose decode needs {smallest.ram_bytes / 1e9:.1f} GB of RAM, and "
        f"{ram_bytes / 1e9:.1f} GB are free; close other programs, or use VAE Decode (Tiled)"
    )


@torch.no_grad()
def decode_normed(
    decoder: Module,
    latents: torch.Tensor,
    max_bytes: float,
    ram_bytes: float,
    *,
    poll: Poll = no_poll,
    progress: Callable[[int, int], None] = lambda computed, total: None,
    report: Json | None = None,
) -> torch.Tensor:
    """Return the images [B, 3, 8 h, 8 w] of `latents` [B, C, h, w] by the decoder of an AutoencoderKL, on the CPU.

    They equal `decoder(latents)` within rounding. `max_bytes` bounds the memory of their device beyond the weights and
    the latents, and `ram_bytes` the maps in RAM. `progress` receives the computed part and the total of the work.
    `report` receives the plan, time and memory.
    """
    check_finite("samples", latents)
    steps = decoder_steps(decoder)
    if steps is None:
        raise InputError(f"vae: got the decoder {type(decoder).__name__}, expected that of an AutoencoderKL of images")
    report, started = {} if report is None else report, time.perf_counter()
    events = report.setdefault("events", [])
    plan = choose_plan(steps, latents, max_bytes, ram_bytes)
    outputs = list(outputs_of(steps, latents.shape[2], latents.shape[3]))
    count, (_, height, width) = len(latents), outputs[-1]
    out = torch.empty(count, 3, height, width, dtype=latents.dtype)
    # Multiplications of the convolutions, by kernel position.
    computed, total = 0, count * sum(math.prod(step.widths) * rows * columns for step, rows, columns in outputs)

    def advance(work: int) -> None:
        nonlocal computed
        computed += work
        progress(computed, total)

    with PeakMemory(latents.device) as peak:
        for image in range(count):
            start, is_decoded = computed, False
            while not is_decoded:
                try:
                    Decode(plan, latents.device, latents.dtype, poll, advance).run(
                        steps, latents[image : image + 1], out[image : image + 1]
                    )
                    is_decoded = True
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    release_memory_of(error, latents.device)
                    computed, plan = start, choose_plan(steps, latents, plan.device_bytes - 1, ram_bytes)
                    events.append(f"ran out of memory; decoded again within {plan.device_bytes / 1e6:.0f} MB")
    if plan.ram_bytes:
        # torch keeps pinned memory for later. Before torch 2.10 nothing frees it.
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()
    report.update(
        plan=plan.words,
        predicted_bytes=plan.device_bytes,
        ram_bytes=plan.ram_bytes,
        seconds=time.perf_counter() - started,
        peak_bytes=peak.bytes,
    )
    return out
