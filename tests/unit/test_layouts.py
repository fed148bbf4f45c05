"""Every layout of every model is recognised, and loads into the module that it was written from."""

import shutil

import layouts
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderDC, SanaControlNetModel, SanaTransformer2DModel

import sana_core
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.checkpoints import find_part
from sana_core.checkpoints.generation import latent_scale, shift_of
from sana_core.checkpoints.load import build_module
from sana_core.memory import transformer_parameters
from sana_core.model.known_models import VARIANTS, Architecture, variant_name

COUNTS = {
    "0.6B": 591_747_872,
    "1.6B": 1_604_462_752,
    "1.5-1.6B": 1_604_641_952,
    "1.5-4.8B": 4_721_825_952,
}


def settings(model):
    return {key: value for key, value in model.config.items() if not key.startswith("_") and key != "reference"}


def run_transformer(model):
    torch.manual_seed(0)
    x, context = torch.randn(2, 32, 3, 5), torch.randn(2, 7, layouts.CAPTION)
    guidance = torch.tensor([0.45, 0.2]) if model.config.guidance_embeds else None
    with torch.no_grad():
        return model.float()(x, context, torch.tensor([700.0, 3.0]), guidance=guidance).sample


def run_controlnet(model):
    torch.manual_seed(0)
    x, hint, context = torch.randn(2, 32, 3, 5), torch.randn(2, 32, 3, 5), torch.randn(2, 7, layouts.CAPTION)
    with torch.no_grad():
        out = model.float()(x, context, torch.tensor([700.0, 3.0]), hint).controlnet_block_samples
    return torch.stack(list(out))


def run_autoencoder(model):
    torch.manual_seed(0)
    with torch.no_grad():
        return model.float()(torch.randn(1, 3, 64, 96)).sample


def check_same_pictures(loaded, model):
    """Rounding in torch 2.6 depends on the addresses of weights, which differ between a file and a module."""
    torch.testing.assert_close(run_autoencoder(loaded), run_autoencoder(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_released_size_is_recognised_by_its_header_alone(tmp_path, name):
    width, layers, qk_norm, sprint, edits = VARIANTS[name]
    with init_empty_weights():
        model = SanaTransformer2DModel(
            in_channels=64 if edits else 32,
            num_attention_heads=width // 32,
            num_layers=layers,
            num_cross_attention_heads=width // {1152: 72, 2240: 112}[width],
            cross_attention_head_dim={1152: 72, 2240: 112}[width],
            cross_attention_dim=width,
            qk_norm="rms_norm_across_heads" if qk_norm else None,
            guidance_embeds=sprint,
        )
    file = layouts.sparse(model, tmp_path / "a.safetensors")
    info = sana_core.inspect_checkpoint(file)
    assert (info.kind, info.variant, info.layout, info.dtype) == ("transformer", name, "diffusers", torch.bfloat16)
    assert info.size == 2 * transformer_parameters(VARIANTS[name]) == 2 * sum(p.numel() for p in model.parameters())
    built = build_module(info)
    count = sum(p.numel() for p in built.parameters())
    assert count == COUNTS.get(name, sum(p.numel() for p in model.parameters()))
    assert settings(built) == settings(model)
    assert all(p.is_meta for p in built.parameters())


@pytest.mark.parametrize(
    "suffix, options",
    [
        *(("pth", options) for options in ({}, {"layers": 3}, {"qk_norm": True}, {"sprint": True})),
        *(("safetensors", {"resolution": pixels}) for pixels in (2048, 4096)),
    ],
    ids=str,
)
def test_nvidias_layout_loads_exactly(tmp_path, options, suffix):
    model = layouts.transformer(**options)
    tensors = layouts.nvidia(model)
    file = tmp_path / f"SanaMS.{suffix}"
    if suffix == "pth":
        torch.save({"state_dict": tensors, "epoch": 3}, file)
    else:
        layouts.save(tensors, file)
    info = sana_core.inspect_checkpoint(file)
    resolution = options.get("resolution", 1024)
    assert (info.kind, info.layout) == ("transformer", "original")
    assert (info.resolution, info.resolution_from) == (resolution, "position embedding")
    assert shift_of(info) == (6 if resolution == 4096 else 3)
    assert info.reference == "nvidia"
    loaded = sana_core.load_transformer(file, reference="diffusers")
    assert type(loaded) is SanaTransformer2DModel and not loaded.training
    assert torch.equal(run_transformer(loaded), run_transformer(model))


@pytest.mark.parametrize("layout", ["diffusers", "nvidia"])
def test_a_bare_file_with_larger_patches_and_other_captions_loads_exactly(tmp_path, layout):
    model = layouts.transformer(patch_size=2, caption_channels=24)
    tensors = layouts.nvidia(model, unused=False) if layout == "nvidia" else model.state_dict()
    file = layouts.save(tensors, tmp_path / "Sana_1024px.safetensors")
    loaded = sana_core.load_transformer(file, reference="diffusers").float()
    assert (loaded.config.patch_size, loaded.config.caption_channels) == (2, 24)
    torch.manual_seed(0)
    inputs = torch.randn(1, 32, 4, 6), torch.randn(1, 7, 24), torch.tensor([700.0])
    with torch.no_grad():
        assert torch.equal(loaded(*inputs).sample, model.float()(*inputs).sample)


def test_a_size_that_is_no_multiple_of_the_patches_is_refused_in_one_line(tmp_path):
    file = layouts.save(layouts.transformer(patch_size=2).state_dict(), tmp_path / "Sana_1024px.safetensors")
    with pytest.raises(
        ValueError, match="^size: got 128 x 96, expected multiples of 64 for a model of patches of 2 cel"
    ):
        resolve_settings(SamplingSettings(128, 96), file)
    assert resolve_settings(SamplingSettings(128, 64), file).steps == 20


def test_the_unused_tensors_of_nvidias_files_may_be_absent(tmp_path):
    model = layouts.transformer()
    file = layouts.save(layouts.nvidia(model, unused=False), tmp_path / "Sana_600M_512px.safetensors")
    info = sana_core.inspect_checkpoint(file)
    assert (info.resolution, info.resolution_from) == (512, "file name")
    assert torch.equal(run_transformer(sana_core.load_transformer(file)), run_transformer(model))


@pytest.mark.parametrize("sprint", [False, True])
def test_a_single_diffusers_file_loads_exactly(tmp_path, sprint):
    model = layouts.transformer(sprint=sprint)
    file = layouts.save(model.state_dict(), tmp_path / "sana.sft")
    info = sana_core.inspect_checkpoint(file)
    assert (info.layout, info.resolution, info.resolution_from) == ("diffusers", 1024, "assumed")
    assert torch.equal(run_transformer(sana_core.load_transformer(file)), run_transformer(model))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_shard_size": "10MB"}, {"variant": "bf16"}, {"max_shard_size": "10MB", "variant": "fp16"}],
    ids=str,
)
def test_a_diffusers_folder_loads_as_the_library_loads_it(tmp_path, options):
    layouts.transformer().save_pretrained(tmp_path / "sana", **options)
    theirs = SanaTransformer2DModel.from_pretrained(tmp_path / "sana", variant=options.get("variant"))
    files = sorted((tmp_path / "sana").glob("*.safetensors"))
    assert len(files) > 2 if "max_shard_size" in options else len(files) == 1
    for path in (tmp_path / "sana", files[0]):
        assert torch.equal(run_transformer(sana_core.load_transformer(path)), run_transformer(theirs))


def test_an_index_without_its_shards_is_no_matter_where_another_precision_is_whole(tmp_path):
    model = layouts.transformer()
    model.save_pretrained(tmp_path / "sana", max_shard_size="10MB")
    for shard in (tmp_path / "sana").glob("*.safetensors"):
        shard.unlink()
    model.save_pretrained(tmp_path / "sana", variant="bf16")
    assert torch.equal(run_transformer(sana_core.load_transformer(tmp_path / "sana")), run_transformer(model))


def test_of_two_precisions_the_one_without_a_suffix_is_taken(tmp_path):
    model = layouts.transformer()
    model.save_pretrained(tmp_path / "sana", variant="fp16")
    model.float().save_pretrained(tmp_path / "sana")
    assert sana_core.inspect_checkpoint(tmp_path / "sana").dtype == torch.float32


@pytest.mark.parametrize("layout", ["folder", "diffusers", "original"])
def test_a_controlnet_loads_exactly(tmp_path, layout):
    model = layouts.controlnet()
    path = tmp_path / "control.safetensors"
    if layout == "folder":
        path = tmp_path / "control"
        model.save_pretrained(path)
    else:
        layouts.save(layouts.nvidia(model) if layout == "original" else model.state_dict(), path)
    info = sana_core.inspect_checkpoint(path)
    assert (info.kind, info.variant) == ("controlnet", "0.6B-controlnet")
    loaded = sana_core.load_controlnet(path, reference="diffusers")
    assert type(loaded) is SanaControlNetModel
    assert torch.equal(run_controlnet(loaded), run_controlnet(model))


def test_a_controlnets_file_may_hold_the_transformer_it_was_trained_on(tmp_path):
    model = layouts.controlnet()
    tensors = {**layouts.nvidia(layouts.transformer()), **layouts.nvidia(model)}
    file = tmp_path / "hed.pth"
    torch.save({"state_dict": tensors}, file)
    loaded = sana_core.load_controlnet(file, reference="diffusers")
    assert torch.equal(run_controlnet(loaded), run_controlnet(model))


@pytest.mark.parametrize("layout", ["folder", "diffusers", "original"])
def test_dc_ae_loads_exactly(tmp_path, layout):
    model = layouts.autoencoder()
    path = tmp_path / "dc-ae.safetensors"
    if layout == "folder":
        path = tmp_path / "dc-ae"
        model.save_pretrained(path)
    else:
        layouts.save(layouts.mit(model) if layout == "original" else model.state_dict(), path)
    info = sana_core.inspect_checkpoint(path)
    assert (info.kind, info.variant) == ("autoencoder", "dc-ae-f32c32")
    loaded = sana_core.load_autoencoder(path)
    assert loaded.config.scaling_factor == 0.41407
    check_same_pictures(loaded, model)


def test_the_configuration_read_from_the_real_dc_aes_shapes_is_the_real_one(tmp_path):
    with init_empty_weights():
        model = layouts.released_autoencoder()
    info = sana_core.inspect_checkpoint(layouts.sparse(model, tmp_path / "dc-ae.safetensors"))
    assert settings(build_module(info)) == settings(model)
    assert info.size == 2 * 312_250_275


@pytest.mark.parametrize("prefixed", [True, False])
def test_an_all_in_one_file_gives_each_component(tmp_path, prefixed):
    parts = {
        "model.diffusion_model.": layouts.transformer(),
        "first_stage_model.": layouts.autoencoder(),
        "text_encoders.gemma2_2b.transformer.model.": layouts.gemma(),
    }
    if not prefixed:
        parts = dict(zip(("transformer.", "vae.", "text_encoder."), parts.values(), strict=True))
    tensors = {prefix + key: value for prefix, model in parts.items() for key, value in model.state_dict().items()}
    info = sana_core.inspect_checkpoint(layouts.save(tensors, tmp_path / "sana.safetensors"))
    assert (info.kind, info.layout) == ("pipeline", "comfy")
    assert {part.kind for part in info.parts} == {"transformer", "autoencoder", "text_encoder"}
    models = list(parts.values())
    assert torch.equal(run_transformer(sana_core.load_transformer(info.path)), run_transformer(models[0]))
    check_same_pictures(sana_core.load_autoencoder(info.path), models[1])


def test_without_a_transformer_the_first_component_speaks_for_a_file(tmp_path):
    parts = {"vae.": layouts.autoencoder(), "text_encoders.": layouts.gemma().float()}
    tensors = {prefix + key: value for prefix, model in parts.items() for key, value in model.state_dict().items()}
    info = sana_core.inspect_checkpoint(layouts.save(tensors, tmp_path / "both.safetensors"))
    assert len(info.parts) == 2 and info.size == sum(part.size for part in info.parts)
    assert (info.variant, info.dtype) == (info.parts[0].variant, info.parts[0].dtype)
    with pytest.raises(ValueError, match="both.safetensors: not a SANA transformer: found .* Gemma 2 text encoder"):
        sana_core.load_transformer(info.path)


def test_nvidias_repository_folder_stands_for_its_checkpoint(tmp_path):
    model = layouts.transformer()
    (tmp_path / "Sana_600M_1024px" / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": layouts.nvidia(model)}, tmp_path / "Sana_600M_1024px" / "checkpoints" / "Sana.pth")
    loaded = sana_core.load_transformer(tmp_path / "Sana_600M_1024px")
    assert torch.equal(run_transformer(loaded), run_transformer(model))


@pytest.mark.parametrize(
    "name, resolution",
    [
        ("Sana_1600M_4Kpx_BF16.safetensors", 4096),
        ("Sana_1600M_2Kpx_BF16.safetensors", 2048),
        ("Sana_600M_512px_MultiLing.safetensors", 512),
        ("SANA1.5_1.6B_1024px.safetensors", 1024),
        ("Sana_1600M_4Kpx/transformer.safetensors", 4096),
        ("my_4k_finetune.safetensors", 4096),
        ("run10240.safetensors", 1024),
        # a component of a diffusers folder that was copied without its configurations
        ("Sana_1600M_4Kpx_BF16_diffusers/transformer/diffusion_pytorch_model.safetensors", 4096),
        ("Sana_1600M_4Kpx/fine_2k/model_1k.safetensors", 1024),
        ("Sana_1600M_4Kpx/fine_2k/model.safetensors", 2048),
    ],
)
def test_the_file_name_tells_the_resolution_where_nothing_else_does(tmp_path, name, resolution):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    file = layouts.sparse(layouts.transformer(), tmp_path / name)
    assert sana_core.inspect_checkpoint(file).resolution == resolution
    assert build_module(sana_core.inspect_checkpoint(file)).config.interpolation_scale == {2048: 1.0, 4096: 2.0}.get(
        resolution
    )


def test_configurations_older_than_the_position_embedding_get_it(tmp_path):
    model = layouts.transformer(resolution=4096)
    layouts.save(model.state_dict(), tmp_path / "sana" / "diffusion_pytorch_model.safetensors")
    config = {k: v for k, v in model.config.items() if k not in ("interpolation_scale", "qk_norm")}
    text = layouts.json.dumps({**config, "_class_name": "SanaTransformer2DModel"})
    (tmp_path / "sana" / "config.json").write_text(text)
    loaded = sana_core.load_transformer(tmp_path / "sana")
    assert torch.equal(run_transformer(loaded), run_transformer(model))


@pytest.mark.parametrize("make", [layouts.transformer, layouts.controlnet])
def test_the_headers_of_nvidias_files_are_those_of_the_modules_parameters(tmp_path, make):
    """Fused queries, keys and values are separated before a tensor is read."""
    model = make()
    info = sana_core.inspect_checkpoint(layouts.save(layouts.nvidia(model), tmp_path / "sana.safetensors"))
    shapes = {name: [side for side in header.shape if side != 1] for name, header in info.headers.items()}
    assert shapes == {name: [s for s in tensor.shape if s != 1] for name, tensor in model.state_dict().items()}


def test_latents_are_scaled_as_the_autoencoder_says(tmp_path, checkpoint):
    """A configuration without the number means the library's default, and a file without one SANA's DC-AE."""
    model = layouts.autoencoder()
    bare = layouts.save(model.state_dict(), tmp_path / "bare.safetensors")
    assert latent_scale(sana_core.inspect_checkpoint(bare)) == 0.41407
    model.register_to_config(scaling_factor=0.25)
    model.save_pretrained(tmp_path / "vae")
    assert latent_scale(sana_core.inspect_checkpoint(tmp_path / "vae")) == 0.25
    config = tmp_path / "vae" / "config.json"
    config.write_text(layouts.json.dumps({k: v for k, v in model.config.items() if k != "scaling_factor"}))
    content = layouts.json.loads(config.read_text()) | {"_class_name": "AutoencoderDC"}
    config.write_text(layouts.json.dumps(content))
    assert latent_scale(sana_core.inspect_checkpoint(tmp_path / "vae")) == AutoencoderDC().config.scaling_factor
    info = sana_core.inspect_checkpoint(checkpoint)
    assert latent_scale(info) == sana_core.load_autoencoder(checkpoint).config.scaling_factor
    transformer = layouts.save(layouts.transformer().state_dict(), tmp_path / "sana.safetensors")
    assert latent_scale(sana_core.inspect_checkpoint(transformer)) == 0.41407


@pytest.mark.parametrize("value, shift", [(3.0, 3.0), (0.01, 0.01), (100, 100), (0.009, None), (100.1, None)])
def test_the_shift_of_a_folder_is_its_schedulers(tmp_path, checkpoint, value, shift):
    folder = tmp_path / "sana"
    shutil.copytree(checkpoint, folder)
    for name in ("flow_shift", "shift"):
        (folder / "scheduler" / "scheduler_config.json").write_text(layouts.json.dumps({name: value}))
        if shift is None:
            with pytest.raises(ValueError, match="^scheduler/scheduler_config.json: its shift is .*from 0.01 to 100"):
                shift_of(sana_core.inspect_checkpoint(folder))
        else:
            # also of the transformer alone, and whatever arithmetic it follows
            for path in (folder, folder / "transformer", folder / "transformer/diffusion_pytorch_model.safetensors"):
                info = sana_core.inspect_checkpoint(path)
                assert shift_of(info) == shift_of(find_part(info, "transformer"), None, "nvidia") == shift
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    info = sana_core.inspect_checkpoint(folder)
    assert shift_of(info) == 3.0
    # A chosen size or reference has the shift of the released models. It overrides the folder.
    assert shift_of(info, 4096) == 6.0


@pytest.mark.parametrize(
    "name", ["transformer_blocks.0.attn1.to_q.lora_A.weight", "lora_unet_x_embedder.lora_down.weight"]
)
def test_a_lora_is_recognised_whatever_its_names_begin_with(tmp_path, name):
    file = layouts.save(
        {name: torch.zeros(4, 8), "transformer.proj_out.lora_B.weight": torch.zeros(8, 4)}, tmp_path / "l.sft"
    )
    info = sana_core.inspect_checkpoint(file)
    assert (info.kind, set(info.headers)) == ("lora", {name, "transformer.proj_out.lora_B.weight"})
    with pytest.raises(ValueError, match="l.sft: not a SANA transformer: found a LoRA; get one from"):
        sana_core.load_transformer(file)


def test_a_model_between_the_sizes_has_a_name_that_says_how(tmp_path):
    assert variant_name(Architecture(1152, 3)) == "custom-1152x3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_any_stored_precision_loads_in_any(tmp_path, dtype):
    stored = {key: value.to(dtype) for key, value in layouts.transformer().state_dict().items()}
    file = layouts.save(stored, tmp_path / "sana.safetensors")
    assert sana_core.inspect_checkpoint(file).dtype == dtype
    loaded = sana_core.load_transformer(file, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[key], value.bfloat16()) for key, value in stored.items())


NVIDIAS_CONFIGS = ["{}", '{"_class_name": "SanaMS"}', '{"model_type": "sana"}', "[]", ""]


@pytest.mark.parametrize("suffix, config", [*(("pth", one) for one in NVIDIAS_CONFIGS), ("safetensors", "{}")])
def test_a_repository_of_nvidia_s_may_have_a_configuration_at_its_root(tmp_path, config, suffix):
    """Sana_600M_512px and the teacher of Sprint have one beside checkpoints/; it is not read."""
    model, folder = layouts.transformer(resolution=512), tmp_path / "Sana_600M_512px"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text("SANA")
    file = folder / "checkpoints" / f"Sana_600M_512px_MultiLing.{suffix}"
    if suffix == "pth":
        torch.save({"state_dict": layouts.nvidia(model)}, file)
    else:
        layouts.save(layouts.nvidia(model), file)
    info = sana_core.inspect_checkpoint(folder)
    assert (info.kind, info.layout, info.resolution, info.path) == ("transformer", "original", 512, file)
    loaded = sana_core.load_transformer(folder, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_weights_beside_the_configuration_come_before_a_folder_of_checkpoints(tmp_path):
    """A folder in which somebody trains has checkpoints/ below the model itself."""
    model = layouts.transformer(resolution=512)
    model.save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "checkpoints").mkdir()
    torch.save({"state_dict": layouts.nvidia(model)}, tmp_path / "mine" / "checkpoints" / "step_100.pth")
    assert sana_core.inspect_checkpoint(tmp_path / "mine").layout == "diffusers"
