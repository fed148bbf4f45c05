"""Generate images one after another, each shared by all devices of this process.

The devices have a thread each. A thread waits until the others have launched the kernels for its inputs, but not until
these have finished. The copies between devices wait for the kernels on the devices themselves.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING

import torch

from ..batch.pipeline import (
    Conditioning,
    Models,
    Request,
    ResolvedSettings,
    decode,
    encode_texts,
    load_decoder,
    load_encoder,
    load_models,
    sample,
)
from ..batch.plan import ImageSpec
from ..checkpoints import Checkpoint
from ..errors import InputError, first_line
from ..model.block import feed_forward
from ..model.latents import DOWNSCALE
from ..model.row_shards import Shard, check_rows, check_splittable, make_shard, shard_specs
from ..runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of, synchronize
from ..runtime.cancellation import Poll, no_poll
from ..runtime.device_team import Attempt, DeviceThread, DeviceThreads, Stopped, Team
from ..runtime.text import get_logger
from ..sampling.guidance import ShardedModel

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, SanaTransformer2DModel

logger = get_logger(__name__)


class ExchangeBoard:
    """The tensors that the shards of an image offer to each other, in the order of their rows."""

    def __init__(self, shards: int) -> None:
        self.barrier = Barrier(shards)
        self.clear()

    def clear(self) -> None:
        # They are read between two barriers, and replaced after the second at the earliest.
        self.sums: list[torch.Tensor | None] = [None] * self.barrier.parties
        self.edges: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * self.barrier.parties

    def wait(self) -> None:
        """Wait for the other shards. Raises Stopped if the attempt ends."""
        try:
            self.barrier.wait()
        except BrokenBarrierError:
            raise Stopped from None


class ThreadExchange:
    """The exchange of shard number `index` on `device`. Counts its messages and bytes."""

    def __init__(self, board: ExchangeBoard, index: int, device: torch.device) -> None:
        self.board, self.index, self.device = board, index, device
        self.messages, self.sum_bytes, self.row_bytes = 0, 0, 0

    def all_reduce(self, sums: torch.Tensor) -> torch.Tensor:
        board = self.board
        board.sums[self.index] = sums
        board.wait()
        self.messages += 1
        self.sum_bytes += sums.nbytes
        received = (other.to(self.device, sums.dtype) for other in board.sums if other is not None)
        return functools.reduce(torch.add, received)

    def halo(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        board, index = self.board, self.index
        # Clones, because a view would keep all rows of the shard in memory.
        board.edges[index] = first.clone(), last.clone()
        board.wait()
        above = board.edges[index - 1] if index else None
        below = board.edges[index + 1] if index + 1 < len(board.edges) else None
        self.messages += 1
        self.row_bytes += first.nbytes * ((above is not None) + (below is not None))
        return (
            None if above is None else above[1].to(self.device, first.dtype),
            None if below is None else below[0].to(self.device, last.dtype),
        )


# Rows and columns of the feed-forward that is measured, and seconds of the measurement. Half of a step's arithmetic is
# in the feed-forwards.
SIZE, SECONDS = (16, 64), 0.3


def relative_speeds(devices: Sequence[torch.device], transformers: Sequence[SanaTransformer2DModel]) -> list[float]:
    """Return the speeds of `devices`, each with its copy of the transformer. Measured only if their names differ."""
    names = {
        device.type if device.type in ("cpu", "mps") else torch.get_device_module(device).get_device_name(device)
        for device in devices
    }
    if len(names) == 1:
        return [1.0] * len(devices)
    measured: dict[torch.device, float] = {}
    for device, transformer in zip(devices, transformers, strict=True):
        if device not in measured:
            measured[device] = measure(device, transformer)
    return [measured[device] / devices.count(device) for device in devices]


@torch.no_grad()
def measure(device: torch.device, transformer: SanaTransformer2DModel) -> float:
    """Return how many feed-forwards of the first block `device` computes in a second."""
    block, config = transformer.transformer_blocks[0].ff, transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    states = torch.zeros(1, SIZE[0] * SIZE[1], width, device=device, dtype=transformer.dtype)
    feed_forward(block, states, SIZE)
    synchronize(device)
    began, runs, seconds = time.perf_counter(), 0, 0.0
    while seconds < SECONDS:
        feed_forward(block, states, SIZE)
        synchronize(device)
        runs, seconds = runs + 1, time.perf_counter() - began
    return runs / seconds


class Split:
    """The members that share an image, on `devices` of these `speeds`. `threads` may come from earlier images.

    A step counts when all members have finished it. If a device fails, hangs or runs out of memory, it is left out from
    then on, and the others compute the step again from the same latents. A device that is left alone computes it as if
    there were no split. Only the device of the latents has to work to the end.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        speeds: Sequence[float] | None = None,
        threads: DeviceThreads | None = None,
    ) -> None:
        self.speeds = [1.0] * len(devices) if speeds is None else list(speeds)
        self.team = Team(devices, threads)
        # Of the last step.
        self.exchanges: list[ThreadExchange] = []

    @property
    def living(self) -> list[int]:
        """The numbers of the members that are not left out."""
        return [number for number, member in enumerate(self.team.members) if member in self.team.living]

    def run(
        self, x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int = 1, poll: Poll = no_poll
    ) -> torch.Tensor:
        """Return the velocity at the latents `x` [B, 32, h, w], on the device of `x`. `work` computes a shard's part.

        `parts` is the number of equal parts of B, such as a positive and a negative prompt. Groups of members compute
        different parts where they can, and the members of a group share the rows. `poll` is called many times a second
        and cancels by raising.
        """

        def report(member: DeviceThread, error: BaseException) -> None:
            logger.warning("%s failed (%s), its rows go to the others", member.device, type(error).__name__)

        return self.team.repeat(partial(self.step, x, work, parts, poll), poll, x.device, report)

    def step(self, x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int, poll: Poll) -> torch.Tensor:
        """Compute one step on the living members. Raises Failed."""
        numbers, members = self.living, self.team.living
        specs = shard_specs(parts, [self.speeds[number] for number in numbers], x.shape[2])
        boards = [ExchangeBoard(specs[0].size) for _ in range(specs[0].groups)]
        exchanges = [
            ThreadExchange(boards[spec.group], spec.rank, member.device)
            for spec, member in zip(specs, members, strict=True)
        ]
        cores = max(1, torch.get_num_threads() // max(1, sum(member.device.type == "cpu" for member in members)))

        def compute(index: int) -> torch.Tensor:
            device = members[index].device
            if device.type == "cpu":
                # The number of threads belongs to the thread.
                torch.set_num_threads(cores)
            shard = make_shard(x, specs[index], numbers[index], device, exchanges[index])
            return work(shard).to(x.device)

        def abort() -> None:
            for board in boards:
                board.barrier.abort()

        def messages() -> int:
            return sum(exchange.messages for exchange in exchanges)

        with Attempt(self.team, poll, abort, messages) as attempt:
            results = attempt.run((member, partial(compute, index)) for index, member in enumerate(members))
            attempt.synchronize(x.device)
        for board in boards:
            board.clear()
        self.team.experienced, self.exchanges = True, exchanges
        # VIBE's input has more channels than its velocity.
        out = torch.empty_like(x[:, : results[0].shape[1]])
        for spec, result in zip(specs, results, strict=True):
            spec.own(out).copy_(result)
        return out


def check_devices(devices: Sequence[torch.device]) -> None:
    """Raise InputError for fewer than two devices, and for an accelerator that is named twice."""
    if len(devices) < 2:
        got = ", ".join(map(str, devices)) or "none"
        raise InputError(f"devices: got {got} to share an image, expected two or more; name more, or leave split out")
    twice = [device for device in devices if device.type != "cpu" and devices.count(device) > 1]
    if twice:
        raise InputError(f"devices: got {twice[0]} twice, expected each once: it would do the same work in two halves")


def generate_split(request: Request, poll: Poll = no_poll) -> Generator[tuple[ImageSpec, torch.Tensor], None, None]:
    """Yield each image of `request` with its pixels [3, H, W] in [-1, 1], sampled and decoded by all of its devices.

    The latents differ from the latents of a single device only by rounding. On CPUs in float32, for widths of 512, 640,
    768 px ..., two or more devices give the same bits for any number of devices. If a device fails, the others repeat
    the step without it. `poll` cancels by raising.
    """
    workload, checkpoint, settings, devices = request
    if workload.chunk not in (None, 1):
        raise InputError(f"chunk: got {workload.chunk} with split, expected 1: devices share one image at a time")
    if settings.compiled:
        raise InputError("compiled: got true with split, expected false: devices meet in each block; leave it out")
    check_devices(devices)
    check_rows(settings.height // DOWNSCALE, len(devices))
    images = workload.remaining
    used = [workload.prompts[image.prompt] for image in images]
    encoded = workload.encoded
    if encoded is None:
        encoder = load_encoder(checkpoint, devices[0], settings.dtype, settings.reference)
        encoded = encode_texts(encoder, used, settings.negative_prompt, poll)
        del encoder
    texts, negative = encoded
    models = load_on(devices, checkpoint, settings)
    check_splittable("checkpoint", models[0].transformer)
    transformers, autoencoder = [model.transformer for model in models], models[0].autoencoder
    assert autoencoder is not None
    with DeviceThreads() as threads:
        split = Split(devices, relative_speeds(devices, transformers), threads)
        sharded = ShardedModel(partial(split.run, poll=poll), transformers)
        for image in images:
            prompts = Conditioning([texts[workload.prompts[image.prompt]]], negative)
            # On the CPU, because the decode may lose the device that has them.
            latents = sample(models[0], settings, (image,), prompts, poll, workload.inputs, sharded).cpu()
            living = [devices[member] for member in split.living]
            yield image, decode_split(autoencoder, latents, living, threads, checkpoint, settings, poll)


def decode_split(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    devices: Sequence[torch.device],
    threads: DeviceThreads,
    checkpoint: Checkpoint,
    settings: ResolvedSettings,
    poll: Poll,
) -> torch.Tensor:
    """Return the image of `latents`, decoded by all `devices`, or by the CPU if none of them can."""
    try:
        return decode(autoencoder, latents, poll, devices, threads=threads)[0]
    except Exception as error:
        if not (is_out_of_memory(error) or is_driver_error(error)):
            raise
        failure = error
    logger.warning("no device could decode the image (%s), the CPU decodes it", first_line(release_memory_of(failure)))
    # Loaded again, because the weights may be on a device that failed.
    return decode(load_decoder(checkpoint, torch.device("cpu"), settings.dtype), latents, poll)[0]


def load_on(devices: Sequence[torch.device], checkpoint: Checkpoint, settings: ResolvedSettings) -> list[Models]:
    loaded: dict[torch.device, Models] = {}
    for device in devices:
        if device not in loaded:
            decoder = None if loaded else checkpoint
            loaded[device] = load_models(checkpoint, device, settings, decoder)
    return [loaded[device] for device in devices]
