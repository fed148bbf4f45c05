"""Samples and decodes a chunk of images. All workers use this, so an image does not depend on its worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch

from ..checkpoints import (
    Checkpoint,
    find_part,
    follow,
    inspect_checkpoint,
    load_autoencoder,
    load_text_encoder,
    load_transformer,
)
from ..checkpoints.checkpoint import Source
from ..checkpoints.generation import shift_of
from ..checkpoints.keys import LARGEST_STRENGTH
from ..checkpoints.load import build_module, config_of
from ..checkpoints.lora import merge_loras, reference_note
from ..decode import decode_latents
from ..errors import InputError
from ..model.forward import longest_prompt
from ..model.known_models import DEFAULT_RESOLUTION, MAX_TOKENS, edits_images
from ..model.latents import check_patches, latent_shape, noise_stream
from ..model.layers import join_projections
from ..model.reference import AUTO, reference_of
from ..model.text import TextEncoder, encode_prompts
from ..runtime.accelerator import current_accelerator
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_finite, check_name, check_number, check_text
from ..runtime.device_team import DeviceThreads
from ..runtime.text import get_logger
from ..sampling.guidance import ControlledModel, ShardedModel, choose_sampling, denoiser, perturbed_attention
from ..sampling.samplers import StepState, find_sampler, start_from_image
from ..sampling.schedules import shift_sigmas
from ..sampling.step_graph import StepGraph, recorder_for
from .plan import NO_IMAGES, Chunk, Embedding, FailedImage, ImageInputs, Step, Workload, samples_one_by_one

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, SanaTransformer2DModel

logger = get_logger(__name__)

DTYPES = ("float32", "bfloat16", "float16")


class SamplingSettings(NamedTuple):
    """All settings of images except prompt and seed, with their help.

    The options of the commands and the keywords of `generate` are these fields. None means the value that the model's
    authors use: 20 steps, guidance 4.5 and flow_dpmpp_2m, or the values of SANA-Sprint.
    """

    width: Annotated[int, f"pixels, a multiple of 32; default: {DEFAULT_RESOLUTION}"] = DEFAULT_RESOLUTION
    height: Annotated[int, f"pixels, a multiple of 32; default: {DEFAULT_RESOLUTION}"] = DEFAULT_RESOLUTION
    steps: Annotated[int | None, "default: the model's, such as 20, or 2 for SANA-Sprint"] = None
    guidance: Annotated[float | None, "default: the model's, such as 4.5"] = None
    negative_prompt: Annotated[str, "default: none, or NVIDIA's sentence for a video"] = ""
    sampler: Annotated[
        str | None, "default: flow_dpmpp_2m, scm for SANA-Sprint, or flow_euler for a video with --first"
    ] = None
    pag_scale: Annotated[float, "perturbed-attention guidance, 1 to 3; 0 is off"] = 0.0
    pag_blocks: Annotated[str, "blocks to perturb, like 8 or 7,8"] = ""
    guidance_interval: Annotated[tuple[float, float], "shares of the sampling between which guidance acts"] = (0.0, 1.0)
    dtype: Annotated[
        str,
        "default: bfloat16 if all devices are accelerators that support it, else float32; float32 with --cluster; "
        "float16 is for models that were trained for it",
    ] = "float32"
    compiled: Annotated[
        bool,
        "torch.compile, with CUDA graphs in torch 2.14 or later; may be removed: the next GPU measurement decides "
        "whether it beats the CUDA graph",
    ] = False
    reference: Annotated[
        str, "whose arithmetic to follow where NVIDIA's code and diffusers' differ; auto: that of the file's layout"
    ] = AUTO
    # (path, strength) pairs that are merged into the weights. On a cluster the path must exist on every machine.
    loras: Annotated[tuple[tuple[str, float], ...], "a LoRA for this model; may be given several times"] = ()


class ResolvedSettings(SamplingSettings):
    """Settings that `resolve_settings` has checked and completed for one model. They contain no None."""

    steps: int
    guidance: float
    sampler: str


class Request(NamedTuple):
    """Everything that `prepare` has checked and resolved before anything is loaded.

    Each way of generating takes a Request, does not check it again, and yields its images: `generate_local`,
    `generate_split` and `generate_on_cluster` encode, sample and decode with the same functions of this file.
    """

    workload: Workload
    checkpoint: Checkpoint
    settings: ResolvedSettings
    # Devices of this machine. If a cluster generates the images, only a scorer uses them.
    devices: Sequence[torch.device]


def prepare(
    workload: Workload,
    checkpoint: Source,
    settings: SamplingSettings,
    devices: Sequence[str | torch.device] | None = None,
) -> Request:
    """Check the prompts, find the devices, inspect the checkpoint, and resolve the settings.

    `devices`: see `local_devices`.
    """
    for number, prompt in enumerate(workload.prompts, 1):
        check_text(f"prompt {number}", prompt)
    own_devices = local_devices(devices)
    checkpoint = inspect_checkpoint(checkpoint)
    if edits_images(config_of(find_part(checkpoint, "transformer"))):
        raise InputError(
            "checkpoint: got VIBE, expected a model of prompts alone; use the command generate, or edit_images"
        )
    return Request(workload, checkpoint, resolve_settings(settings, checkpoint), own_devices)


def local_devices(devices: Sequence[str | torch.device] | None) -> list[torch.device]:
    """Return `devices` as torch devices. None: all accelerators, or the CPU.

    A device that this machine lacks is left out with a warning.
    """
    kind = current_accelerator()
    accelerators = [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []
    if devices is None:
        return accelerators or [torch.device("cpu")]
    usable = []
    for name in devices:
        try:
            device = torch.device(name)
        except RuntimeError:
            example = accelerators[0] if accelerators else "cpu"
            raise InputError(f"devices: got {name!r:.40}, expected names like cpu or {example}") from None
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, 0)
        if device.type == "cpu" or device in accelerators:
            usable.append(device)
        else:
            logger.warning("batch: this machine has no %s; going on without it", device)
    if not usable:
        raise InputError(
            f"devices: got {', '.join(map(str, devices)):.80}, expected some of cpu {' '.join(map(str, accelerators))}"
        )
    return usable


def resolve_settings(settings: SamplingSettings, checkpoint: Source) -> ResolvedSettings:
    """Return the settings with the defaults of the checkpoint's model in place of None. Reads only the headers."""
    info = follow(find_part(inspect_checkpoint(checkpoint), "transformer"), settings.reference)
    config = config_of(info)
    check_text("negative_prompt", settings.negative_prompt)
    check_patches("size", latent_shape(settings.width, settings.height, 1), config.patch_size)
    chosen = choose_sampling(config, settings.sampler, settings.steps, settings.guidance)
    loras = tuple((str(Path(file).absolute()), strength) for file, strength in settings.loras)
    settings = settings._replace(**chosen._asdict(), reference=info.reference, loras=loras)
    check_number("guidance_interval", settings.guidance_interval[0], 0, 1)
    check_number("guidance_interval", settings.guidance_interval[1], settings.guidance_interval[0], 1)
    if settings.pag_scale:
        perturbed_attention(config, settings.pag_scale, settings.pag_blocks, "pag_")
    elif settings.pag_blocks:
        raise InputError("pag_blocks: got blocks without a pag_scale, expected 1 to 3; set it, or leave both out")
    if config.guidance_embeds:
        # SANA-Sprint has no pass of a negative prompt.
        if settings.negative_prompt:
            raise InputError("negative_prompt: got a text for SANA-Sprint, which has no negative prompt; leave it out")
        if tuple(settings.guidance_interval) != (0.0, 1.0):
            raise InputError("guidance_interval: got one for SANA-Sprint, whose guidance is built in; leave it out")
    for _, strength in settings.loras:
        check_number("lora", strength, -LARGEST_STRENGTH, LARGEST_STRENGTH)
    if settings.loras:
        # Without weights, to check that the LoRAs fit.
        merge_loras(build_module(info), settings.loras)
    for file, _ in settings.loras:
        lora = inspect_checkpoint(file)
        if note := reference_note(lora.name, lora.weights.metadata, info.reference):
            logger.warning(note)
    check_name("dtype", settings.dtype, DTYPES)
    return ResolvedSettings._make(settings)


def encode_text(encoder: TextEncoder, prompt: str, instruction: bool) -> Embedding:
    """Return the embedding of one prompt on the CPU. It is encoded alone, so that it has the same bits in any batch."""
    embeds, mask = encode_prompts(encoder, [prompt], instruction)
    length = longest_prompt(mask)
    # Copies, because on a CPU a view would keep the padding in memory.
    return embeds[:, :length].to("cpu", copy=True), mask[:, :length].to("cpu", copy=True)


def encode_negative(encoder: TextEncoder, prompt: str) -> Embedding:
    """Return the embedding of the negative prompt on the CPU.

    It keeps all 300 tokens, because NVIDIA's code masks the negative prompt with the mask of the positive prompt.
    """
    embeds, mask = encode_prompts(encoder, [prompt], instruction=False)
    return embeds.cpu(), mask.cpu()


def load_encoder(checkpoint: Source, device: torch.device, dtype: str, reference: str = AUTO) -> TextEncoder:
    """Return the text encoder. For float16 it is bfloat16, because Gemma 2 overflows in float16."""
    return load_text_encoder(checkpoint, device, torch.float32 if dtype == "float32" else torch.bfloat16, reference)


def load_decoder(checkpoint: Source, device: torch.device, dtype: str) -> AutoencoderDC:
    """Return the autoencoder. For float16 it is bfloat16, because DC-AE overflows in float16."""
    return load_autoencoder(checkpoint, device, torch.float32 if dtype == "float32" else torch.bfloat16)


def encode_texts(
    encoder: TextEncoder, prompts: Iterable[str], negative_prompt: str, poll: Poll = no_poll
) -> tuple[dict[str, Embedding], Embedding]:
    """Return the embeddings by prompt, and the embedding of the negative prompt. `poll` cancels by raising."""
    texts: dict[str, Embedding] = {}
    for prompt in dict.fromkeys(prompts):
        poll()
        texts[prompt] = encode_text(encoder, prompt, instruction=True)
    return texts, encode_negative(encoder, negative_prompt)


class Models(NamedTuple):
    transformer: SanaTransformer2DModel
    autoencoder: AutoencoderDC | None
    shift: float


def load_models(
    checkpoint: Checkpoint,
    device: torch.device,
    settings: ResolvedSettings,
    autoencoder: Checkpoint | None = None,
    resolution: int | None = None,
    decoder_dtype: str | None = None,
) -> Models:
    """Load the transformer of `checkpoint` on `device`, with the dtype, reference and LoRAs of `settings`, and the VAE
    of the checkpoint `autoencoder`, if any, with `decoder_dtype` or else the dtype of `settings`.

    `resolution` in pixels overrides the resolution in the checkpoint.
    """
    transformer = load_transformer(checkpoint, device, getattr(torch, settings.dtype), resolution, settings.reference)
    merge_loras(transformer, settings.loras)
    join_projections(transformer)
    decoder = None if autoencoder is None else load_decoder(autoencoder, device, decoder_dtype or settings.dtype)
    return Models(transformer, decoder, shift_of(checkpoint, resolution, settings.reference))


def stack_texts(texts: Sequence[Embedding]) -> Embedding:
    """Return prompts as one batch with 300 tokens each. If all are the same object, the batch has a single row."""
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
    settings: ResolvedSettings,
    chunk: Chunk,
    prompts: Conditioning,
    poll: Poll = no_poll,
    images: ImageInputs = NO_IMAGES,
    sharded: ShardedModel | None = None,
    counts: Counter[str] | None = None,
) -> torch.Tensor:
    """Return the latents [n, 32, H / 32, W / 32] of a chunk, float32 in the model's scale.

    `poll` is called every step and cancels by raising. Without a ControlNet, `sharded` may compute the model on several
    devices. With `counts`, see StepGraph, a single device may record its steps as a CUDA graph.
    """
    transformer = models.transformer
    if len(chunk) > 1 and samples_one_by_one(transformer.device):
        latents_of_images = []
        for row, image in enumerate(chunk):
            control = images.control
            if control is not None and len(control.latents) > 1:
                control = control._replace(latents=control.latents[row : row + 1])
            text, inputs = prompts._replace(texts=prompts.texts[row : row + 1]), images._replace(control=control)
            latents_of_images.append(sample(models, settings, (image,), text, poll, inputs, counts=counts))
        return torch.cat(latents_of_images)
    sampler, reference = find_sampler(settings.sampler), reference_of(transformer)
    perturbed = None
    if settings.pag_scale:
        perturbed = perturbed_attention(transformer.config, settings.pag_scale, settings.pag_blocks)
    graph = None
    if counts is not None and sharded is None and images.control is None and not settings.compiled:
        recorder = recorder_for(transformer.device)
        graph = None if recorder is None else StepGraph(recorder, counts)
    ends = shift_sigmas(1 - torch.tensor(settings.guidance_interval, dtype=torch.float64), models.shift).tolist()
    model = denoiser(
        sharded or ControlledModel(transformer, images.control, settings.compiled),
        stack_texts(prompts.texts),
        stack_texts([prompts.negative]),
        sampler.effective_guidance(reference, settings.guidance),
        sampler.whole_timesteps,
        perturbed,
        (ends[0], ends[1]),
        graph,
        images.edit,
    )
    shape = latent_shape(settings.width, settings.height, len(chunk))
    noise = noise_stream(torch.empty(shape), 0, [image.seed for image in chunk])
    # With given latents, the first noise is skipped, so that samplers that add noise later get the same noise.
    start, numbers = next(noise), [image.number for image in chunk]
    if images.latents is not None:
        start = images.latents[numbers].to(start)
    start = start.to(transformer.device)
    sigmas = sampler.sigmas(settings.steps, models.shift, reference)
    if images.init is not None:
        model, start = start_from_image(images.init, model, start, sigmas[0].item())

    def show(steps: int, latents: torch.Tensor) -> None:
        if images.callback is not None and steps:
            images.callback(Step(steps - 1, float(sigmas[steps]), latents, tuple(numbers)))

    def before_step(state: StepState) -> None:
        poll()
        if images.preview is not None:
            images.preview(Step(state["i"], state["sigma"], state["denoised"], tuple(numbers)))
        show(state["i"], state["x"])

    latents = sampler.sample(model, start, sigmas, callback=before_step, **sampler.options(reference, noise))
    show(len(sigmas) - 1, latents)
    return latents


@torch.no_grad()
def decode(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    poll: Poll = no_poll,
    devices: Sequence[torch.device] | None = None,
    scale: float | None = None,
    threads: DeviceThreads | None = None,
) -> list[torch.Tensor]:
    """Return an image [3, H, W] in [-1, 1], float32 on the CPU, for each of the latents that `sample` returned.

    `scale` of the latents replaces the scale in the configuration of the autoencoder. All `devices` decode each image
    together, in `threads`. None: the device of the autoencoder decodes.
    """
    latents = (latents / (scale or autoencoder.config.scaling_factor)).to(autoencoder.dtype)
    images = []
    for latent in latents:
        poll()
        # One by one, so that a chunk needs the memory of one decode, and an image has the same pixels in any chunk.
        (image,) = decode_latents(autoencoder, latent[None], devices=devices, poll=poll, threads=threads)
        images.append(image.clamp(-1, 1).float().cpu())
    return images


@torch.no_grad()
def decode_each(
    autoencoder: AutoencoderDC, latents: torch.Tensor, poll: Poll = no_poll, scale: float | None = None
) -> list[torch.Tensor | FailedImage]:
    """Decode the latents as `decode` does. Latents or pixels with NaN or infinity become a FailedImage."""
    results: list[torch.Tensor | FailedImage] = []
    for latent in latents[:, None]:
        try:
            check_finite("samples", latent)
            (pixels,) = decode(autoencoder, latent, poll, scale=scale)
            check_finite("pixels", pixels[None])
            results.append(pixels)
        except InputError as error:
            results.append(FailedImage(str(error)))
    return results
