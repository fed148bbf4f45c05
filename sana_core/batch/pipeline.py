"""What a worker does with a chunk: sample it and decode it. Which worker, which chunk makes no difference."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..checkpoints import find_part, follow, inspect_checkpoint, load_autoencoder, load_text_encoder, load_transformer
from ..checkpoints.load import build_module, shift_of
from ..checkpoints.lora import merge_loras, reference_note
from ..decode import decode_latents
from ..errors import InputError
from ..model.forward import longest_prompt
from ..model.fp8 import quantise_products
from ..model.known_models import DEFAULT_RESOLUTION, MAX_TOKENS, Defaults, model_defaults
from ..model.latents import latent_shape, noise_stream
from ..model.layers import join_projections
from ..model.reference import AUTO, reference_of
from ..model.step_cache import StepCache
from ..model.text import TextEncoder, encode_prompts
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_name, check_number, check_text
from ..sampling.guidance import ControlledModel, ShardedModel, check_sampling, denoiser, perturbed_attention
from ..sampling.masked import start_from_image
from ..sampling.samplers import Denoiser, StepState, find_sampler, own_sigmas, sampler_kwargs
from ..sampling.schedules import shift_sigmas
from ..sampling.trail import WHOLE, Draft, Round
from .plan import NO_IMAGES, Chunk, Embedding, ImageInputs, Step, samples_one_by_one
from .verifier import Verifier, check_verifier, load_verifier

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, SanaTransformer2DModel

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
# as in ComfyUI's LoRA loaders
LARGEST_STRENGTH = 100.0


class SamplingSettings(NamedTuple):
    """How images are generated, besides prompt and seed. None is what the model's authors use: 20 steps, guidance 4.5
    and flow_dpmpp_2m, or SANA-Sprint's.

    Perturbed attention of `pag_scale` acts in `pag_blocks`, like "8"; guidance acts from the first share of
    `guidance_interval` of the sampling to the second. `reference` is whose arithmetic is followed where NVIDIA's code
    and diffusers' differ: "nvidia", "diffusers", or with "auto" that of the checkpoint's layout. `loras` are added to
    the transformer's weights, each a file, on a cluster of each machine, and its strength. `verifier` is the
    folder, there too, of what scores drafts by hidden states. Above 0, `step_cache` is the share by which
    the first block's update may change while the others are left out: faster, nearly the same image (step_cache.py).
    `fp8` multiplies in 8 bits: faster on GPUs that can, with half of the memory, and inexact too (fp8.py).
    """

    width: int = DEFAULT_RESOLUTION
    height: int = DEFAULT_RESOLUTION
    steps: int | None = None
    guidance: float | None = None
    negative_prompt: str = ""
    sampler: str | None = None
    pag_scale: float = 0.0
    pag_blocks: str = ""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    dtype: str = "float32"
    compiled: bool = False
    reference: str = AUTO
    loras: tuple[tuple[str, float], ...] = ()
    verifier: str | None = None
    step_cache: float = 0.0
    fp8: bool = False


def resolve_settings(settings: SamplingSettings, checkpoint: str | Path) -> SamplingSettings:
    """Return the settings with the defaults of the checkpoint's model in place of None; only headers are read.

    Raises InputError for a size that is not a multiple of 32, numbers out of range, a sampler that is not for the
    model, an unknown reference, a LoRA that does not fit, and what is no SANA.
    """
    info = follow(find_part(inspect_checkpoint(checkpoint), "transformer"), settings.reference)
    module = build_module(info)
    config: Any = module.config
    defaults = model_defaults(config)
    settings = settings._replace(
        sampler=settings.sampler or defaults.sampler,
        steps=defaults.steps if settings.steps is None else settings.steps,
        guidance=defaults.guidance if settings.guidance is None else settings.guidance,
        reference=info.reference,
        loras=tuple((str(Path(file).absolute()), strength) for file, strength in settings.loras),
        verifier=settings.verifier and str(Path(settings.verifier).absolute()),
    )
    assert settings.sampler is not None and settings.steps is not None and settings.guidance is not None
    check_text("negative_prompt", settings.negative_prompt)
    latent_shape(settings.width, settings.height, 1)
    check_sampling(config, Defaults(settings.sampler, settings.steps, settings.guidance))
    check_number("step_cache", settings.step_cache, 0, 1)
    if settings.step_cache and settings.compiled:
        raise InputError("step_cache: got it with compile, which makes one graph of all blocks; leave one of them out")
    check_number("guidance_interval", settings.guidance_interval[0], 0, 1)
    check_number("guidance_interval", settings.guidance_interval[1], settings.guidance_interval[0], 1)
    if settings.pag_scale:
        perturbed_attention(config, settings.pag_scale, settings.pag_blocks)
    if settings.verifier is not None:
        check_verifier(load_verifier(settings.verifier), config)
    for _, strength in settings.loras:
        check_number("lora", strength, -LARGEST_STRENGTH, LARGEST_STRENGTH)
    merge_loras(module, settings.loras)
    for file, _ in settings.loras:
        lora = inspect_checkpoint(file)
        if note := reference_note(lora.name, lora.weights.metadata, info.reference):
            logger.warning(note)
    check_name("dtype", settings.dtype, DTYPES)
    if settings.fp8 and settings.dtype != "bfloat16":
        raise InputError(f"fp8: got it with dtype {settings.dtype}, expected bfloat16; choose that, or leave it out")
    return settings


def check_prompts(prompts: Iterable[str]) -> None:
    """Raise InputError, with the number of the prompt, for what no encoding can carry."""
    for number, prompt in enumerate(prompts, 1):
        check_text(f"prompt {number}", prompt)


def encode_text(encoder: TextEncoder, prompt: str, instruction: bool) -> Embedding:
    """Return one prompt on the CPU. It is encoded alone, so that it is the same in any batch."""
    embeds, mask = encode_prompts(encoder, [prompt], instruction)
    length = longest_prompt(mask)
    # copies, for on a CPU a view would keep the padding behind it
    return embeds[:, :length].to("cpu", copy=True), mask[:, :length].to("cpu", copy=True)


def encode_negative(encoder: TextEncoder, prompt: str) -> Embedding:
    """Return the negative prompt on the CPU, all 300 tokens: NVIDIA's mask is that of the positive prompt."""
    embeds, mask = encode_prompts(encoder, [prompt], instruction=False)
    return embeds.cpu(), mask.cpu()


def load_encoder(checkpoint: str | Path, device: torch.device, dtype: str, reference: str = AUTO) -> TextEncoder:
    """Return the text encoder. Gemma 2 overflows in float16, so it is bfloat16 there."""
    return load_text_encoder(checkpoint, device, torch.float32 if dtype == "float32" else torch.bfloat16, reference)


def load_decoder(checkpoint: str | Path, device: torch.device, dtype: str) -> AutoencoderDC:
    """Return the autoencoder. DC-AE overflows in float16, so it is bfloat16 there."""
    return load_autoencoder(checkpoint, device, torch.float32 if dtype == "float32" else torch.bfloat16)


def encode_texts(
    encoder: TextEncoder, prompts: Iterable[str], negative_prompt: str, poll: Poll = no_poll
) -> tuple[dict[str, Embedding], Embedding]:
    """Return each different prompt encoded once, and the negative one. `poll` cancels by raising."""
    texts: dict[str, Embedding] = {}
    for prompt in dict.fromkeys(prompts):
        poll()
        texts[prompt] = encode_text(encoder, prompt, instruction=True)
    return texts, encode_negative(encoder, negative_prompt)


class Models(NamedTuple):
    """A checkpoint on one device, without its text encoder, and what looks at its drafts."""

    transformer: SanaTransformer2DModel
    autoencoder: AutoencoderDC | None
    shift: float
    verifier: Verifier | None = None


def load_models(
    checkpoint: str | Path,
    device: torch.device,
    settings: SamplingSettings,
    autoencoder: str | Path | None = None,
    resolution: int | None = None,
) -> Models:
    """Return the transformer of `checkpoint` on `device`, with the dtype, reference, LoRAs, fp8 and verifier of
    `settings`, and the VAE of the checkpoint `autoencoder`, if any.

    `resolution` in pixels overrides what the checkpoint says. Raises CheckpointError, MissingFileError or ReadError for
    what cannot be loaded, and as `merge_loras` does.
    """
    transformer = load_transformer(checkpoint, device, getattr(torch, settings.dtype), resolution, settings.reference)
    merge_loras(transformer, settings.loras)
    join_projections(transformer)
    if settings.fp8:
        quantise_products(transformer)
    decoder = None if autoencoder is None else load_decoder(autoencoder, device, settings.dtype)
    shift = shift_of(inspect_checkpoint(checkpoint), resolution, settings.reference)
    verifier = None if settings.verifier is None else load_verifier(settings.verifier, device)
    return Models(transformer, decoder, shift, verifier)


def stack_texts(texts: Sequence[Embedding]) -> Embedding:
    """Return prompts as one batch of T = 300 tokens; a single row where all are the same one."""
    if all(text is texts[0] for text in texts):
        texts = texts[:1]
    pads = [(0, MAX_TOKENS - mask.shape[1]) for _, mask in texts]
    embeds = [torch.nn.functional.pad(embeds, (0, 0, *pad)) for (embeds, _), pad in zip(texts, pads, strict=True)]
    mask = [torch.nn.functional.pad(mask, pad) for (_, mask), pad in zip(texts, pads, strict=True)]
    return torch.cat(embeds), torch.cat(mask)


class Conditioning(NamedTuple):
    """The encoded prompt of each image of a chunk, and the negative prompt of all."""

    texts: Sequence[Embedding]
    negative: Embedding


@torch.no_grad()
def sample(
    models: Models,
    settings: SamplingSettings,
    chunk: Chunk,
    prompts: Conditioning,
    poll: Poll = no_poll,
    images: ImageInputs = NO_IMAGES,
    sharded: ShardedModel | None = None,
) -> torch.Tensor:
    """Return latents [n, 32, H / 32, W / 32], float32 in the model's scale, of `chunk` and its `prompts`.

    `settings` are those that `resolve_settings` returns. `poll` is called every step and cancels by raising.
    Without a ControlNet, `sharded` may compute the model on several devices.
    """
    transformer = models.transformer
    parts = list(split_chunk(models, settings, chunk, prompts, images))
    if len(parts) > 1:
        return torch.cat([sample(models, settings, part, texts, poll, own) for part, texts, own in parts])
    assert settings.sampler is not None and settings.steps is not None
    flow, reference = find_sampler(settings.sampler), reference_of(transformer)
    model = guided(models, settings, prompts, images, sharded)
    shape = latent_shape(settings.width, settings.height, len(chunk))
    noise = noise_stream(torch.empty(shape), 0, [image.seed for image in chunk])
    # the seed's first noise is passed over too where latents are given: what a sampler draws later stays the same
    start, numbers = next(noise), [image.number for image in chunk]
    if images.latents is not None:
        start = images.latents[numbers].to(start)
    start = start.to(transformer.device)
    more, sigmas = sampler_kwargs(flow, reference, noise), own_sigmas(flow, reference, settings.steps, models.shift)
    if images.init is not None:
        model, start = start_from_image(images.init, model, start, sigmas[0])
    if images.trail is not None:
        model, sigmas = images.trail.follow(model), sigmas[: images.trail.until + 1]

    def show(steps: int, latents: torch.Tensor) -> None:
        if images.callback is not None and steps:
            images.callback(Step(steps - 1, float(sigmas[steps]), latents, tuple(numbers)))

    def before_step(state: StepState) -> None:
        poll()
        show(state["i"], state["x"])

    latents = flow.sample(model, start, sigmas, callback=before_step, **more)
    show(len(sigmas) - 1, latents)
    return latents


def guided(
    models: Models, settings: SamplingSettings, prompts: Conditioning, images: ImageInputs, sharded: ShardedModel | None
) -> Denoiser:
    """Return the denoiser of `sample`, with its guidance."""
    assert settings.sampler is not None and settings.guidance is not None
    transformer, cache = models.transformer, StepCache(settings.step_cache) if settings.step_cache else None
    ends = shift_sigmas(1 - torch.tensor(settings.guidance_interval, dtype=torch.float64), models.shift).tolist()
    perturbed = None
    if settings.pag_scale:
        perturbed = perturbed_attention(transformer.config, settings.pag_scale, settings.pag_blocks)
    capture = images.trail.capture if images.trail else None
    return denoiser(
        sharded or ControlledModel(transformer, images.control, capture, cache, settings.compiled),
        stack_texts(prompts.texts),
        stack_texts([prompts.negative]),
        settings.guidance,
        find_sampler(settings.sampler).whole_timesteps,
        perturbed,
        (ends[0], ends[1]),
    )


def split_chunk(
    models: Models, settings: SamplingSettings, chunk: Chunk, prompts: Conditioning, images: ImageInputs
) -> Iterator[tuple[Chunk, Conditioning, ImageInputs]]:
    """Yield the parts of a chunk that are sampled as one batch, each with its own of `prompts` and `images`."""
    # what a step may leave out is decided for a whole batch
    alone = settings.step_cache or samples_one_by_one(models.transformer.device)
    size, control = 1 if alone else len(chunk), images.control
    for first in range(0, len(chunk), size):
        own = slice(first, first + size)
        if control is not None and len(control.latents) > 1:
            images = images._replace(control=control._replace(latents=control.latents[own]))
        yield chunk[own], prompts._replace(texts=prompts.texts[own]), images


@torch.no_grad()
def decode(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    poll: Poll = no_poll,
    devices: Sequence[torch.device] | None = None,
) -> list[torch.Tensor]:
    """Return an image [3, H, W] in [-1, 1], float32 on the CPU, for each of the latents that `sample` returned.

    All of `devices` decode each together, without them the autoencoder's.
    """
    latents = (latents / autoencoder.config.scaling_factor).to(autoencoder.dtype)
    images = []
    for latent in latents:
        poll()
        # one by one: the memory of one decode, and the same pixels in any chunk
        images.append(
            decode_latents(autoencoder, latent[None], devices=devices, poll=poll)[0].clamp(-1, 1).float().cpu()
        )
    return images


def generate_chunk(
    models: Models,
    settings: SamplingSettings,
    chunk: Chunk,
    prompts: Conditioning,
    poll: Poll = no_poll,
    round: Round = WHOLE,
    images: ImageInputs = NO_IMAGES,
) -> list[torch.Tensor | Draft]:
    """Return the decoded images of `sample`, or the Drafts of a `round` that ends before the last step."""
    assert models.autoencoder is not None and settings.steps is not None
    if round is WHOLE:
        return [*decode(models.autoencoder, sample(models, settings, chunk, prompts, poll, images), poll)]
    generated = list[torch.Tensor | Draft]()
    block = models.verifier.shape.block if models.verifier else None
    for part, texts, own in split_chunk(models, settings, chunk, prompts, images):
        trail = round.trail([image.number for image in part], settings.steps, block)
        latents = sample(models, settings, part, texts, poll, own._replace(trail=trail))
        if round.until is None:
            generated += decode(models.autoencoder, latents, poll)
        else:
            x0s = torch.stack(trail.x0s, 1).cpu()
            if models.verifier is None or trail.capture is None:
                generated += map(Draft, x0s, decode(models.autoencoder, trail.x0s[-1], poll))
            else:
                scores = models.verifier.score(trail.capture.states, *stack_texts(texts.texts))
                generated += [Draft(each, None, score) for each, score in zip(x0s, scores.tolist(), strict=True)]
    return generated
