"""The images of a batch while they arrive: the node's progress bar, its previews, and images that failed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.utils
import latent_preview
import torch

from ....sana_core.batch.plan import FailedImage, ImageSpec
from ....sana_core.engine.body import PREVIEW, unpack
from ....sana_core.errors import InputError
from ....sana_core.runtime.checks import check_finite
from ....sana_core.runtime.text import get_logger

if TYPE_CHECKING:
    from ..report import Notes
    from .job import BatchInputs

logger = get_logger(__name__)

# A row of a LATENT, and its IMAGE [H, W, 3]. The IMAGE is None without a VAE.
Row = tuple[torch.Tensor, torch.Tensor | None]


class Results:
    """The finished images of `batch`. `total` is the length of the progress bar."""

    def __init__(self, batch: BatchInputs, total: int) -> None:
        self.model = batch.model.model
        self.rows: dict[ImageSpec, Row] = {}
        self.failures: dict[ImageSpec, str] = {}
        self.bar = comfy.utils.ProgressBar(total)
        self.previewer = latent_preview.get_previewer(torch.device("cpu"), self.model.latent_format)
        # When the next preview may be shown.
        self.next_preview = 0.0

    def on_step(self, worker: object, step: int, sigma: float, preview: Any, images: list[int]) -> None:
        """Show that a worker has computed a step of `images`. `preview` is an image, or packed latents."""
        now = time.monotonic()
        if preview is not None and now < self.next_preview:
            preview = None
        elif preview is not None:
            if not isinstance(preview[0], str):
                preview = self.preview(unpack(preview))
            # A decoder of previews may be slow on the CPU. It gets a quarter of this thread's time.
            self.next_preview = now + max(PREVIEW, 4 * (time.monotonic() - now))
        self.advance(len(images), preview)

    def preview(self, latents: torch.Tensor) -> tuple | None:
        return self.previewer.decode_latent_to_preview_image("JPEG", latents) if self.previewer else None

    def advance(self, count: int, preview: tuple | None) -> None:
        self.bar.update_absolute(self.bar.current + count, None, preview)

    def add(self, image: ImageSpec, content: Any) -> None:
        """Add an image: a Row, a FailedImage, or the arrays of another process."""
        if isinstance(content, FailedImage):
            self.failures[image] = content.reason
            return
        latent, pixels = content
        if isinstance(latent, torch.Tensor):
            self.rows[image] = latent, pixels
        else:
            row = self.model.process_latent_out(torch.from_numpy(latent.copy()))
            if pixels is not None:
                # [3, H, W] in [-1, 1] becomes [H, W, 3] in [0, 1].
                pixels = ((torch.from_numpy(pixels.copy()) + 1) / 2).movedim(0, -1)
            self.rows[image] = row.to(comfy.model_management.intermediate_dtype()), pixels
        try:
            check_finite("samples", self.rows[image][0][None])
            if pixels is not None:
                check_finite("image", pixels[None])
        except InputError as error:
            self.failures[image] = str(error)

    def finish(self, notes: Notes) -> dict[ImageSpec, Row]:
        """Return the rows in the order of the images. An image that failed is black, and named in `notes`."""
        texts = {
            image: f"image {image.number + 1} (seed {image.seed}): {self.failures[image]}" for image in self.failures
        }
        good = [row for image, row in self.rows.items() if image not in texts]
        if not good:
            first = texts[min(texts)]
            raise InputError(f"model: all {len(texts)} images failed ({first}); choose another weight_dtype or model")
        if texts:
            notes.add(f"{len(texts)} of {len(self.rows | texts)} images failed and are black; {texts[min(texts)]}")
        for image in texts:
            logger.warning("SANA Batch Sampler: %s", texts[image])
            latent, pixels = self.rows.get(image, (torch.zeros_like(good[0][0]), None))
            self.rows[image] = latent, None if good[0][1] is None else torch.zeros_like(good[0][1])
        return dict(sorted(self.rows.items()))
