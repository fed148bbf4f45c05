"""The stages of a DC-AE and their sizes, from which a decode is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from diffusers import AutoencoderDC


class Stages(NamedTuple):
    """The stages of the encoder or the decoder of a DC-AE, from the finest to the coarsest resolution.

    The `local` finest stages have only convolutions. The boundary map is between them and the attention stages. It is
    the only map that a decode in strips holds whole: `boundary_width` channels at 1 / `stride` of the image's
    resolution. The decoder of DC-AE-Lite has no attention. Its boundary map is the output of the first convolution.
    """

    # Channels of each stage.
    widths: tuple[int, ...]
    # Blocks of each stage.
    layers: tuple[int, ...]
    # Number of stages without attention.
    local: int
    # Projections of an attention block: the plain one and the multi-scale ones.
    scales: int
    # Decoder only: upsampling is a convolution and pixel_shuffle, not an interpolation and a convolution.
    shuffles: bool
    # Encoder instead of decoder.
    encodes: bool = False

    @property
    def attends(self) -> bool:
        return self.local < len(self.widths)

    @property
    def boundary_stage(self) -> int:
        """The stage at whose resolution the boundary map is."""
        return min(self.local, len(self.widths) - 1)

    @property
    def boundary_width(self) -> int:
        return self.widths[self.boundary_stage]

    @property
    def stride(self) -> int:
        """Pixels for one row of the boundary map."""
        return 2**self.boundary_stage

    @property
    def downscale(self) -> int:
        """Pixels for one row of latents."""
        return 2 ** (len(self.widths) - 1)

    @property
    def scale(self) -> int:
        """Rows of the boundary map for one row of latents."""
        return self.downscale // self.stride

    @property
    def rows_above(self) -> int:
        """Spare rows above a strip. Each residual block of a stage begins two rows higher than the previous one."""
        return 2 * max(self.layers[: self.local], default=0) + 3

    def strip_rows(self, rows: int) -> int:
        """Return how many rows of the boundary map the memory for strips of `rows` rows holds."""
        # Without attention, residual blocks run at the resolution of the boundary map. At the end of the image, a block
        # completes two additional rows.
        return rows if self.attends else max(2, rows)

    @property
    def halo(self) -> int:
        """Rows of the boundary map, above and below, that a row of pixels depends on: 7 for f32c32, 18 for Lite."""
        # The convolution to or from RGB. In a stage without layers, the change of resolution includes it.
        reach = 1 if self.layers[0] else 0
        for stage, layers in enumerate(self.layers[: self.local]):
            # Each block has two convolutions.
            reach += 2 * layers
            if stage < self.boundary_stage:
                reach = -(-reach // 2) + 1 if self.shuffles else -(-(reach + 1) // 2)
        return reach


def decoder_stages(autoencoder: AutoencoderDC) -> Stages:
    """Return the stages of `autoencoder.decoder`."""
    return side_stages(autoencoder.config, "decoder", autoencoder.config.upsample_block_type == "pixel_shuffle")


def encoder_stages(autoencoder: AutoencoderDC) -> Stages:
    """Return the stages of `autoencoder.encoder`."""
    return side_stages(autoencoder.config, "encoder", False)


def side_stages(config: Any, side: str, shuffles: bool) -> Stages:
    """Return the stages of one side, "encoder" or "decoder"."""
    types, widths = config[f"{side}_block_types"], config[f"{side}_block_out_channels"]
    types = (types,) * len(widths) if isinstance(types, str) else types
    local = next((i for i, kind in enumerate(types) if kind != "ResBlock"), len(widths))
    return Stages(
        tuple(widths),
        tuple(config[f"{side}_layers_per_block"]),
        local,
        1 + max(len(sizes) for sizes in config[f"{side}_qkv_multiscales"]),
        shuffles,
        side == "encoder",
    )
