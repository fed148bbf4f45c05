"""From prompts to images in one call, without a host."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .batch.best import Backend, Best, Pick, find_best, generate_picks, place_scorer
from .batch.pipeline import Request, SamplingSettings, encode_negative, load_encoder, prepare
from .batch.plan import (
    Embedding,
    FailedImage,
    ImageInputs,
    OnStatus,
    WorkerReport,
    Workload,
    batch_images,
    failed_images,
    no_status,
)
from .checkpoints import Checkpoint, find_part, inspect_checkpoint
from .checkpoints.checkpoint import Source
from .checkpoints.load import config_of
from .engine.local import generate_local
from .errors import FailedImagesError, InputError
from .model.forward import check_mask, longest_prompt
from .model.known_models import MAX_TOKENS, SPRINT
from .model.latents import latent_shape
from .model.reference import RULES
from .runtime.text import Json
from .sampling.samplers import find_sampler

if TYPE_CHECKING:
    from .cluster.connection import ClusterSettings
    from .runtime.folder_lock import Hold


class Embeds(NamedTuple):
    """Embeddings [P, T, C] and masks [P, T] of P prompts, and of the negative one, whose rows are all the same."""

    prompt_embeds: torch.Tensor | None
    prompt_attention_mask: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise InputError for shapes that the model of `checkpoint` does not take, and for a missing mask."""
        width = config_of(find_part(checkpoint, "transformer")).caption_channels
        for name, mask_name in (self._fields[:2], self._fields[2:]):
            embeds, mask = getattr(self, name), getattr(self, mask_name)
            if (embeds is None) != (mask is None):
                raise InputError(
                    f"{mask_name}: got one of it and {name}, expected both, as encode_prompts returns them"
                )
            if embeds is None:
                continue
            if embeds.dim() != 3 or embeds.shape[2] != width or not 0 < embeds.shape[1] <= MAX_TOKENS:
                got = list(embeds.shape)
                raise InputError(f"{name}: got the shape {got}, expected [prompts, up to {MAX_TOKENS} tokens, {width}]")
            if mask.shape != embeds.shape[:2]:
                got, expected = list(mask.shape), list(embeds.shape[:2])
                raise InputError(f"{mask_name}: got the shape {got}, expected {expected}")
            check_mask(mask_name, mask)
        negative = self.negative_prompt_embeds
        if negative is not None and not all(torch.equal(row, negative[0]) for row in negative[1:]):
            raise InputError("negative_prompt_embeds: got different rows, expected one negative prompt for all images")


def encoded_prompts(embeds: Embeds, request: Request) -> tuple[Mapping[str, Embedding], Embedding]:
    """Return {prompt of the request: embedding} and the negative embedding, on the CPU. `embeds` are checked.

    If the negative prompt is needed and missing, the first device encodes the negative prompt of the settings.
    """
    assert embeds.prompt_embeds is not None and embeds.prompt_attention_mask is not None
    settings, texts = request.settings, {}
    rows = zip(request.workload.prompts, embeds.prompt_embeds, embeds.prompt_attention_mask, strict=True)
    for name, row, mask in rows:
        length = longest_prompt(mask[None])
        texts[name] = row[None, :length].to("cpu", copy=True), mask[None, :length].cpu()
    if embeds.negative_prompt_embeds is not None and embeds.negative_prompt_attention_mask is not None:
        return texts, (embeds.negative_prompt_embeds[:1].cpu(), embeds.negative_prompt_attention_mask[:1].cpu())
    guidance = find_sampler(settings.sampler).effective_guidance(RULES[settings.reference], settings.guidance)
    if settings.sampler == SPRINT or guidance == 1:
        # The negative prompt has no pass.
        return texts, next(iter(texts.values()))
    encoder = load_encoder(request.checkpoint, request.devices[0], settings.dtype, settings.reference)
    return texts, encode_negative(encoder, settings.negative_prompt)


# Inputs of images in addition to prompts and seeds. Only devices of this machine accept them.
INPUTS = (*Embeds._fields, "latents", "callback")
OPTIONS = (*SamplingSettings._fields, *INPUTS, "best", "of", "scorer", "chunk", "say", "report")


def generate(
    prompts: str | Sequence[str] | None,
    checkpoint: Source,
    seed: int = 0,
    count: int = 1,
    devices: Sequence[str | torch.device] | None = None,
    cluster: str | ClusterSettings | None = None,
    split: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Return images [len(prompts) * count, 3, height, width] in [-1, 1], float32 on the CPU.

    A single string is one prompt. Image i of each prompt uses seed + i, so it is the same alone and in a batch.

    `devices` work in parallel; None: all accelerators, or the CPU. `cluster`: use its GPUs instead. It is the address
    of a Ray cluster, "auto", or a `sana_core.cluster.connection.ClusterSettings`. `split`: all devices share each
    image.

    `options` are the fields of `sana_core.batch.pipeline.SamplingSettings`, like width, steps and guidance. Also:
    `chunk`: how many images a device generates at once; None or 0: as many as fit. `say`: called with a line while the
    run waits for the cluster. `callback`: called after each step with a `Step`: step, sigma, latents, images.

    As in diffusers' SanaPipeline: `prompt_embeds` [P, T, C] with `prompt_attention_mask` [P, T], from `encode_prompts`,
    and None as `prompts`; `negative_prompt_embeds` with its mask; `latents` [N, 32, height / 32, width / 32], the noise
    that the images begin with.

    With `best`, `of` and `scorer`, the images are those of `generate_best`; `report`, a dict, gets "picked": prompt,
    seed, score and rank of each.

    Raises InputError for an unknown option, a size that is not a multiple of 32, values out of range and a LoRA that
    does not fit, CheckpointError, MissingFileError or ReadError for a file that cannot be loaded. A prompt of more than
    300 tokens is cut, with a warning in the log. Raises FailedImagesError if single images failed, for example because
    of NaN. Its attribute `images` has all other images.
    """
    settings, best = find_settings(options), find_best_of(options, count)
    if split and cluster is not None:
        raise InputError("split: got a cluster, expected devices of this machine; leave one of them out")
    if cluster is not None:
        refuse_inputs(options, "cluster")
    backend = find_backend(cluster, options.get("say", no_status), split)
    images = count if best is None else best.of
    if cluster is not None and best is None:
        # No device of this machine takes part.
        devices = None
    request = make_request(prompts, checkpoint, settings, seed, images, devices, options)
    if best is None:
        return collect(backend, request)
    picks = pick_images(backend, request, best)
    options.get("report", {})["picked"] = [pick.describe(named=True) for pick in picks]
    return torch.stack([pick.pixels for pick in picks])


def generate_best(
    prompts: str | Sequence[str],
    checkpoint: Source,
    seed: int = 0,
    devices: Sequence[str | torch.device] | None = None,
    cluster: str | ClusterSettings | None = None,
    **options: Any,
) -> list[Pick]:
    """Return the `best` of `of` images of each prompt that fit it best, the best first: pixels, score and rank.

    `scorer` is the folder of a CLIP. `generate` explains the other arguments.
    """
    settings, best = find_settings(options), find_best_of(options, 1)
    if best is None:
        raise InputError("best: got none, expected best, of and scorer; use generate for images without a choice")
    backend = find_backend(cluster, options.get("say", no_status))
    request = make_request(prompts, checkpoint, settings, seed, best.of, devices, options)
    return pick_images(backend, request, best)


def find_settings(options: Json) -> SamplingSettings:
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1, 0.0)[0]
            raise InputError(f"{name:.40}: no option of generate; the nearest is {near}")
    return SamplingSettings(**{name: options[name] for name in SamplingSettings._fields if name in options})


def find_best_of(options: Json, count: int) -> Best | None:
    if options.get("best") is not None:
        refuse_inputs(options, "best")
    return find_best(options.get("best"), options.get("of"), options.get("scorer"), count)


def refuse_inputs(options: Json, other: str) -> None:
    for name in INPUTS:
        if options.get(name) is not None:
            raise InputError(f"{name}: got it with {other}, expected images of prompts; leave one of them out")


def make_request(
    prompts: str | Sequence[str] | None,
    checkpoint: Source,
    settings: SamplingSettings,
    seed: int,
    count: int,
    devices: Sequence[str | torch.device] | None,
    options: Json,
) -> Request:
    texts: Sequence[str] = [prompts] if isinstance(prompts, str) else prompts or ()
    embeds = Embeds(*map(options.get, Embeds._fields))
    if embeds.prompt_embeds is not None:
        if prompts is not None:
            raise InputError("prompt_embeds: got them beside prompts, expected one of both; give None as prompts")
        checkpoint = inspect_checkpoint(checkpoint)
        embeds.check(checkpoint)
        texts = [f"prompt_embeds[{number}]" for number in range(len(embeds.prompt_embeds))]
    elif any(tensor is not None for tensor in embeds):
        raise InputError(
            "prompt_embeds: got only masks or negative embeddings; give prompt_embeds too, or none of them"
        )
    images = batch_images(len(texts), count, seed)
    latents = options.get("latents")
    if latents is not None:
        expected = [len(images), *latent_shape(settings.width, settings.height, 1)[1:]]
        if list(latents.shape) != expected:
            raise InputError(f"latents: got the shape {list(latents.shape)}, expected {expected}")
    image_inputs = ImageInputs(latents=latents, callback=options.get("callback"))
    workload = Workload(texts, images, options.get("chunk"), inputs=image_inputs)
    request = prepare(workload, checkpoint, settings, devices)
    if embeds.prompt_embeds is None:
        return request
    return request._replace(workload=workload._replace(encoded=encoded_prompts(embeds, request)))


def collect(backend: Backend, request: Request) -> torch.Tensor:
    """Return the images of `request` [N, 3, H, W], in its order."""
    images = torch.empty(0)
    count, settings = len(request.workload.images), request.settings
    failed: dict[int, str] = {}
    for image, pixels in backend(request):
        if isinstance(pixels, FailedImage):
            failed[image.number] = pixels.reason
            continue
        if not len(images):
            # Only now, because wrong sizes are found before the first image.
            images = torch.full((count, *pixels.shape), math.nan)
        images[image.number] = pixels
    if failed:
        if not len(images):
            images = torch.full((count, 3, settings.height, settings.width), math.nan)
        error = failed_images(failed, "the other images are in the attribute images of this error")
        error.images = images
        raise error
    return images


def pick_images(backend: Backend, request: Request, best: Best) -> list[Pick]:
    # Load the scorer before the batch takes the memory.
    scorer = place_scorer(best, request)
    picks: list[Pick] = []
    failure = None
    try:
        picks.extend(generate_picks(backend, request, best, scorer))
    except FailedImagesError as error:
        failure = error
    picks.sort(key=lambda pick: (pick.image.prompt, pick.rank))
    if failure is not None:
        failure.picks = picks
        raise failure
    return picks


def find_backend(
    cluster: str | ClusterSettings | None,
    on_status: OnStatus,
    split: bool = False,
    report: WorkerReport | None = None,
    described: Json | None = None,
    shared: Hold | None = None,
) -> Backend:
    """Return the function that generates the images of a request: on its devices, or on the cluster's GPUs.

    `split`: all devices share each image. `report` counts the images of each worker. `described` and `shared`: see
    `generate_on_cluster`.
    """
    if split:
        from .split.generate import generate_split

        return generate_split
    if cluster is None:
        return lambda request: generate_local(request, report, described)
    from .cluster.batch import generate_on_cluster
    from .cluster.connection import ClusterSettings

    where = ClusterSettings(cluster) if isinstance(cluster, str) else cluster
    return lambda request: generate_on_cluster(request, where, described, report, shared, on_status)
