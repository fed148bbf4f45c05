"""What SANA Batch Sampler generates, checked before anything is loaded, and its early looks at drafts.

At a look the worse half goes, and the others go on from their own steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import comfy.model_management
import torch

from ...sana_core.batch.best import Rounds, last_look, looks_every
from ...sana_core.batch.plan import ImageSpec, batch_images
from ...sana_core.batch.verifier import check_verifier
from ...sana_core.errors import InputError
from ...sana_core.model.latents import CHANNELS, LARGEST_BATCH, check_channels
from ...sana_core.runtime.checks import check_text, check_whole
from ...sana_core.runtime.image_files import levels
from ...sana_core.sampling.trail import Draft, Round, Trail
from .guidance import require_images

if TYPE_CHECKING:
    import comfy.sd
    from comfy.model_patcher import ModelPatcher

    from ...sana_core.batch.plan import Chunk
    from .scorer import HostScorer


class Early(NamedTuple):
    """The scorer of drafts, every how many steps it looks, how many of a prompt are finished, and the prompts' text."""

    scorer: HostScorer
    after: int
    finish: int
    text: str


class BatchInputs(NamedTuple):
    """`count` images of each prompt in `positive`, from `latent` of one image. Without a VAE, no IMAGE. With
    `early` only the better ones are generated to the end."""

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
    early: Early | None = None

    @property
    def prompts(self) -> int:
        """How many prompts `positive` has, one in each row. Raises InputError for entries of unequal numbers."""
        rows = {len(embeds) for embeds, _ in self.positive} - {1}
        if len(rows) > 1:
            raise InputError(
                f"positive: got entries of {sorted(rows)} prompts, expected one number; use one prompt list"
            )
        return rows.pop() if rows else 1

    @property
    def images(self) -> list[ImageSpec]:
        return batch_images(self.prompts, self.count, self.seed)


def check_batch(batch: BatchInputs) -> None:
    """Raise InputError for SANA-Video, a latent that is not one of SANA's or not of one image, another VAE, and too
    many images."""
    require_images(batch.model.model)
    check_channels("latent_image", batch.latent["samples"].shape)
    got = len(batch.latent["samples"])
    if got != 1:
        raise InputError(f"latent_image: got a batch of {got}, expected 1; set count instead of batch_size")
    vae, count, prompts = batch.vae, batch.count, batch.prompts
    if vae is not None and vae.latent_channels != CHANNELS:
        raise InputError(f"vae: got one of {vae.latent_channels} channels, expected {CHANNELS}; use SANA Loader's")
    if prompts * count > LARGEST_BATCH:
        raise InputError(f"count: got {count} of {prompts} prompts, expected at most {LARGEST_BATCH} images in all")


def find_looks(batch: BatchInputs) -> list[tuple[int, int]]:
    """Return after which steps there is a look, and how many drafts of a prompt go on from there.

    Raises InputError for a verifier of another model, and where a scorer of images lacks a VAE or the prompts.
    """
    early = batch.early
    if early is None:
        return []
    if early.scorer.verifier is not None:
        check_verifier(early.scorer.verifier, batch.model.model.diffusion_model.config)
    elif batch.vae is None:
        raise InputError("vae: got none with a scorer, which scores images; connect the one of SANA Loader")
    elif len(texts_of(early.text, batch.prompts)) != batch.prompts:
        got = f"{len(texts_of(early.text, batch.prompts))} lines of text for {batch.prompts} prompts"
        raise InputError(f"prompt: got {got}; write what the images should show, one prompt a line")
    check_text("prompt", early.text)
    last = last_look(early.scorer.verifier, len(batch.sigmas) - 1)
    check_whole("after", early.after, 1, max(1, last))
    return looks_every(early.after, last, batch.count, early.finish)


def texts_of(text: str, prompts: int) -> list[str]:
    """Return the texts of so many prompts, of which several are one a line each."""
    lines = [text] if prompts == 1 else text.splitlines()
    return [line.strip() for line in lines if line.strip()]


def count_steps(batch: BatchInputs, looks: list[tuple[int, int]]) -> int:
    """Return how many steps all images take."""
    total, left, done = 0, batch.count, 0
    for step, kept in [*looks, (len(batch.sigmas) - 1, 0)]:
        total, left, done = total + left * (step - done), kept, step
    return batch.prompts * total


def trail_of(batch: BatchInputs, part: Chunk, own: Round) -> Trail:
    """Return the steps of `part` so far, and who looks at the last one of the round."""
    verifier = batch.early and batch.early.scorer.verifier
    block = verifier.shape.block if verifier else None
    return own.trail([image.number for image in part], len(batch.sigmas) - 1, block)


def look_at(
    batch: BatchInputs, trail: Trail, positive: list, decode: Callable[[torch.Tensor], torch.Tensor]
) -> list[Draft]:
    """Return the Drafts of a `trail`, with what they would be, of `decode`, as uint8 [H, W, 3]; in its place the score
    of a verifier for the prompts `positive`."""
    x0s = torch.stack(trail.x0s, 1).cpu()
    if trail.capture is None or batch.early is None or batch.early.scorer.verifier is None:
        return [
            Draft(each, levels(decode(x0).movedim(-1, 0) * 2 - 1)) for each, x0 in zip(x0s, trail.x0s[-1], strict=True)
        ]
    embeds, rest = positive[0]
    mask = rest.get("attention_mask")
    mask = torch.ones(embeds.shape[:2]) if mask is None else mask
    scores = batch.early.scorer.verifier.score(trail.capture.states, embeds, mask)
    return [Draft(each, None, score) for each, score in zip(x0s, scores.tolist(), strict=True)]


def note_look(rounds: Rounds, batch: BatchInputs, image: ImageSpec, draft: Draft) -> None:
    """Note how well a draft fits its prompt: between two rounds, when nothing samples and a scorer may take memory."""
    comfy.model_management.throw_exception_if_processing_interrupted()
    if draft.score is not None or batch.early is None:
        rounds.note(image, draft.score or 0.0, draft.x0s, added=True)
        return
    pixels = torch.from_numpy(draft.pixels).movedim(-1, 0) / 127.5 - 1
    text = texts_of(batch.early.text, batch.prompts)[image.prompt]
    rounds.note(image, batch.early.scorer.score(pixels, text), draft.x0s, added=False)
