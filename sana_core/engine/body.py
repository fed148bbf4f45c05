"""The work of one device: load models, encode prompts, generate images. The same in a thread, a process and an actor.

Jobs, inputs and events are plain values: numbers, text, bytes, arrays. Inside ComfyUI the package has another name, and
another process could not import its classes by that name.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from ..batch.batch_size import has_room_for_encoder, largest_chunk
from ..batch.pipeline import (
    Conditioning,
    Embedding,
    Models,
    ResolvedSettings,
    decode_each,
    encode_negative,
    encode_text,
    load_encoder,
    load_models,
    sample,
)
from ..batch.plan import LARGEST_CHUNK, FailedImage, ImageInputs, ImageSpec, Step
from ..batch.png import encode_png, file_name, write_image
from ..checkpoints import Checkpoint, inspect_checkpoint, load_controlnet
from ..checkpoints.fingerprint import difference, fingerprint
from ..errors import CheckpointError, OutputError, SanaError, first_line
from ..model.controlnet import Control
from ..runtime.accelerator import empty_cache, is_driver_error, is_out_of_memory, release_memory_of, set_current_device
from ..runtime.cancellation import Poll, Polled
from ..runtime.folder_lock import OWN, check_run
from ..runtime.text import Json, get_logger
from ..sampling.guidance import EditImage
from ..sampling.samplers import InitImage
from .switches import set_switches

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel

CPU = torch.device("cpu")
# Seconds between two signs of life of a worker that loads or encodes.
ALIVE = 5.0
# Seconds between two previews.
PREVIEW = 0.2
NOT_FINITE = "samples: got NaN or infinity; sample again in bf16 or fp32"
# Receives events: a name and plain values.
Post = Callable[..., None]
# The bytes of a tensor as uint8, the name of its dtype, and its shape. numpy has no bfloat16.
Packed = tuple[numpy.ndarray, str, tuple[int, ...]]


class Forward(logging.Handler):
    """Sends warnings to the loop, whose log the user sees."""

    def __init__(self, post: Post) -> None:
        super().__init__(logging.WARNING)
        self.post = post

    def emit(self, record: logging.LogRecord) -> None:
        self.post("log", record.levelno, record.getMessage())


def prepare_process(threads: int, post: Post) -> None:
    """Send this process's warnings to `post`, and compute with `threads` threads of the CPU. 0: torch chooses."""
    get_logger(__name__.partition(".")[0]).logger.addHandler(Forward(post))
    if threads:
        torch.set_num_threads(threads)


def pack(tensor: torch.Tensor) -> Packed:
    """Return `tensor` as plain values. A tensor itself would reach another process through /dev/shm."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def unpack(packed: Packed) -> torch.Tensor:
    array, dtype, shape = packed
    # torch warns about arrays that cannot be written.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(getattr(torch, dtype)).reshape(shape)


def pack_texts(texts: Mapping[Any, Embedding], negative: Embedding) -> dict[Any, list[Packed]]:
    """Return packed embeddings by prompt, and the negative embedding as None, as the loop needs them."""
    return {prompt: list(map(pack, text)) for prompt, text in [*texts.items(), (None, negative)]}


class ControlSpec(NamedTuple):
    """A ControlNet and its image. A job has the plain values of this tuple."""

    path: str
    # Its reference and its dtype.
    reference: str
    dtype: str
    # See Control.
    strength: float
    interval: tuple[float, float]
    latents: Packed
    # Changes with the content of the file.
    revision: str = ""

    @property
    def model(self) -> tuple[str, ...]:
        return self.path, self.reference, self.dtype, self.revision


class Job(NamedTuple):
    """What all images of a run have in common. Each worker gets it once, as the plain values of `pack`."""

    settings: ResolvedSettings
    # Paths of the checkpoints. None for `autoencoder`: images are not decoded. None for `encoder`: prompts are encoded
    # already.
    transformer: str
    autoencoder: str | None = None
    encoder: str | None = None
    # Path of a checkpoint or LoRA, the same on every machine: its fingerprint. Workers on other machines check them.
    weights: Mapping[str, Json] = {}
    # Changes with the content of the files, and with the weights that differ from them.
    revision: str = ""
    # Whether weights of the transformer differ from the file. Then they are sent before it is loaded.
    changed: bool = False
    # The resolution of the model, and the shift of the schedule. None: from the checkpoint.
    resolution: int | None = None
    shift: float | None = None
    # The dtype of the autoencoder. None: from the settings' dtype.
    decoder_dtype: str | None = None
    # The scale of the latents. None: from the autoencoder's checkpoint.
    latent_scale: float | None = None
    # The settings to store in each image. Images are then returned as PNG files.
    described: Json | None = None
    # A folder that all machines have, and the name of the run that holds its lock. PNG files are then written there,
    # and their digests are returned.
    shared: tuple[str, str] | None = None
    # Return pairs: the latent [32, h, w] in the model's scale, and the array, or None without `autoencoder`.
    latents: bool = False
    # The packed latents and the packed mask of the image that all images start from.
    init: tuple[Packed, Packed | None] | None = None
    # VIBE only: the packed latents of the image to edit, and the image guidance.
    edit: tuple[Packed, float] | None = None
    # A chain of ControlNets, the first one first.
    controls: tuple[ControlSpec, ...] = ()
    # Whether the latents of each step are returned.
    steps: bool = False
    # Whether the model's x0 of one image is returned a few times a second, for a preview.
    previews: bool = False
    # Number of different prompts of the images.
    prompts: int = LARGEST_CHUNK
    # Whether the user has chosen how many images are generated at once.
    fixed_chunk: bool = False
    # torch's switches of the process that started the run, see read_switches.
    switches: Mapping[str, Any] = {}

    def pack(self) -> Json:
        """Return the job as plain values. `unpack_job` is the inverse."""
        controls = tuple(tuple(control) for control in self.controls)
        return {**self._asdict(), "settings": self.settings._asdict(), "controls": controls}

    @property
    def models(self) -> tuple[object, ...]:
        settings = self.settings
        files = self.transformer, self.autoencoder, repr(self.weights), self.revision, settings.loras
        return *files, self.resolution, self.decoder_dtype, settings.dtype, settings.reference


def unpack_job(payload: Json) -> Job:
    controls = tuple(ControlSpec(*control) for control in payload["controls"])
    return Job(**{**payload, "settings": ResolvedSettings(**payload["settings"]), "controls": controls})


class Body:
    """A device with the models of a job. `post` receives events, and `poll` cancels by raising.

    `checkpoint` is used in place of the job's paths, for a checkpoint that no path describes.
    """

    def __init__(self, device: str, post: Post, poll: Poll, checkpoint: Checkpoint | None = None) -> None:
        self.device, self.post, self.poll, self.checkpoint = torch.device(device), post, poll, checkpoint
        set_current_device(self.device)
        self.posted = time.monotonic()
        # When the last preview was posted.
        self.previewed = 0.0
        self.models: Models | None = None
        # `Job.models` of the loaded models.
        self.loaded: object = None
        # Name: packed weight, until the transformer is loaded.
        self.changed: dict[str, Packed] = {}
        # `ControlSpec.model`: the loaded ControlNet.
        self.controlnets: dict[object, SanaControlNetModel] = {}
        # The packed embedding of the negative prompt.
        self.negative: Sequence[Packed] | None = None
        # Where prompts are encoded: the device, until its memory is too small.
        self.encoder_device = self.device
        # Steps of the run that were computed from a recording, see StepGraph.
        self.counts: Counter[str] = Counter()

    def stay_alive(self) -> None:
        """Poll, and post a sign of life now and then."""
        self.poll()
        if time.monotonic() - self.posted > ALIVE:
            self.posted = time.monotonic()
            self.post("alive")

    def begin(self, payload: Json) -> bool:
        """Look at the job. Returns whether its changed weights must be sent before `load`."""
        self.job = job = unpack_job(payload)
        set_switches(job.switches)
        if job.shared is not None:
            check_run(Path(job.shared[0]), job.shared[1])
        self.negative, self.encoder_device, self.counts = None, self.device, Counter()
        needed = {control.model for control in job.controls}
        self.controlnets = {key: model for key, model in self.controlnets.items() if key in needed}
        if self.loaded == job.models:
            return False
        self.release()
        # Without `self`: a cycle would keep the models in memory until the garbage collector runs.
        checkpoint = self.checkpoint
        self.inspect = cache(lambda path: checkpoint or inspect_checkpoint(path))
        for path, weights in job.weights.items():
            if differs := difference(fingerprint(inspect_checkpoint(path)), weights):
                raise CheckpointError(f"{path}: not what the driver has ({differs}); copy the same files there")
        return job.changed

    def weight(self, name: str, packed: Packed) -> None:
        """Keep a weight that differs from the file until `load`."""
        self.changed[name] = packed

    def load(self) -> int | None:
        """Load the models, unless they are loaded. Returns how many images the device has memory for at once."""
        job = self.job
        for attempt in range(2):
            failed = None
            try:
                with Polled(self.stay_alive):
                    self.load_missing(job)
            except Exception as error:
                if attempt or not is_out_of_memory(error):
                    raise
                failed = error
            if failed is None:
                break
            # Once more, without the leftovers of other work.
            release_memory_of(failed, self.device)
        if job.fixed_chunk:
            return None
        checkpoint, guided = self.inspect(job.transformer), job.edit is not None and job.edit[1] > 1
        return largest_chunk(
            checkpoint, job.settings, self.device, loaded=True, prompts=job.prompts, image_guided=guided
        )

    def load_missing(self, job: Job) -> None:
        if self.models is None:
            self.post("loading")
            autoencoder = None if job.autoencoder is None else self.inspect(job.autoencoder)
            checkpoint = self.inspect(job.transformer)
            models = load_models(checkpoint, self.device, job.settings, autoencoder, job.resolution, job.decoder_dtype)
            with torch.no_grad():
                for name, weight in self.changed.items():
                    models.transformer.get_parameter(name).copy_(unpack(weight))
            self.models, self.loaded, self.changed = models, job.models, {}
        for control in job.controls:
            if control.model not in self.controlnets:
                self.post("loading")
                dtype = getattr(torch, control.dtype)
                self.controlnets[control.model] = load_controlnet(control.path, self.device, dtype, control.reference)

    def release(self) -> None:
        """Drop the models, because another job or another program needs the memory."""
        self.models = self.loaded = None
        self.changed, self.controlnets = {}, {}
        empty_cache(self.device)

    def encode(self, prompts: Sequence[str | None]) -> bool:
        """Post the embedding of each prompt, and of the negative prompt for None. Returns whether the models remain."""
        job = self.job
        assert job.encoder is not None
        checkpoint = self.inspect(job.encoder)
        remaining = list(prompts)
        while True:
            place, failed = self.encoder_device, None
            if place != CPU and not has_room_for_encoder(checkpoint, job.settings, place):
                self.release()
            try:
                with Polled(self.stay_alive):
                    encoder = load_encoder(checkpoint, place, job.settings.dtype, job.settings.reference)
                    while remaining:
                        text = self.encode_one(encoder, remaining[0])
                        self.post("text", remaining.pop(0), [pack(part) for part in text])
                return self.models is not None
            except Exception as error:
                if place == CPU or not (is_out_of_memory(error) or isinstance(error, EncoderError)):
                    raise
                failed = error
            self.encoder_device = CPU
            self.post(
                "log", logging.WARNING, f"it cannot encode prompts: {first_line(release_memory_of(failed, place))}"
            )

    def encode_one(self, encoder: Any, prompt: str | None) -> Embedding:
        if prompt is not None:
            return encode_text(encoder, prompt, instruction=True)
        text = encode_negative(encoder, self.job.settings.negative_prompt)
        if not text[0].isfinite().all():
            raise EncoderError(
                f"text encoder: it gave NaN for the negative prompt on {encoder.model.device}, so all images would "
                "fail; choose dtype float32, or download the checkpoint again"
            )
        return text

    def generate(
        self,
        images: Sequence[tuple[int, int, int]],
        prompts: Sequence[Any],
        texts: Mapping[Any, Sequence[Packed]],
        inputs: Mapping[str, Any],
    ) -> None:
        """Post the images of a chunk, each as soon as it is decoded. `texts` has None if the negative prompt is new."""
        # First, because this task may fail, and the next one comes without the negative prompt.
        self.negative = texts.get(None, self.negative)
        job = self.job
        if self.models is None or any(control.model not in self.controlnets for control in job.controls):
            self.load()
        models = self.models
        assert models is not None and self.negative is not None
        if job.shift is not None:
            models = models._replace(shift=job.shift)
        chunk = tuple(ImageSpec(*image) for image in images)
        # Images of a prompt share one row of the batch, which `sample` sees by identity.
        encoded = {
            prompt: (unpack(text[0]), unpack(text[1])) for prompt, text in {**texts, None: self.negative}.items()
        }
        conditioning = Conditioning([encoded[prompt] for prompt in prompts], encoded[None])
        # A step of a CPU may take minutes. torch.compile cannot be polled.
        is_slow = self.device.type == "cpu" and not job.settings.compiled
        with Polled(self.stay_alive) if is_slow else nullcontext():
            further = self.image_inputs(chunk, inputs)
            before = self.counts.copy()
            latents = sample(models, job.settings, chunk, conditioning, self.stay_alive, further, counts=self.counts)
        if counts := dict(self.counts - before):
            # Before the images, because the run ends with the last one.
            self.post("graphs", counts)
        for image, prompt, latent in zip(chunk, prompts, latents, strict=True):
            pixels: torch.Tensor | FailedImage | None = None
            if models.autoencoder is not None:
                (pixels,) = decode_each(models.autoencoder, latent[None], self.stay_alive, job.latent_scale)
            elif not latent.isfinite().all():
                pixels = FailedImage(NOT_FINITE)
            # Another thread may encode the image. It must not use the device, where a later chunk may fail meanwhile.
            self.post("image", image.number, partial(self.content, image, prompt, latent.cpu(), pixels))

    def image_inputs(self, chunk: tuple[ImageSpec, ...], inputs: Mapping[str, Any]) -> ImageInputs:
        latents = None
        if "latents" in inputs:
            # `sample` looks them up by the number of the image. Memory of other images is reserved, but never used: at
            # 4096 px they may have 2 MB each.
            rows = unpack(inputs["latents"])
            latents = torch.empty(max(image.number for image in chunk) + 1, *rows.shape[1:], dtype=rows.dtype)
            latents[[image.number for image in chunk]] = rows
        init = None
        if self.job.init is not None:
            image, mask = self.job.init
            init = InitImage(unpack(image), None if mask is None else unpack(mask))
        edit = None
        if self.job.edit is not None:
            edited, guidance = self.job.edit
            edit = EditImage(unpack(edited).to(self.device), guidance)
        control = None
        for spec in self.job.controls:
            controlnet, hint = self.controlnets[spec.model], unpack(spec.latents)
            control = Control(controlnet, hint, spec.strength, spec.interval, control)
        show = {"preview": self.preview} if self.job.previews else {"callback": self.step}
        return ImageInputs(control, init, latents, edit=edit, **show)

    def step(self, step: Step) -> None:
        self.post("step", step.step, step.sigma, pack(step.latents) if self.job.steps else None, list(step.images))

    def preview(self, step: Step) -> None:
        """Post a step, now and then with the x0 of its first image. Reading it waits for the device."""
        now = time.monotonic()
        is_due = now - self.previewed >= PREVIEW
        if is_due:
            self.previewed = now
        self.post("step", step.step, step.sigma, pack(step.latents[:1]) if is_due else None, list(step.images))

    def content(
        self, image: ImageSpec, prompt: Any, latent: torch.Tensor, pixels: torch.Tensor | FailedImage | None
    ) -> Any:
        job = self.job
        if isinstance(pixels, FailedImage):
            return {"failed": pixels.reason}
        array = None if pixels is None else pixels.numpy()
        if job.latents:
            return latent.numpy(), array
        if job.described is None:
            return array
        assert pixels is not None
        png = encode_png(pixels, prompt, image.seed, dict(job.described), job.transformer)
        if job.shared is None:
            return png
        folder = Path(job.shared[0])
        try:
            return write_image(folder / file_name(image), png, folder / OWN / job.shared[1])
        except OSError as error:
            raise OutputError(
                f"out: cannot write into {folder} ({error.strerror or error}); see its rights and its disk"
            ) from None


class EncoderError(CheckpointError):
    """The text encoder gave NaN. It may do better on another device."""


def describe_failure(error: BaseException) -> tuple[str, str, str]:
    """Return the kind of a failure, its text, and the name of its class. schedule.py lists the kinds."""
    if is_out_of_memory(error):
        kind = "memory"
    elif is_driver_error(error):
        kind = "driver"
    else:
        kind = "refused" if isinstance(error, SanaError | ImportError) else "error"
    text = str(error) if isinstance(error, SanaError) else first_line(error)
    base = next((one.__name__ for one in type(error).__mro__ if one.__module__ == SanaError.__module__), "")
    return kind, text, base or type(error).__name__
