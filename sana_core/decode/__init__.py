"""Latents to pixels and back, exactly, in bounded memory.

A decoder has two stages. The global stage has attention, which sums over the whole image. Its output is the boundary
map. The local stage has only convolutions, so a row of pixels depends on a few rows of the boundary map.

    latents [32, h, w]
       | global stage: attention blocks over the whole map, or in two passes over a few rows at a time
    boundary map [C, 4h, 4w]                  +-----------------------+
       | local stage: strip after strip,      |       strip           | <- rows that are being decoded
       | each layer carries its last rows     |- - - - - - - - - - - -|
       | over to the next strip               |  panel   |            | <- part of a strip that is too wide
    pixels [3, 32h, 32w]                      |          |            |
                                              +-----------------------+

strip    rows of the boundary map that are decoded at once, over the whole width or in panels
halo     rows of the boundary map, above and below, that a row of pixels depends on; panels overlap by it
panel    some columns of a strip; panels are decoded one after another
piece    rows that one layer processes at a time: a term of the attention's sum, or a part of a convolution
band     one part of a map whose rows are partitioned, because it is too large for one tensor or is on several devices
whole    the undivided decode of diffusers
blended  tiles that overlap and are faded into each other; not exact, because each tile has its own statistics
stride   pixels per row of the boundary map
"""

from .encode import encode_images
from .run import DecodeOptions, Tiles, decode_into, decode_latents, decode_rows

__all__ = ["DecodeOptions", "Tiles", "decode_into", "decode_latents", "decode_rows", "encode_images"]
