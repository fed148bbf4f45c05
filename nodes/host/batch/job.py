"""The inputs of SANA Batch Sampler, and their description for processes and machines that load the files again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.model_sampling
import comfy.utils
import torch

from ....sana_core.batch.pipeline import SamplingSettings, resolve_settings
from ....sana_core.batch.plan import Embedding, ImageSpec, batch_images
from ....sana_core.checkpoints import inspect_checkpoint
from ....sana_core.engine.body import ControlSpec, Job, Packed, pack
from ....sana_core.engine.switches import read_switches
from ....sana_core.errors import InputError
from ....sana_core.model.forward import longest_prompt
from ....sana_core.model.known_models import MAX_TOKENS, SPRINT, edits_images, model_of
from ....sana_core.model.latents import DOWNSCALE, LARGEST_BATCH
from ....sana_core.runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of
from ..compat import (
    IMAGE_GUIDANCE,
    INSTRUCTION,
    INTERVAL,
    PERTURBED,
    WEIGHTS,
    check_files,
    loaded_from,
    path_of,
    staying,
)
from ..loading.controlnet import SanaControlNet, encode_hints
from ..loading.vae import check_image_vae, vae_path
from ..sampling.core_nodes import ENCODED
from ..sampling.guidance import IMAGES, require_images
from ..sampling.model import Prompt, check_prompt_width
from ..sampling.sampler import model_shift, sana_latents

if TYPE_CHECKING:
    import comfy.sd
    from comfy.model_patcher import ModelPatcher


class BatchInputs(NamedTuple):
    """The inputs of the node. `latent` is of one image, and `vae` may be None."""

    model: ModelPatcher
    positive: list
    negative: list
    latent: dict
    count: int
    seed: int
    guidance: float
    sampler: str
    sigmas: torch.Tensor
    chunk: int
    vae: comfy.sd.VAE | None

    @property
    def prompts(self) -> int:
        """The number of prompts in `positive`."""
        # An entry with one row applies to every prompt.
        counts = {len(embeds) for embeds, _ in self.positive} - {1}
        if len(counts) > 1:
            raise InputError(
                f"positive: got entries of {sorted(counts)} prompts, expected one number; use one prompt list"
            )
        return counts.pop() if counts else 1

    @property
    def first_index(self) -> int:
        """The place of the latent in the batch that it was taken from. Seeds count from it, as in SANA Sampler."""
        return int((self.latent.get("batch_index") or [0])[0])

    @property
    def images(self) -> list[ImageSpec]:
        return batch_images(self.prompts, self.count, (self.seed + self.first_index) % 2**64)


def check_batch(batch: BatchInputs) -> BatchInputs:
    """Return `batch` with latents of the model's shape."""
    require_images(batch.model.model)
    samples = sana_latents(batch.model, batch.latent)
    batch_size = len(samples)
    if batch_size != 1:
        raise InputError(f"latent_image: got a batch of {batch_size}, expected 1; set count instead of batch_size")
    if batch.vae is not None:
        check_image_vae(batch.vae)
    count, prompts = batch.count, batch.prompts
    if prompts * count > LARGEST_BATCH:
        raise InputError(f"count: got {count} of {prompts} prompts, expected at most {LARGEST_BATCH} images in all")
    # The latents have SANA's cells now.
    entries = {name: value for name, value in batch.latent.items() if name != "downscale_ratio_spacial"}
    return batch._replace(latent={**entries, "samples": samples})


# Entries of a CONDITIONING of SANA Text Encode and of Apply ControlNet, in addition to the embeddings.
PLAIN = {"pooled_output", "attention_mask", ENCODED, "control", "control_apply_to_uncond"}
# The same of SANA Edit. VIBE's prompts have no mask.
EDITED = (PLAIN - {"attention_mask"}) | IMAGES | {IMAGE_GUIDANCE, INSTRUCTION}
# ComfyUI's classes of flow matching. They compute what sana_core computes, for any shift.
FLOW = {
    comfy.model_sampling.CONST,
    comfy.model_sampling.ModelSamplingDiscreteFlow,
    comfy.model_sampling.ModelSamplingFlux,
}


class Reader(NamedTuple):
    """The program that loads the files, and the user's remedy for an input that it cannot use."""

    name: str
    remedy: str


PROCESS_READER = Reader("another process", "remove it to generate on all devices")
CLUSTER_READER = Reader("a cluster", "remove it, or choose all in devices")


def encode_batch_hints(batch: BatchInputs) -> dict[int, torch.Tensor]:
    """Return the control images of `batch` as latents, by the id of the ControlNet."""
    conditionings = [*batch.positive, *batch.negative]
    controls = [options["control"] for _, options in conditionings if options.get("control") is not None]
    return encode_hints(controls, batch.model, batch.latent["samples"].shape)


def describe_job(
    batch: BatchInputs, hints: Mapping[int, torch.Tensor], reader: Reader
) -> tuple[Job, tuple[dict[int, Embedding], Embedding]]:
    """Return the job of `batch`, the embeddings by number of the prompt, and the negative embeddings.

    `hints` are the results of `encode_hints`.
    """
    model = batch.model
    check_patches(model, reader)
    _, weight_dtype, resolution, reference, _ = loaded_from(model)
    prompts = plain_prompts("positive", batch, reader)
    # SANA-Sprint models have no negative prompt.
    negatives = prompts if batch.sampler == SPRINT else plain_prompts("negative", batch, reader)
    if len(negatives) > 1 and batch.sampler != SPRINT:
        raise InputError(f"negative: got {len(negatives)} prompts, {reader.name} takes one; use SANA Text Encode")
    scale, blocks = model.get_attachment(PERTURBED) or (0.0, "")
    rows, columns = batch.latent["samples"].shape[2:]
    settings = SamplingSettings(
        columns * DOWNSCALE,
        rows * DOWNSCALE,
        len(batch.sigmas) - 1,
        batch.guidance,
        sampler=batch.sampler,
        pag_scale=scale,
        pag_blocks=blocks,
        guidance_interval=model.get_attachment(INTERVAL) or (0.0, 1.0),
        dtype=str(model.model.get_dtype_inference()).removeprefix("torch."),
        reference=reference,
    )
    # LoRAs and weights in eight bits.
    is_changed = bool(model.patches) or any(weight.itemsize == 1 for weight in model.model.diffusion_model.parameters())
    path = path_of(model)
    revision = [check_files(model), weight_dtype, str(model.patches_uuid) if is_changed else ""]
    autoencoder = decoder_dtype = None
    if batch.vae is not None:
        autoencoder = vae_path(batch.vae, reader.name)
        decoder_dtype = str(batch.vae.vae_dtype).removeprefix("torch.")
        revision.append(check_files(batch.vae.patcher))
    job = Job(
        resolve_settings(settings, inspect_checkpoint(path)),
        path,
        autoencoder,
        revision=repr(revision),
        changed=is_changed,
        resolution=resolution,
        shift=plain_shift(model, reader),
        decoder_dtype=decoder_dtype,
        latent_scale=model.model.latent_format.scale_factor,
        latents=True,
        init=init_image(batch, reader),
        edit=edited_image(batch, reader),
        controls=describe_controls(batch, hints, reader),
        previews=True,
        prompts=len(prompts),
        fixed_chunk=bool(batch.chunk),
        switches=read_switches(),
    )
    return job, (dict(enumerate(prompts)), negatives[0])


def check_patches(model: ModelPatcher, reader: Reader) -> None:
    """Raise InputError for patches of MODEL that are functions or of an unknown kind, and for quantised layers."""
    if names := ", ".join(sorted(staying(model) - {"model_sampling"})):
        raise InputError(f"model: got a patch that {reader.name} cannot apply ({names}); {reader.remedy}")
    if loaded_from(model)[1].endswith("fast") or model.model.model_config.quant_config:
        raise InputError(
            f"model: {reader.name} has no quantised products; choose weight_dtype default or without fast, and "
            "quantise off"
        )


def plain_shift(model: ModelPatcher, reader: Reader) -> float:
    sampling = model.get_model_object("model_sampling")
    kind = type(sampling)
    changes = [name for name in vars(kind) if not name.startswith("__")]
    if not FLOW.issuperset(kind.__bases__) or changes or getattr(sampling, "noise_scale", 1.0) != 1:
        raise InputError(f"model: got a ModelSampling that {reader.name} cannot apply; {reader.remedy}")
    return model_shift(sampling)


def plain_prompts(field: str, batch: BatchInputs, reader: Reader) -> list[Embedding]:
    """Return embeddings [1, T, C] and mask [1, T] of each prompt, without padding."""
    conditioning = batch.positive if field == "positive" else batch.negative
    if len(conditioning) != 1:
        raise InputError(f"{field}: got {len(conditioning)} combined prompts, {reader.name} takes one; write one text")
    ((embeds, options),) = conditioning
    usable = EDITED if edits_images(batch.model.model.diffusion_model.config) else PLAIN
    unsupported = sorted(key for key, value in options.items() if key not in usable and value is not None)
    if unsupported:
        raise InputError(f"{field}: got {', '.join(unsupported)}, which {reader.name} cannot use; {reader.remedy}")
    check_prompt_width(field, embeds, batch.model.model.diffusion_model)
    prompt = Prompt(field, embeds, options.get("attention_mask"), keep=False)
    texts = []
    for row, mask in zip(prompt.embeds.cpu().split(1), prompt.mask.cpu().split(1), strict=True):
        length = longest_prompt(mask)
        if length > MAX_TOKENS:
            raise InputError(f"{field}: got {length} tokens, expected at most {MAX_TOKENS}; write one text")
        # The negative prompt keeps all tokens, because NVIDIA's code masks it with the mask of the positive prompt.
        tokens = length if field == "positive" else row.shape[1]
        texts.append((row[:, :tokens].clone(), mask[:, :tokens].clone()))
    return texts


def init_image(batch: BatchInputs, reader: Reader) -> tuple[Packed, Packed | None] | None:
    """Return the latents in the model's scale that sampling starts from, and their mask or None.

    Returns None for an empty latent.
    """
    latents, mask = batch.latent["samples"].float().cpu(), batch.latent.get("noise_mask")
    if mask is not None:
        mask = comfy.utils.reshape_mask(mask, latents.shape).float().cpu()
        if not (latents * mask).any():
            # FlowSampler starts from the noise itself then.
            raise InputError(
                f"latent_image: got a mask of an empty latent, which {reader.name} cannot use; {reader.remedy}"
            )
    if not latents.any():
        return None
    return pack(batch.model.model.process_latent_in(latents)), None if mask is None else pack(mask)


def edited_image(batch: BatchInputs, reader: Reader) -> tuple[Packed, float] | None:
    """Return the latents in the model's scale and the guidance of the image that VIBE edits. None: without an image."""
    model = batch.model.model
    record = model_of(model.diffusion_model.config)
    if not record.architecture.edits:
        return None
    if reader is CLUSTER_READER:
        raise InputError("model: got VIBE, which a cluster does not run, expected SANA; choose all in devices")
    ((_, positive),), ((_, negative),), noise = batch.positive, batch.negative, batch.latent["samples"]
    if not IMAGES & (positive.keys() | negative.keys()):
        return None
    image, other = (
        model.edited_latents(field, noise, **options)
        for field, options in (("positive", positive), ("negative", negative))
    )
    if not torch.equal(image, other):
        raise InputError(f"negative: got another image than positive, which {reader.name} cannot use; {reader.remedy}")
    return pack(image), negative.get(IMAGE_GUIDANCE, record.image_guidance)


def describe_controls(batch: BatchInputs, hints: Mapping[int, torch.Tensor], reader: Reader) -> tuple[ControlSpec, ...]:
    ((_, options),) = batch.positive
    control = options.get("control")
    if batch.sampler != SPRINT:
        other = batch.negative[0][1].get("control")
        is_shared = other is control or (other is None and options.get("control_apply_to_uncond", False))
        if not is_shared:
            raise InputError(
                f"control_net: got one for a single prompt, which {reader.name} cannot use; connect positive and "
                "negative to Apply ControlNet"
            )
    sampling = batch.model.get_model_object("model_sampling")
    specs: list[ControlSpec] = []
    while control is not None:
        hint = hints[id(control)]
        patcher = control.control_model_wrapped
        if type(control) is not SanaControlNet or len(hint) > 1 or control.extra_hooks or patcher.patches:
            raise InputError(f"control_net: got one that {reader.name} cannot apply; {reader.remedy}")
        _, reference = loaded_from(patcher)
        dtype = control.manual_cast_dtype or control.control_model.dtype
        # ComfyUI compares sigmas in float32.
        start, end = (torch.tensor(sampling.percent_to_sigma(part)).item() for part in control.timestep_percent_range)
        specs.append(
            ControlSpec(
                path_of(patcher),
                reference,
                str(dtype).removeprefix("torch."),
                control.strength,
                (start, end),
                pack(hint),
                check_files(patcher),
            )
        )
        control = control.previous_controlnet
    return tuple(reversed(specs))


def changed_weights(model: ModelPatcher, device: torch.device | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the transformer's weights that LoRAs change or that have eight bits, by diffusers' names.

    They have the values and the dtype with which this machine would generate. `device` merges LoRAs, by default the
    device of the MODEL.
    """
    device, model_dtype = device or model.load_device, model.model.get_dtype_inference()
    for key, ((weight, convert), *patches) in model.get_key_patches(WEIGHTS).items():
        if patches:
            dtype = comfy.model_management.lora_compute_dtype(device)
            wide = convert(comfy.model_management.cast_to_device(weight, device, dtype, copy=True), inplace=True)
            patched = comfy.lora.calculate_weight(patches, wide, key)
            weight = comfy.float.stochastic_rounding(patched, weight.dtype, seed=comfy.utils.string_to_seed(key))
        elif weight.itemsize > 1:
            continue
        yield key.removeprefix(WEIGHTS), weight.to("cpu", model_dtype)


def packed_weights(model: ModelPatcher, loading: AbstractContextManager[Any]) -> Callable[[], dict[str, Packed]]:
    """Return a function that returns the packed `changed_weights`.

    It enters `loading`, in which ComfyUI does not merge LoRAs into the weights.
    """

    def changed() -> dict[str, Packed]:
        with loading, torch.no_grad():
            try:
                return {name: pack(weight) for name, weight in changed_weights(model)}
            except RuntimeError as error:
                if not (is_out_of_memory(error) or is_driver_error(error)):
                    raise
                release_memory_of(error, model.load_device)
            # Without the memory of the GPU, which the images need. The result is the same except for rounding.
            return {name: pack(weight) for name, weight in changed_weights(model, torch.device("cpu"))}

    return changed
