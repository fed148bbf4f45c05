"""The VAEs of SANA-Video, Wan 2.1's and LTX-2's, in ComfyUI's own classes, which read the original names alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import comfy.ldm.lightricks.vae.causal_video_autoencoder
import comfy.ldm.wan.vae
import comfy.model_management
import comfy.sd
import torch

from ....sana_core.checkpoints.headers import read_tensors
from ....sana_core.checkpoints.load import build_module, check_finite, check_names
from ....sana_core.errors import CheckpointError, SanaError
from ....sana_core.runtime.accelerator import is_out_of_memory
from ....sana_core.runtime.cancellation import Polled
from ....sana_core.runtime.text import brief
from .weights import read

if TYPE_CHECKING:
    from ....sana_core.checkpoints import Checkpoint

# Channels of LTX-2's latents and of its encoder's first layer.
CHANNELS = 128
# diffusers' and Lightricks' names of the layers of LTX-2's VAE that double a video. The layers that halve it have the
# suffix "_res".
RESIZED = {"spatial": "compress_space", "temporal": "compress_time", "spatiotemporal": "compress_all"}
# The fourth stage of LTX-2.3's decoder, which diffusers' conversion does not rename.
FOURTH_STAGE = (("up_blocks.7", "up_blocks.3.upsamplers.0"), ("up_blocks.8", "up_blocks.3"), ("res_blocks", "resnets"))


def load_video_vae(checkpoint: Checkpoint) -> comfy.sd.VAE:
    """Return the VAE of `checkpoint`, a file of Wan 2.1's or LTX-2's VAE in either layout."""
    try:
        with Polled(comfy.model_management.throw_exception_if_processing_interrupted):
            if checkpoint.layout == "diffusers" and checkpoint.config is not None:
                # This checks the configuration, and compares the shapes in the header with it.
                build_module(checkpoint)
            tensors = read_tensors(checkpoint.weights, list(checkpoint.weights.headers), read)
            tensors = {target: tensors[origin.name] for target, origin in checkpoint.origins.items()}
            for name, tensor in tensors.items():
                check_finite(checkpoint.name, name, tensor)
            return build(checkpoint, tensors)
    except (SanaError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # ComfyUI raises many kinds for shapes that do not fit each other.
        if is_out_of_memory(error):
            raise
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(f"{checkpoint.name}: builds no video VAE ({reason}); download it again") from None


def build(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> comfy.sd.VAE:
    """Return ComfyUI's VAE of `tensors`, which have the names in the file."""
    config = None
    if checkpoint.layout == "diffusers" and checkpoint.variant != "wan-2.1":
        config = ltx_config(checkpoint.config or {})
    metadata = {"config": json.dumps({"vae": config})} if config else dict(checkpoint.weights.metadata)
    if checkpoint.layout == "diffusers":
        names = original_names(config)
        # ComfyUI leaves layers without a tensor at their random values.
        check_names(checkpoint.name, "no", names.keys() - tensors.keys())
        check_names(checkpoint.name, "unexpected", tensors.keys() - names.keys())
        tensors = {names[name]: tensor for name, tensor in tensors.items()}
    vae = comfy.sd.VAE(sd=tensors, metadata=metadata)
    vae.throw_exception_if_invalid()
    return vae


def original_names(config: dict | None) -> dict[str, str]:
    """Return {diffusers' name: original name} of all tensors of LTX-2's VAE with `config`, or of Wan 2.1's for None.

    The library only has the map from the original names to its own.
    """
    from diffusers.loaders.single_file_utils import convert_ltx2_vae_to_diffusers, convert_wan_vae_to_diffusers

    with torch.device("meta"):
        if config is not None:
            module = comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(config=config)
            names = {name: name for name in module.state_dict()}
            late = [name for name in names if name.startswith(("decoder.up_blocks.7.", "decoder.up_blocks.8."))]
            converted = convert_ltx2_vae_to_diffusers({name: name for name in names if name not in late})
            for name in late:
                target = name
                for original, renamed in FOURTH_STAGE:
                    target = target.replace(original, renamed)
                converted[target] = name
            return converted
        module = comfy.ldm.wan.vae.WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True])
        return convert_wan_vae_to_diffusers({name: name for name in module.state_dict()})


def ltx_config(config: dict) -> dict:
    """Return Lightricks' configuration of the VAE that diffusers' `config` describes."""
    widths = config.get("block_out_channels", [256, 512, 1024, 2048])
    layers = config.get("layers_per_block", [4, 6, 6, 2, 2])
    halved = config.get("downsample_type", ["spatial", "temporal", "spatiotemporal", "spatiotemporal"])
    encoder: list[list] = [["res_x", {"num_layers": layers[0]}]]
    for kind, count, inner, width in zip(halved, layers[1:], [CHANNELS, *widths], widths, strict=False):
        encoder += [[f"{RESIZED[kind]}_res", {"multiplier": width // inner}], ["res_x", {"num_layers": count}]]
    # From the finest to the coarsest stage. Only the types are listed from the coarsest one.
    doubled = config.get("upsample_type", ["spatiotemporal"] * 3)[::-1]
    factors, residual = config.get("upsample_factor", [2] * 3), config.get("upsample_residual", True)
    is_residual = all(residual) if isinstance(residual, list) else residual
    first, *counts = config.get("decoder_layers_per_block", [5, 5, 5, 5])
    decoder: list[list] = [["res_x", {"num_layers": first, "inject_noise": False}]]
    for kind, factor, count in zip(doubled, factors, counts, strict=True):
        decoder += [[RESIZED[kind], {"residual": is_residual, "multiplier": factor}]]
        decoder += [["res_x", {"num_layers": count, "inject_noise": False}]]
    # Without this field the encoder pads with zeros and the decoder reflects.
    padding = config.get("decoder_spatial_padding_mode", "reflect")
    same_padding = {"spatial_padding_mode": padding} if padding == "zeros" else {}
    return {
        "dims": 3,
        "latent_channels": CHANNELS,
        "encoder_blocks": encoder,
        "decoder_blocks": decoder,
        **same_padding,
        "decoder_base_channels": config.get("decoder_block_out_channels", [256])[0] // 2,
        "norm_layer": "pixel_norm",
        "patch_size": 4,
        "latent_log_var": "uniform",
        "causal_decoder": config.get("decoder_causal", True),
        "timestep_conditioning": config.get("timestep_conditioning", False),
    }
