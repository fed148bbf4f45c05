"""The work of an actor of a cluster: load the parts of a checkpoint once, and generate chunks.

Arguments and results are numbers, text, bytes, arrays and tensors, but no classes of this package. Inside ComfyUI the
package has another name, and the machines could not import its classes by that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..batch.batch_size import has_room_for_encoder, largest_chunk
from ..batch.pipeline import (
    Conditioning,
    Embedding,
    ImageInputs,
    ResolvedSettings,
    decode_each,
    encode_negative,
    encode_text,
    load_encoder,
    load_models,
    sample,
)
from ..batch.plan import LARGEST_CHUNK, Chunk, FailedImage, ImageSpec
from ..batch.png import encode_png, file_name, write_image
from ..checkpoints import inspect_checkpoint
from ..checkpoints.fingerprint import difference, fingerprint
from ..errors import CheckpointError, OutputError
from ..model.fp8 import check_fp8
from ..runtime.accelerator import current_accelerator
from ..runtime.folder_lock import OWN, check_run
from ..runtime.text import Json
from ..sampling.masked import InitImage

NOT_FINITE = "samples: got NaN or infinity; sample again in bf16 or fp32"


class Job(NamedTuple):
    """The settings of a run, which every actor receives before its first chunk.

    An actor returns images as arrays [3, H, W] in [-1, 1], unless `described`, `shared` or `latents` is set.
    """

    settings: ResolvedSettings
    # Path of a checkpoint or LoRA, the same on every machine: its fingerprint.
    weights: Mapping[str, Json]
    # Paths of the checkpoints. None for `autoencoder`: images are not decoded. None for `encoder`: prompts are encoded
    # already.
    transformer: str
    autoencoder: str | None = None
    encoder: str | None = None
    # The encoded negative prompt, if there is no `encoder`.
    negative: Embedding | None = None
    # The resolution of the model. None: from the checkpoint.
    resolution: int | None = None
    # The settings to store in each image. Images are then returned as PNG files.
    described: Json | None = None
    # A folder that all machines have, and the name of the run that holds its lock. PNG files are then written there,
    # and their digests are returned.
    shared: tuple[str, str] | None = None
    # Return pairs: the latent [32, h, w] in the model's scale, and the array, or None without `autoencoder`.
    latents: bool = False
    # The latents and the mask of the image that all images start from.
    init: tuple[torch.Tensor, torch.Tensor | None] | None = None
    # Number of different prompts of the images.
    prompts: int = LARGEST_CHUNK

    def pack(self) -> Json:
        """Return the job as plain values. `unpack` is the inverse."""
        return {**self._asdict(), "settings": self.settings._asdict()}


def unpack(payload: Json) -> Job:
    """Return the job whose `pack` is `payload`."""
    return Job(**{**payload, "settings": ResolvedSettings(**payload["settings"])})


class Worker:
    """One GPU, or the CPU of a machine without one, with a checkpoint on it."""

    def __init__(self, payload: Json) -> None:
        self.job = unpack(payload)

    def load(self, threads: int, changed: Mapping[str, torch.Tensor]) -> None:
        """Load the models. `threads` is the number of CPU threads.

        `changed` has the transformer's weights that differ from the file, by name. Raises CheckpointError if this
        machine's checkpoint is broken or differs from the job's, and MissingFileError or ReadError if it is incomplete.
        """
        job = self.job
        # The actor reserves no CPU, so Ray has limited it to one thread.
        torch.set_num_threads(threads)
        checkpoints = {path: inspect_checkpoint(path) for path in job.weights}
        for path, weights in job.weights.items():
            if differs := difference(fingerprint(checkpoints[path]), weights):
                raise CheckpointError(f"{path}: not what the driver has ({differs}); copy the same files there")
        device = current_accelerator() or torch.device("cpu")
        settings = job.settings
        if settings.fp8:
            check_fp8(device)
        self.checkpoint = checkpoints[job.transformer]
        autoencoder = None if job.autoencoder is None else checkpoints[job.autoencoder]
        self.models = load_models(self.checkpoint, device, settings, autoencoder, job.resolution)
        with torch.no_grad():
            for name, weight in changed.items():
                self.models.transformer.get_parameter(name).copy_(weight)
        if job.encoder is not None:
            encoder = checkpoints[job.encoder]
            place = device if has_room_for_encoder(encoder, settings, device) else torch.device("cpu")
            self.encoder = load_encoder(encoder, place, settings.dtype, settings.reference)

    def begin(self, payload: Json) -> int:
        """Begin the job of `payload`. It needs the same models and precision that are loaded.

        Returns how many images the GPU has memory for at once. Raises MissingFileError if the shared folder is missing
        on this machine, and OutputError if it cannot be written.
        """
        job = unpack(payload)
        if job.shared is not None:
            check_run(Path(job.shared[0]), job.shared[1])
        self.job = job
        if job.encoder is not None:
            # Only the latest prompts are cached, because the images of a prompt follow one another in the queue.
            self.encode = lru_cache(LARGEST_CHUNK)(partial(encode_text, self.encoder, instruction=True))
            self.negative = encode_negative(self.encoder, job.settings.negative_prompt)
            if not self.negative[0].isfinite().all():
                # Every image would fail, although another GPU may be able to generate them.
                raise ArithmeticError("the text encoder returned NaN for the negative prompt")
        elif job.negative is not None:
            self.negative = job.negative
        device = self.models.transformer.device
        return largest_chunk(self.checkpoint, job.settings, device, loaded=True, prompts=job.prompts)

    def generate(self, images: Sequence[tuple[int, int, int]], prompts: Sequence[Any]) -> list[Any]:
        """Return the images of a chunk in the format of the job. `prompts` are texts or embeddings.

        An image with NaN or infinity is {"failed": reason}.
        """
        chunk: Chunk = tuple(ImageSpec(*image) for image in images)
        texts = prompts if self.job.encoder is None else list(map(self.encode, prompts))
        encoded = Conditioning(texts, self.negative)
        inputs = ImageInputs(init=self.job.init and InitImage(*self.job.init))
        latents = sample(self.models, self.job.settings, chunk, encoded, images=inputs)
        if self.models.autoencoder is not None:
            pixels: list[Any] = decode_each(self.models.autoencoder, latents)
        else:
            pixels = [None if latent.isfinite().all() else FailedImage(NOT_FINITE) for latent in latents]
        return [self.package_result(*result) for result in zip(chunk, prompts, latents, pixels, strict=True)]

    def package_result(
        self, image: ImageSpec, prompt: Any, latent: torch.Tensor, pixels: torch.Tensor | FailedImage | None
    ) -> Any:
        """Return one image in the format of the job. Raises OutputError if it cannot be written."""
        if isinstance(pixels, FailedImage):
            return {"failed": pixels.reason}
        array = None if pixels is None else pixels.numpy()
        if self.job.latents:
            return latent.cpu().numpy(), array
        if self.job.described is None:
            return array
        assert pixels is not None
        png = encode_png(pixels, prompt, image.seed, dict(self.job.described), self.job.transformer)
        if self.job.shared is None:
            return png
        folder = Path(self.job.shared[0])
        try:
            return write_image(folder / file_name(image), png, folder / OWN / self.job.shared[1])
        except OSError as error:
            raise OutputError(
                f"out: cannot write into {folder} ({error.strerror or error}); see its rights and its disk"
            ) from None
