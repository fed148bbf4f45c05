"""What an actor of a cluster does: load the parts of a checkpoint once, and generate chunks.

What goes to an actor and comes back is plain: numbers, text, bytes, arrays, tensors. Inside ComfyUI this package has
another name, and the machines would not find its classes under it.
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
    """What every actor of a run is told before it gets chunks. The paths are those on every machine.

    Without `autoencoder` the images are not decoded, without `encoder` the prompts come encoded. `negative` is the
    negative prompt where it comes encoded, once for all. `weights` has the fingerprint of each path. Images are
    returned as arrays [3, H, W] in [-1, 1], with the settings `described` as PNG files. With `shared`, a folder of all
    machines and the name of the run that holds it, the PNG files are written there, and their digests returned. With
    `latents`, pairs: the latent [32, h, w] in the model's scale, and the array or None. `init` are the latents and the
    mask of the image that all start from, if any.
    """

    settings: ResolvedSettings
    weights: Mapping[str, Json]
    transformer: str
    autoencoder: str | None = None
    encoder: str | None = None
    negative: Embedding | None = None
    resolution: int | None = None
    described: Json | None = None
    shared: tuple[str, str] | None = None
    latents: bool = False
    init: tuple[torch.Tensor, torch.Tensor | None] | None = None
    # number of different prompts of the images
    prompts: int = LARGEST_CHUNK

    def pack(self) -> Json:
        """Return the job as plain values, for `unpack`."""
        return {**self._asdict(), "settings": self.settings._asdict()}


def unpack(payload: Json) -> Job:
    """Return the job of which `payload` are the `pack`."""
    return Job(**{**payload, "settings": ResolvedSettings(**payload["settings"])})


class Worker:
    """One GPU, or the CPU of a machine without one, with a checkpoint on it."""

    def __init__(self, payload: Json) -> None:
        self.job = unpack(payload)

    def load(self, threads: int, changed: Mapping[str, torch.Tensor]) -> None:
        """Load everything. What a CPU computes here is computed by so many `threads`.

        `changed` are weights of the transformer that are not those of the file, by name. Raises CheckpointError if this
        machine's checkpoint is not the job's or is broken, MissingFileError or ReadError for one that is not whole.
        """
        job = self.job
        # Ray lets a process without a CPU of its own have one thread
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
        """Generate for the job of those `payload` from now on, which wants what is loaded, in that precision.

        Return how many images at once the GPU has memory for. Raises MissingFileError for a shared folder that is not
        here, OutputError for one that cannot be written.
        """
        job = unpack(payload)
        if job.shared is not None:
            check_run(Path(job.shared[0]), job.shared[1])
        self.job = job
        if job.encoder is not None:
            # the last ones: the queue hands the images of a prompt out one after another
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
        chunk: Chunk = tuple(ImageSpec(*each) for each in images)
        texts = prompts if self.job.encoder is None else list(map(self.encode, prompts))
        encoded = Conditioning(texts, self.negative)
        inputs = ImageInputs(init=self.job.init and InitImage(*self.job.init))
        latents = sample(self.models, self.job.settings, chunk, encoded, images=inputs)
        if self.models.autoencoder is not None:
            pixels: list[Any] = decode_each(self.models.autoencoder, latents)
        else:
            pixels = [None if latent.isfinite().all() else FailedImage(NOT_FINITE) for latent in latents]
        return [self.package_result(*each) for each in zip(chunk, prompts, latents, pixels, strict=True)]

    def package_result(
        self, image: ImageSpec, prompt: Any, latent: torch.Tensor, pixels: torch.Tensor | FailedImage | None
    ) -> Any:
        """Return one image in the format of the job. Raises OutputError where it cannot be written."""
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
            ) from error
