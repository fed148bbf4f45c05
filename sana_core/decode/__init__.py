"""Latents to pixels and back, exactly, in bounded memory.

A decoder has two stages. The global one sums over the whole image (attention) and ends in the boundary map; the local
one has convolutions only, so that a row of pixels depends on a few rows of that map, the halo above and below it.

    latents [32, h, w]
       | global stage: attention blocks over the whole map, or in two passes of some rows each
    boundary map [C, 4h, 4w]                  +-----------------------+
       | local stage: strip after strip,      |       strip           | <- rows that become pixels now
       | each layer carries its last rows     |- - - - - - - - - - - -|
       | over to the next strip               |  panel   |            | <- of a strip, where a whole one is too wide
    pixels [3, 32h, 32w]                      |          |            |
                                              +-----------------------+

strip    rows of the boundary map that are turned into pixels at once, over the whole width or in panels
halo     rows of the boundary map, above and below, that a row of pixels depends on; panels overlap by it
panel    columns of a strip, decoded one after another
piece    rows within one layer's work: sums are taken and the last strip flows piece by piece
band     one part of a map whose rows are partitioned, because it is too large for one tensor or lies on several devices
whole    the library's own undivided decode
blended  tiles that overlap and are faded into each other: each has statistics of its own, so it is not exact
stride   pixels for one row of the boundary map
"""

from .encode import encode_images
from .run import DecodeOptions, Tiles, decode_into, decode_latents, decode_rows

__all__ = ["DecodeOptions", "Tiles", "decode_into", "decode_latents", "decode_rows", "encode_images"]
