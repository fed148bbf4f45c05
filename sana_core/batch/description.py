"""All that an image depends on besides prompt and seed, as a manifest holds it."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.files import Json
from ..checkpoints.fingerprint import OnBytes, fingerprint
from .pipeline import SamplingSettings

# of the description; a higher one where the same words mean other images
VERSION = 2


def describe_settings(
    settings: SamplingSettings, checkpoint: str | Path, progress: OnBytes = lambda done, total: None
) -> Json:
    """Return all that an image depends on besides prompt and seed. `compiled` only changes how fast it is generated,
    and `verifier` which are.

    `progress` gets how many bytes of the weights, of how many, were read, and cancels by raising. Raises
    CheckpointError, MissingFileError or ReadError for a checkpoint that is broken or incomplete.
    """
    described = settings._asdict()
    del described["compiled"], described["loras"], described["verifier"]
    for name in ("step_cache", "fp8"):
        if not described[name]:
            # folders from before there was one can be continued
            del described[name]
    if settings.loras:
        described["loras"] = [
            {"file": Path(file).name, "strength": strength, **fingerprint(file)} for file, strength in settings.loras
        ]
    described["guidance_interval"] = list(settings.guidance_interval)
    return {"version": VERSION, **described, **fingerprint(checkpoint, progress, None, settings.reference)}
