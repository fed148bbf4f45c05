"""Released DC-AEs in their authors' tensor names give the same results as the authors' code."""

import layouts
import mit_dc_ae
import pytest
import torch
from decoders import lite, noise, relative

import sana_core
import sana_core.commands.convert
from sana_core.checkpoints.load import build_module

# latents: few positions and many for the attention at 1/32, at 1/16 and at 1/8, none of them square
SIZES = [(1, 2), (2, 3), (3, 5), (4, 8), (7, 6)]
CLOSE = 1e-5
LITE = "dc-ae-lite-f32c32"


def narrow(variant, seed=0):
    """Configuration and tensors with few channels."""
    config = mit_dc_ae.narrow(mit_dc_ae.RELEASED[variant])
    return config, mit_dc_ae.tensors(config, seed)


def written(tensors, folder, suffix="safetensors"):
    file = folder / f"model.{suffix}"
    if suffix == "pth":
        torch.save({"state_dict": tensors}, file)
        return file
    return layouts.save(tensors, file)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("variant", mit_dc_ae.RELEASED)
@torch.no_grad()
def test_the_authors_files_compute_what_the_authors_code_computes(tmp_path, variant, suffix):
    config, tensors = narrow(variant)
    file = written(tensors, tmp_path, suffix)
    info = sana_core.inspect_checkpoint(file)
    assert (info.kind, info.variant, info.layout) == ("autoencoder", variant, "original")
    model = sana_core.load_autoencoder(file)
    reference = mit_dc_ae.Reference(config, tensors)
    for height, width in SIZES:
        latents, pictures = noise(1, 32, height, width), noise(2, 3, 32 * height, 32 * width, seed=1)
        pixels = reference.decode(latents.double())
        assert relative(model.decode(latents).sample, pixels) <= CLOSE
        for method in ("whole", "strips"):
            assert relative(sana_core.decode_latents(model, latents, method=method), pixels) <= CLOSE
        encoded = reference.encode(pictures.double())
        assert relative(model.encode(pictures).latent, encoded) <= CLOSE
        assert relative(sana_core.encode_images(model, pictures), encoded) <= CLOSE


@pytest.mark.parametrize("variant", mit_dc_ae.RELEASED)
def test_every_tensor_of_a_released_file_has_its_place_and_the_configuration_is_the_released_one(tmp_path, variant):
    config = mit_dc_ae.RELEASED[variant]
    shapes = mit_dc_ae.shapes(config)
    info = sana_core.inspect_checkpoint(layouts.sparse(shapes, tmp_path / "model.safetensors"))
    assert (info.kind, info.variant, info.layout) == ("autoencoder", variant, "original")
    assert {origin.name for origin in info.origins.values()} == shapes.keys()
    module = build_module(info)
    parameters, built = dict(module.named_parameters()), module.config
    assert info.headers.keys() == parameters.keys()
    # linear layers of the library's are convolutions of one pixel there
    assert all(without_ones(info.headers[name].shape) == without_ones(item.shape) for name, item in parameters.items())
    library = {mit_dc_ae.RES: "ResBlock", mit_dc_ae.EVIT: "EfficientViTBlock"}
    for side in ("encoder", "decoder"):
        half = getattr(config, side)
        assert built[f"{side}_block_types"] == tuple(library[kind] for kind in half.types)
        assert built[f"{side}_block_out_channels"] == half.widths
        assert built[f"{side}_layers_per_block"] == half.depths
        assert built[f"{side}_qkv_multiscales"] == tuple((5,) if kind == mit_dc_ae.EVIT else () for kind in half.types)
    upsampling = {"InterpolateConv": "interpolate", "ConvPixelShuffle": "pixel_shuffle"}[config.upsampling]
    assert (built.upsample_block_type, built.downsample_block_type) == (upsampling, "Conv")
    assert (built.decoder_conv_act_fn, built.scaling_factor) == (config.out_act, 0.41407)
    assert (built.latent_channels, built.attention_head_dim) == (32, mit_dc_ae.DIM)


def without_ones(shape):
    return [side for side in shape if side != 1]


@pytest.mark.parametrize("layout", ["folder", "diffusers", "converted"])
def test_lite_in_the_library_s_layout_loads_exactly_and_is_not_taken_for_the_large_one(tmp_path, layout):
    from diffusers import AutoencoderDC

    model = lite(16)
    path = tmp_path / "vae"
    model.save_pretrained(path)
    if layout != "folder":
        path = layouts.save(model.state_dict(), tmp_path / "lite.safetensors")
    if layout == "converted":
        sana_core.commands.convert.convert_checkpoint(written(narrow(LITE)[1], tmp_path), tmp_path / "own.safetensors")
        path, model = tmp_path / "own.safetensors", sana_core.load_autoencoder(tmp_path / "model.safetensors")
    info = sana_core.inspect_checkpoint(path)
    assert (info.kind, info.variant, info.layout) == ("autoencoder", LITE, "diffusers")
    loaded = sana_core.load_autoencoder(path)
    assert type(loaded) is AutoencoderDC and loaded.config.decoder_conv_act_fn == "silu"
    latents = noise(1, 32, 2, 3)
    with torch.no_grad():
        assert torch.equal(loaded.decode(latents).sample, model.decode(latents).sample)


@torch.no_grad()
def test_the_encoder_of_one_with_the_decoder_of_the_other_is_a_dc_ae(tmp_path):
    halves = {"encoder": narrow("dc-ae-f32c32"), "decoder": narrow(LITE, seed=1)}
    mixed = {k: v for side, (_, tensors) in halves.items() for k, v in tensors.items() if k.startswith(side)}
    model = sana_core.load_autoencoder(written(mixed, tmp_path))
    latents, pictures = noise(1, 32, 2, 3), noise(1, 3, 64, 96)
    encoder, decoder = (mit_dc_ae.Reference(*half) for half in halves.values())
    assert relative(sana_core.decode_latents(model, latents), decoder.decode(latents.double())) <= CLOSE
    assert relative(sana_core.encode_images(model, pictures), encoder.encode(pictures.double())) <= CLOSE


def test_the_library_s_own_conversion_gives_the_same_module(tmp_path):
    from diffusers import AutoencoderDC

    _, tensors = narrow("dc-ae-f32c32")
    file = written(tensors, tmp_path)
    ours = sana_core.load_autoencoder(file)
    ours.save_config(tmp_path / "config")
    theirs = AutoencoderDC.from_single_file(str(file), config=str(tmp_path / "config"), torch_dtype=torch.float32)
    for (name, a), (other, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)


def test_the_files_of_other_tests_have_the_names_that_the_authors_give():
    model = layouts.autoencoder()
    config = mit_dc_ae.SANA._replace(
        encoder=mit_dc_ae.SANA.encoder._replace(depths=model.config.encoder_layers_per_block),
        decoder=mit_dc_ae.SANA.decoder._replace(depths=model.config.decoder_layers_per_block),
    )
    assert layouts.mit(model).keys() == mit_dc_ae.shapes(config).keys()


# Files of other DC-AEs, and incomplete files.

OTHERS = {
    # dc-ae-f32c32-in-1.0, dc-ae-f64c128-mix-1.0 and dc-ae-1.5-f32c128, in both layouts
    "f32c32": {"decoder.project_in.main.conv.weight": (8, 32, 3, 3), "decoder.stages.5.op_list.0.main.x": (1,)},
    "f64c128": {"decoder.conv_in.weight": (8, 128, 3, 3), "decoder.up_blocks.6.1.conv_out.norm.weight": (1,)},
    "f32c128": {"decoder.project_in.conv.weight": (8, 128, 3, 3), "decoder.stages.5.op_list.0.main.conv1.x": (1,)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_dc_aes_of_other_models_are_refused_by_name(tmp_path, name):
    file = layouts.sparse(OTHERS[name], tmp_path / "ae.safetensors")
    with pytest.raises(
        ValueError, match=rf"ae.safetensors: not SANA's VAE, .* found a DC-AE {name} that is not SANA's"
    ):
        sana_core.load_autoencoder(file)


@pytest.mark.parametrize(
    "lost, named",
    [
        ("decoder.stages.2.op_list.1.main.conv1.conv.weight", "decoder.up_blocks.2.1.conv1.weight"),
        ("decoder.stages.4.op_list.0.main.conv.conv.bias", "decoder.up_blocks.4.0.conv.bias"),
        ("encoder.stages.3.op_list.0.context_module.main.qkv.conv.weight", "encoder.down_blocks.3.0.attn.to_k.weight"),
        ("encoder.project_out.main.op_list.0.conv.weight", "encoder.conv_out.weight"),
        ("decoder.project_out.op_list.0.bias", "decoder.norm_out.bias"),
    ],
)
@pytest.mark.parametrize("variant", mit_dc_ae.RELEASED)
def test_a_missing_tensor_is_named(tmp_path, variant, lost, named):
    _, tensors = narrow(variant)
    file = written({name: value for name, value in tensors.items() if name != lost}, tmp_path)
    with pytest.raises(ValueError, match=f"model.safetensors: no {named}.*; the file is incomplete"):
        sana_core.load_autoencoder(file)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_half_a_dc_ae_says_which_half_is_missing(tmp_path, side):
    _, tensors = narrow("dc-ae-f32c32")
    file = written({k: v for k, v in tensors.items() if k.startswith((side, "decoder.project_in"))}, tmp_path)
    other = {"encoder": "decoder", "decoder": "encoder"}[side]
    with pytest.raises(ValueError, match=rf"model.safetensors: no {other}\..*; the file is incomplete"):
        sana_core.load_autoencoder(file)
