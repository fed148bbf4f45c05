"""SANA Batch Sampler on the Ray cluster that the server's operator has configured.

The machines load the same files as MODEL and VAE. They receive encoded prompts.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.utils
import latent_preview
import torch

from ....sana_core.batch.pipeline import SamplingSettings, resolve_settings
from ....sana_core.batch.plan import Embedding, FailedImage, Workload
from ....sana_core.batch.progress import Progress, WorkerReport
from ....sana_core.checkpoints import inspect_checkpoint
from ....sana_core.cluster.batch import generate_with
from ....sana_core.engine.body import Job, Packed, pack
from ....sana_core.errors import InputError
from ....sana_core.model.forward import longest_prompt
from ....sana_core.model.known_models import MAX_TOKENS, SPRINT
from ....sana_core.model.latents import DOWNSCALE
from ..compat.patches import INTERVAL, PERTURBED, staying
from ..loading.vae import vae_path
from ..report import progress_under_running_node, status_under_running_node
from ..sampling.core_nodes import ENCODED
from ..sampling.model import SanaDiffusionModel, check_prompt_width
from ..sampling.prompts import Prompt
from .cluster import fingerprints, plain_file, require_cluster, run_for, session_on

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .inputs import BatchInputs

from ....sana_core.runtime.text import get_logger

logger = get_logger(__name__)

REMEDY = "remove it, or choose all in devices"
# Entries of a CONDITIONING of SANA Text Encode, in addition to the embeddings.
PLAIN = {"pooled_output", "attention_mask", ENCODED}


def sample_on_cluster(batch: BatchInputs) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], Counter[str]]:
    """Return (LATENT row, IMAGE or None without a VAE) of each image, and the number of images of each machine.

    An image that failed is black. Raises InputError for inputs that a cluster does not support, if cluster.json is
    missing or broken, and if all images failed. Raises ClusterError if no cluster or no GPU of it can be reached, and
    the error of a machine if none is left.
    """
    cluster = require_cluster()
    job, workload = node_job(batch)
    session = session_on(cluster)
    device, dtype = comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype()
    images = batch.images
    bar = comfy.utils.ProgressBar(len(images))
    progress, show = Progress(len(images)), progress_under_running_node()
    previewer = latent_preview.get_previewer(batch.model.load_device, batch.model.model.latent_format)
    results: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    # Number of the image: the reason.
    failures: dict[int, str] = {}
    report = WorkerReport()
    status = status_under_running_node()
    generation = run_for(batch.model, session, job, lambda run: generate_with(run, job, workload, report), status)
    with closing(generation) as generated:
        for image, result in generated:
            if isinstance(result, FailedImage):
                failures[image.number] = f"image {image.number + 1} (seed {image.seed}): {result.reason}"
                logger.warning("SANA Batch Sampler: %s; it is black", failures[image.number])
                continue
            array, pixels = result
            latent = torch.from_numpy(array.copy())
            row = batch.model.model.process_latent_out(latent).to(device=device, dtype=dtype)
            # [3, H, W] in [-1, 1] becomes [H, W, 3] in [0, 1].
            decoded = None if pixels is None else ((torch.from_numpy(pixels.copy()) + 1) / 2).movedim(0, -1)
            results[image.number] = (row, decoded)
            preview = previewer.decode_latent_to_preview_image("JPEG", latent[None]) if previewer else None
            bar.update_absolute(bar.current + 1, None, preview)
            progress.step()
            show(progress.describe(len(report.ready)))
    if not results:
        first = next(iter(failures.values()))
        raise InputError(f"model: all {len(failures)} images failed ({first}); choose another weight_dtype or model")
    blank_latent, blank_image = (
        tensor if tensor is None else torch.zeros_like(tensor) for tensor in next(iter(results.values()))
    )
    for number in failures:
        results[number] = blank_latent, blank_image
    machines: Counter[str] = Counter()
    for worker, number in report.finished.items():
        machines[report.machines[worker]] += number
    return [results[number] for number in sorted(results)], machines


def node_job(batch: BatchInputs) -> tuple[Job, Workload]:
    """Return the job for the machines, and the images with their prompts. Raises InputError for unsupported inputs."""
    check_model(batch.model)
    path, resolution, reference = plain_file(batch.model)
    transformer = batch.model.model.diffusion_model
    prompts = plain_prompts("positive", batch.positive, transformer)
    # SANA-Sprint models have no negative prompt.
    negatives = plain_prompts("negative", batch.positive if batch.sampler == SPRINT else batch.negative, transformer)
    if len(negatives) > 1 and batch.sampler != SPRINT:
        raise InputError(f"negative: got {len(negatives)} prompts, a cluster takes one; use SANA Text Encode")
    scale, blocks = batch.model.get_attachment(PERTURBED) or (0.0, "")
    rows, columns = batch.latent["samples"].shape[2:]
    settings = SamplingSettings(
        columns * DOWNSCALE,
        rows * DOWNSCALE,
        len(batch.sigmas) - 1,
        batch.guidance,
        sampler=batch.sampler,
        pag_scale=scale,
        pag_blocks=blocks,
        guidance_interval=batch.model.get_attachment(INTERVAL) or (0.0, 1.0),
        dtype=str(batch.model.model.get_dtype_inference()).removeprefix("torch."),
        reference=reference,
    )
    paths = [path]
    if batch.vae is not None:
        paths.append(vae_path(batch.vae, "a cluster"))
    checkpoints = {path: inspect_checkpoint(path) for path in paths}
    weights = fingerprints(checkpoints)
    job = Job(
        resolve_settings(settings, checkpoints[path]),
        *paths,
        weights=weights,
        revision=str(batch.model.patches_uuid),
        changed=True,
        resolution=resolution,
        latents=True,
        init=init_image(batch),
        prompts=len(prompts),
    )
    encoded = dict(enumerate(prompts)), negatives[0]
    return job, Workload(range(len(prompts)), batch.images, batch.chunk or None, encoded=encoded)


def check_model(model: ModelPatcher) -> None:
    """Raise InputError for patches that cannot be sent to another machine: functions, and unknown kinds."""
    if names := ", ".join(sorted(staying(model))):
        raise InputError(f"model: got a patch that a cluster cannot apply ({names}); {REMEDY}")


def init_image(batch: BatchInputs) -> tuple[Packed, Packed | None] | None:
    """Return the packed latents in the model's scale that sampling starts from, and their mask or None.

    Returns None for an empty latent. Raises InputError for a mask on an empty latent.
    """
    latents, mask = batch.latent["samples"].float().cpu(), batch.latent.get("noise_mask")
    if not latents.any():
        if mask is not None:
            raise InputError(f"latent_image: got a mask of an empty latent, which a cluster cannot use; {REMEDY}")
        return None
    if mask is not None:
        mask = comfy.utils.reshape_mask(mask, latents.shape).float().cpu()
    return pack(batch.model.model.process_latent_in(latents)), None if mask is None else pack(mask)


def plain_prompts(field: str, conditioning: list, transformer: SanaDiffusionModel) -> list[Embedding]:
    """Return embeddings [1, T, C] and mask [1, T] of each prompt, without padding.

    Raises InputError for areas, ControlNets, hooks, combined or too long prompts, and another text encoder.
    """
    if len(conditioning) != 1:
        raise InputError(f"{field}: got {len(conditioning)} combined prompts, a cluster takes one; write one text")
    ((embeds, options),) = conditioning
    unsupported = sorted(key for key, value in options.items() if key not in PLAIN and value is not None)
    if unsupported:
        raise InputError(f"{field}: got {', '.join(unsupported)}, which a cluster cannot use; {REMEDY}")
    check_prompt_width(field, embeds, transformer)
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
