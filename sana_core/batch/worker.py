"""What an actor of a cluster does: it loads the parts of a checkpoint once, and then draws chunks.

What goes to an actor and comes back is plain: numbers, text, bytes, arrays, tensors. Inside ComfyUI this package has
another name, and the machines would not find its classes under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..accelerator import current_accelerator
from ..errors import CheckpointError, OutputError
from .batch_size import largest_chunk
from .draw import Embedding, Settings, decode, encode_negative, encode_text, load_encoder, load_models, sample
from .fingerprint import difference, fingerprint
from .hold import OWN, check_run
from .plan import Chunk, Picture
from .png import encode_png, file_name, write_picture


class Job(NamedTuple):
    """What every actor of a run is told before it gets chunks. The paths are those on every machine.

    Without `autoencoder` the pictures are not decoded, without `encoder` the prompts come encoded. `negative` is the
    negative prompt where it comes encoded, once for all. `weights` has the fingerprint of each path. Pictures are
    returned as arrays [3, H, W] in [-1, 1], with the settings `described` as PNG files. With `shared`, a folder of all
    machines and the name of the run that holds it, the PNG files are written there, and their digests returned. With
    `latents`, pairs: the latent [32, h, w] in the model's scale, and the array or None.
    """

    settings: Settings
    weights: Mapping[str, Mapping[str, Any]]
    transformer: str
    autoencoder: str | None = None
    encoder: str | None = None
    negative: Embedding | None = None
    resolution: int | None = None
    described: Mapping[str, Any] | None = None
    shared: tuple[str, str] | None = None
    latents: bool = False

    def pack(self) -> dict[str, Any]:
        """Return the job in plain words, for `unpack`."""
        return {**self._asdict(), "settings": self.settings._asdict()}


def unpack(words: Mapping[str, Any]) -> Job:
    """Return the job of which `words` are the `pack`."""
    return Job(**{**words, "settings": Settings(**words["settings"])})


def check_shared(job: Job) -> None:
    """Raise MissingFileError where the job's shared folder is not here, OutputError where it cannot be written."""
    if job.shared is not None:
        check_run(Path(job.shared[0]), job.shared[1])


class Worker:
    """One GPU, or the CPU of a machine without one, with a checkpoint on it."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.job = unpack(words)

    def load(self, neighbours: int, changed: Mapping[str, torch.Tensor]) -> int:
        """Load everything, to share the machine's cores with so many actors, this one included.

        Return how many pictures at once the GPU has memory for then. `changed` are weights of the transformer that are
        not those of the file, by name. Raises CheckpointError if this machine's checkpoint is not the job's or is
        broken, MissingFileError or ReadError for one that is not whole, and what `begin` raises.
        """
        job = self.job
        torch.set_num_threads(max(1, torch.get_num_threads() // neighbours))
        for path, weights in job.weights.items():
            differs = difference(fingerprint(path), weights)
            if differs:
                raise CheckpointError(f"{path}: not what the driver has ({differs}); copy the same files there")
        check_shared(job)
        device = current_accelerator() or torch.device("cpu")
        settings = job.settings
        self.models = load_models(
            job.transformer,
            device,
            settings.dtype,
            job.autoencoder,
            job.resolution,
            settings.reference,
            settings.loras,
        )
        with torch.no_grad():
            for name, weight in changed.items():
                self.models.transformer.get_parameter(name).copy_(weight)
        if job.encoder is not None:
            self.encoder = load_encoder(job.encoder, device, settings.dtype, settings.reference)
        return self.begin(job)

    def begin(self, job: Job) -> int:
        """Draw for `job` from now on, which wants the same weights in the same precision as those that are loaded.

        Return how many pictures at once the GPU has memory for. Raises MissingFileError for a shared folder that is not
        here, OutputError for one that cannot be written.
        """
        check_shared(job)
        self.job, self.texts = job, dict[str, Embedding]()
        if job.encoder is not None:
            self.negative = encode_negative(self.encoder, job.settings.negative_prompt)
        elif job.negative is not None:
            self.negative = job.negative
        return largest_chunk(job.transformer, job.settings, self.models.transformer.device, loaded=True)

    def draw(self, words: Sequence[tuple[int, int, int]], prompts: Sequence[Any]) -> list[Any]:
        """Return the pictures of a chunk, as the job wants them; `prompts` are text, or encoded."""
        chunk: Chunk = tuple(Picture(*word) for word in words)
        texts = self.encode(prompts)
        latents = sample(self.models, self.job.settings, chunk, texts, self.negative)
        pictures: list[Any] = [None] * len(chunk)
        if self.models.autoencoder is not None:
            pictures = decode(self.models.autoencoder, latents)
        return [self.package_result(*each) for each in zip(chunk, prompts, latents, pictures, strict=True)]

    def encode(self, prompts: Sequence[Any]) -> list[Embedding]:
        if self.job.encoder is None:
            return list(prompts)
        # only those of the last chunks: the queue hands the pictures of a prompt out one after another
        known = {prompt: self.texts[prompt] for prompt in prompts if prompt in self.texts}
        for prompt in prompts:
            if prompt not in known:
                known[prompt] = encode_text(self.encoder, prompt, instruction=True)
        self.texts = known
        return [known[prompt] for prompt in prompts]

    def package_result(self, picture: Picture, prompt: Any, latent: torch.Tensor, pixels: torch.Tensor | None) -> Any:
        """Return one picture as the job wants it. Raises OutputError where it cannot be written."""
        array = None if pixels is None else pixels.numpy()
        if self.job.latents:
            return latent.cpu().numpy(), array
        if self.job.described is None:
            return array
        assert pixels is not None
        png = encode_png(pixels, prompt, picture.seed, dict(self.job.described), self.job.transformer)
        if self.job.shared is None:
            return png
        folder = Path(self.job.shared[0])
        try:
            return write_picture(folder / file_name(picture), png, folder / OWN / self.job.shared[1])
        except OSError as error:
            raise OutputError(
                f"out: cannot write into {folder} ({error.strerror or error}); see its rights and its disk"
            ) from error
