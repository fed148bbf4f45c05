"""What a process does that draws some rows of a picture: it samples them, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..batch.draw import Embedding, Models, Settings, sample
from ..batch.plan import Picture
from ..batch.worker import Worker, unpack
from ..forward import Constants, Perturbation, prepare, velocity
from ..guidance import Shared, Steered
from ..latents import DOWNSCALE
from .decode import decode_shard
from .processes import ProcessExchange, connect, gather, run_rows
from .rows import Span, part_of, share_rows
from .share import Share
from .speed import device_name, measure


@torch.no_grad()
def draw_rows(
    models: Models,
    settings: Settings,
    picture: Picture,
    text: Embedding,
    negative: Embedding,
    exchange: ProcessExchange,
    spans: list[Span],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents [32, h, w] of `picture`, and pixels [3, n, W] in [-1, 1], which `decode_shard` makes of them.

    `spans` are the rows of all processes, by rank. While they sample and decode, the processes tell each other the sums
    and the rows of each block. In between the latents are gathered in all of them, an eighth of a byte for a pixel.
    """
    span = spans[exchange.rank]
    shared = Shared(run_rows(exchange, span, spans[-1].bottom), [Steered(models.transformer, None)], span)
    rows = sample(models, settings, (picture,), [text], negative, shared=shared)
    latents = gather(rows, [bottom - top for top, bottom in spans], 2)
    autoencoder = models.autoencoder
    assert autoencoder is not None
    scaled = (latents / autoencoder.config.scaling_factor).to(autoencoder.dtype)
    pixels = decode_shard(autoencoder, scaled, exchange, spans)
    return latents[0].cpu(), pixels[0].clamp(-1, 1).float().cpu()


class Member:
    """An actor of a cluster that computes some rows of each picture. What comes and goes is plain, as for a Worker."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.worker = Worker(words)
        self.store: dist.Store | None = None
        # with whom this one is connected: where they found each other, which is another place each time
        self.joined: tuple[str, int] | None = None
        self.exchange = ProcessExchange(0, 1)
        self.constants: dict[tuple, Constants] = {}
        self.device = "", 1.0  # its kind and its speed

    def load(self, neighbours: int, changed: Mapping[str, torch.Tensor]) -> tuple[str, float]:
        """Load everything, as `Worker.load` does, and return the kind of this one's device and its speed."""
        self.worker.load(neighbours, changed)
        transformer = self.worker.models.transformer
        self.device = device_name(transformer.device), measure(transformer.device, transformer)
        return self.device

    def begin(self, words: Mapping[str, Any]) -> tuple[str, float]:
        """Work for another job from now on, which wants the same weights, and return what `load` does."""
        self.worker.begin(unpack(words))
        self.constants.clear()
        return self.device

    def open_store(self, host: str, world: int) -> int:
        """Open where `world` processes find each other, at the address `host` of this machine; return its port."""
        self.leave()
        store = dist.TCPStore(host, 0, world, is_master=True, wait_for_workers=False)
        self.store = store
        return store.port

    def join(self, rank: int, world: int, address: tuple[str, int]) -> None:
        """Connect to the others, unless that is done."""
        if self.joined == address:
            return
        self.leave()
        store = self.store if rank == 0 else dist.TCPStore(*address, world, is_master=False)
        assert store is not None
        self.exchange = connect(store, rank, world, self.worker.models.transformer.device)
        self.joined = address

    def leave(self) -> None:
        if self.joined is not None:
            self.joined = None
            dist.destroy_process_group()

    def draw(
        self, rank: int, speeds: Sequence[float], address: tuple[str, int], words: Sequence[int], prompt: str
    ) -> torch.Tensor:
        """Return the pixels [3, n, W] of this one's rows of a picture; `speeds` are those of all ranks."""
        worker, settings = self.worker, self.worker.job.settings
        text = worker.encode([prompt])[0]
        spans = share_rows(settings.height // DOWNSCALE, speeds)
        self.join(rank, len(speeds), address)
        _, pixels = draw_rows(worker.models, settings, Picture(*words), text, worker.negative, self.exchange, spans)
        return pixels

    @torch.no_grad()
    def velocity(
        self,
        rank: int,
        speeds: Sequence[float],
        address: tuple[str, int],
        inputs: Sequence[torch.Tensor | None],
        number: int,
        prompts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, frozenset[int]],
    ) -> torch.Tensor:
        """Return this one's rows [B, 32, n, w] of the velocity, computed as `forward.velocity` does.

        `inputs` are latents [B, 32, h, w], timesteps [B] and guidance [B] or None; `prompts` are embeddings [P, T, C],
        their mask, and which pictures have perturbed attention [B, 1, 1], or None, in which blocks. What depends on
        them alone is computed once for a `number`, until the next job.
        """
        transformer = self.worker.models.transformer
        x, timestep, guidance = (None if one is None else one.to(transformer.device) for one in inputs)
        assert x is not None and timestep is not None
        embeds, mask, flags, blocks = prompts
        key = (number, *x.shape)
        if key not in self.constants:
            self.constants[key] = prepare(transformer, embeds.to(x), mask.to(x), *x.shape[-2:])
        perturbation = None if flags is None else Perturbation(flags.to(x.device), blocks)
        span = share_rows(x.shape[2], speeds)[rank]
        self.join(rank, len(speeds), address)
        constants = part_of(self.constants[key], span, x.shape[2])
        share = Share(self.exchange, x.shape[3])
        rows = x[:, :, slice(*span)]
        return velocity(transformer, rows, timestep, constants, guidance, perturbation, (), share).cpu()
