"""Which rows of a picture each device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError

if TYPE_CHECKING:
    import torch
    from diffusers import SanaControlNetModel, SanaTransformer2DModel

    from ..forward import Constants
    from .share import Share


class Span(NamedTuple):
    """Rows of the latents from `top` to `bottom`, that one not included."""

    top: int
    bottom: int


class Shard(NamedTuple):
    """What one member computes in a step: its number, its rows `x` [B, 32, n, w] on its device, of a whole `height`.

    Without a `share` it is the whole picture.
    """

    member: int
    x: torch.Tensor
    span: Span
    height: int
    share: Share | None


def share_rows(rows: int, speeds: Sequence[float]) -> list[Span]:
    """Return the rows of each device, in proportion to `speeds`, at least one each.

    Raises InputError for more devices than rows.
    """
    check_rows(rows, len(speeds))
    total, spans, top, passed = sum(speeds), [], 0, 0.0
    for index, speed in enumerate(speeds):
        passed += speed
        left = len(speeds) - index - 1
        bottom = min(max(round(rows * passed / total), top + 1), rows - left)
        spans.append(Span(top, bottom))
        top = bottom
    return spans


def check_rows(rows: int, devices: int) -> None:
    """Raise InputError if `devices` are more than there are rows of latents."""
    if devices > rows:
        raise InputError(
            f"devices: got {devices} for an image of {rows} rows of 32 pixels, expected at most {rows}; "
            "name fewer, or make a taller image"
        )


def check_splittable(field: str, model: SanaTransformer2DModel | SanaControlNetModel) -> None:
    """Raise InputError, with `field`, for a model whose positions are more than a cell of the latents."""
    patch = model.config.patch_size
    if patch != 1:
        raise InputError(
            f"{field}: got patch_size {patch}, expected 1, as all released models have, to share an image's rows; "
            "use one device"
        )


def part_of(constants: Constants, span: Span, height: int) -> Constants:
    """Return the `constants` of a picture of `height` rows for its rows `span`."""
    position = constants.position
    if position is None or span == (0, height):
        return constants
    columns = position.shape[1] // height
    return constants._replace(position=position[:, span.top * columns : span.bottom * columns])
