"""SANA Decode with the VAEs of other models: the pixels of VAE Decode, in less memory, and its refusals."""

import pytest
import torch
from in_process import NodeError

WIDTHS = {"ch": 32, "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
# Channels of the latents, of which FLUX.2's VAE makes 2 x 2 positions.
SHAPES = {"SD": 4, "FLUX": 16, "FLUX.2": 128}


@pytest.fixture(scope="module")
def kl(host):
    """A function of the channels of latents: ComfyUI's VAE with a small AutoencoderKL."""
    from comfy.sd import VAE

    def build(channels):
        packed = channels == SHAPES["FLUX.2"]
        inner = channels // 4 if packed else channels
        settings = {"double_z": True, "z_channels": inner, "resolution": 64, "in_channels": 3, "out_ch": 3, **WIDTHS}
        settings["batch_norm_latent"] = packed
        vae = VAE(sd={"none": torch.ones(1)}, config={"params": {"ddconfig": settings, "embed_dim": inner}})
        vae.latent_channels = channels
        generator = torch.Generator().manual_seed(0)
        for name, value in vae.first_stage_model.named_parameters():
            if value.dim() > 1:
                value.data = torch.randn(value.shape, generator=generator).to(value) * value[0].numel() ** -0.5
            else:
                is_scale = float("norm" in name and name.endswith("weight"))
                value.data = torch.randn(value.shape, generator=generator).to(value) * 0.1 + is_scale
        return vae

    return build


def run(host, node, vae, samples, **inputs):
    graph = {
        "vae": ("AnyValue", {"value": vae}),
        "noise": ("AnyValue", {"value": {"samples": samples}}),
        "decode": (node, {"samples": ["noise", 0], "vae": ["vae", 0], **inputs}),
        "catch": ("Catch", {"value": ["decode", 0], "name": "image"}),
    }
    if node == "SanaNodesDecode":
        graph["catch report"] = ("Catch", {"value": ["decode", 1], "name": "report"})
    return host.run(graph)


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SHAPES)
def test_the_image_is_that_of_vae_decode(host, kl, name):
    vae, samples = kl(SHAPES[name]), noise(2, SHAPES[name], 9, 13)
    expected = run(host, "VAEDecode", vae, samples)["image"]
    got = run(host, "SanaNodesDecode", vae, samples)
    assert got["image"].shape == expected.shape
    assert (got["image"] - expected).abs().max() <= (3e-6 if vae.vae_dtype == torch.float32 else 0.02)
    assert "layer by layer in strips; all maps on the device" in got["report"]
    # The decoder is ComfyUI's own again.
    assert "forward" not in vars(vae.first_stage_model.decoder)


def test_what_does_not_fit_is_one_line(host, kl):
    vae = kl(4)
    for samples, inputs, line in (
        (
            noise(1, 16, 8, 8),
            {},
            r"samples: got latents of shape \[1, 16, 8, 8\], expected 4 channels",
        ),
        (
            noise(1, 4, 8, 8),
            {"method": "tiles"},
            "method: got tiles for another VAE than SANA's",
        ),
        (noise(1, 4, 8, 8), {"devices": "all"}, "devices: got all for another VAE than SANA's"),
        (noise(1, 4, 32, 32), {"budget_gb": 0.001}, "budget_gb: got 0.001, expected at least 0.0"),
    ):
        with pytest.raises(NodeError, match=f"^{line}"):
            run(host, "SanaNodesDecode", vae, samples, **inputs)
