"""SANA-Video: its files are recognised. Its forward equals diffusers' class and NVIDIA's code (written down in
tests/nvidia_video.py), at small random shapes."""

import inspect
import json

import diffusers
import layouts
import nvidia_video
import pytest
import torch
from diffusers import (
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from safetensors.torch import save_file
from video_models import MODELS, scheduler, transformer

import sana_core
from sana_core.checkpoints import find_part
from sana_core.checkpoints.checkpoint import TRANSFORMER_KINDS
from sana_core.checkpoints.generation import shift_of, text_reference
from sana_core.commands.convert import convert_checkpoint
from sana_core.model.known_models import VIDEO_480, model_defaults
from sana_core.model.reference import DIFFUSERS, DIFFUSERS_VIDEO, NVIDIA, RULES
from sana_core.model.text import instruction_text
from sana_core.sampling.samplers import SAMPLERS
from sana_core.video import forward as video
from sana_core.video.generate import sample

BOUND = 1e-5
CAPTION = 32


def inputs(name, frames=5):
    generator = torch.Generator().manual_seed(3)
    channels, patch, *_ = MODELS[name]
    x = torch.randn(2, channels, frames, 4 * patch, 6 * patch, generator=generator)
    mask = torch.ones(2, 20)
    mask[0, 7:] = 0
    return x, torch.tensor([700.7, 301.2]), torch.randn(2, 20, CAPTION, generator=generator), mask


def given(timestep, frames):
    """A time for each frame. The first frame has 0."""
    return timestep[:, None] * torch.tensor([0.0] + [1.0] * (frames - 1))


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def nvidia_file(name, tmp_path):
    channels, patch, *_ = MODELS[name]
    tensors = nvidia_video.random_video_file(224, 2, 48, channels, patch, CAPTION)
    save_file(tensors, tmp_path / "video.safetensors")
    return tensors, tmp_path / "video.safetensors"


@pytest.mark.parametrize("part", [1, video.PART], ids=["a frame at a time", "at once"])
def test_the_forward_is_diffusers(name, part, monkeypatch):
    monkeypatch.setattr(video, "PART", part)
    model, (x, timestep, embeds, mask) = transformer(name), inputs(name)
    expected = model(x, embeds, timestep, encoder_attention_mask=mask).sample
    torch.testing.assert_close(
        sana_core.predict_velocity(model, x, timestep, embeds, mask), expected, atol=BOUND, rtol=0
    )
    # diffusers' pipeline gives a time for each position
    times, patch = given(timestep, 5), MODELS[name][1]
    positions = times[:, None, :, None, None].expand(-1, -1, -1, x.shape[3] // patch, x.shape[4] // patch)
    expected = model(x, embeds, positions, encoder_attention_mask=mask).sample
    torch.testing.assert_close(sana_core.predict_velocity(model, x, times, embeds, mask), expected, atol=BOUND, rtol=0)


def test_the_forward_is_nvidias(name, nvidia_file):
    tensors, path = nvidia_file
    model = sana_core.load_video_transformer(path)
    x, timestep, embeds, mask = inputs(name)
    for times in (timestep, given(timestep, 5)):
        expected = nvidia_video.forward(tensors, x, times, embeds, mask, heads=2, patch=MODELS[name][1])
        got = sana_core.predict_velocity(model, x, times, embeds, mask)
        assert (got - expected).abs().max() / expected.abs().max() < BOUND


@pytest.mark.parametrize("steps, guidance", [(1, 6.0), (3, 6.0), (4, 2.5), (8, 4.5), (20, 6.0)])
def test_image_to_video_is_sampled_as_by_nvidias_script(name, nvidia_file, steps, guidance):
    tensors, path = nvidia_file
    model = sana_core.load_video_transformer(path)
    x, _, embeds, mask = inputs(name)
    noise, first = x[:1], x[1:, :, :1]
    expected = nvidia_video.image_to_video(tensors, noise, first, (embeds, mask), steps, guidance, 2, MODELS[name][1])
    defaults = model_defaults(model.config, begins_with_image=True)
    constants = video.prepare(model, embeds, mask, *x.shape[2:])
    how = defaults._replace(steps=steps, guidance=guidance)
    got = sample(model, constants, noise, 8.0, first, how)
    assert (got - expected).abs().max() / expected.abs().max() < BOUND


def test_each_layout_may_be_computed_as_the_other(name, nvidia_file, tmp_path):
    tensors, path = nvidia_file
    x, timestep, embeds, mask = inputs(name)
    model = sana_core.load_video_transformer(path, reference=DIFFUSERS)
    theirs = transformer(name, heads=2, dim=112, layers=2)
    theirs = SanaVideoTransformer3DModel.from_config({**theirs.config, "mlp_ratio": 48 / 224})
    theirs.load_state_dict(model.state_dict())
    expected = theirs(x, embeds, timestep, encoder_attention_mask=mask).sample.detach()
    got = sana_core.predict_velocity(model, x, timestep, embeds, mask)
    assert (got - expected).abs().max() / expected.abs().max() < BOUND
    # The other way round, from a file with diffusers' names and without a configuration.
    file = tmp_path / "diffusers.safetensors"
    save_file(theirs.state_dict(), file)
    expected = nvidia_video.forward(tensors, x, timestep, embeds, mask, heads=2, patch=MODELS[name][1])
    got = sana_core.predict_velocity(
        sana_core.load_video_transformer(file, reference=NVIDIA), x, timestep, embeds, mask
    )
    assert (got - expected).abs().max() / expected.abs().max() < BOUND


def test_files_are_recognised(name, nvidia_file, tmp_path):
    info = sana_core.inspect_checkpoint(nvidia_file[1])
    assert (info.kind, info.variant, info.layout) == ("video_transformer", f"video-2B-{name}", "original")
    assert info.reference == NVIDIA and shift_of(info) == 8.0
    # The configuration of diffusers' folder contains the number of heads.
    model = transformer(name)
    model.save_pretrained(tmp_path / "folder" / "transformer")
    (tmp_path / "folder" / "model_index.json").write_text(json.dumps({"_class_name": "SanaVideoPipeline"}))
    DPMSolverMultistepScheduler.from_config(scheduler().config, flow_shift=7.0).save_pretrained(
        tmp_path / "folder" / "scheduler"
    )
    info = sana_core.inspect_checkpoint(tmp_path / "folder")
    assert (info.kind, info.variant, info.layout) == ("pipeline", f"video-2B-{name}", "diffusers")
    assert info.reference == DIFFUSERS and shift_of(info) == 7.0 and text_reference(info) == DIFFUSERS_VIDEO
    loaded = sana_core.load_video_transformer(tmp_path / "folder")
    assert loaded.config.num_attention_heads == 4 and model_defaults(loaded.config) == VIDEO_480.defaults
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_vaes_are_recognised_and_not_taken_for_images(name, layout, tmp_path):
    """Diffusers' names are the library's; the original ones those that its conversion reads."""
    if layout == "diffusers":
        with torch.device("meta"):
            shapes = {"480p": AutoencoderKLWan, "720p": AutoencoderKLLTX2Video}[name]().state_dict()
    else:
        names = {
            "480p": ("decoder.head.0.gamma", "decoder.upsamples.0.residual.2.weight", "decoder.conv1.weight"),
            "720p": ("per_channel_statistics.mean-of-means", "decoder.conv_in.conv.weight"),
        }
        shapes = {item: torch.empty(8, 16, 3, 3, 3) for item in names[name]}
    file = layouts.sparse({key: tensor.shape for key, tensor in shapes.items()}, tmp_path / "vae.safetensors")
    info = sana_core.inspect_checkpoint(file)
    variant = {"480p": "wan-2.1", "720p": "ltx-2"}[name]
    assert (info.kind, info.variant, info.layout) == ("video_autoencoder", variant, layout)
    with pytest.raises(ValueError, match=f"not SANA's VAE, DC-AE f32c32: found a video VAE .{variant}.; get dc-ae"):
        sana_core.load_autoencoder(file)
    with pytest.raises(ValueError, match="expected a SANA model; choose another file"):
        convert_checkpoint(file, tmp_path / "out.safetensors")


def test_one_file_of_any_layout_becomes_one_of_diffusers(name, nvidia_file, tmp_path):
    convert_checkpoint(nvidia_file[1], tmp_path / "out.safetensors")
    info = sana_core.inspect_checkpoint(tmp_path / "out.safetensors")
    assert (info.kind, info.layout, info.reference) == ("video_transformer", "diffusers", NVIDIA)
    first, second = (sana_core.load_video_transformer(path) for path in (nvidia_file[1], tmp_path / "out.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def guided(model, embeds, mask, timestep, x):
    """What both loops below ask: the velocity of a step, guided by 6, of prompts [without, with]."""
    without, positive = sana_core.predict_velocity(model, x.repeat(2, 1, 1, 1, 1), timestep, embeds, mask).chunk(2)
    return without + 6.0 * (positive - without)


@pytest.mark.parametrize("first", [False, True], ids=["text to video", "image to video"])
def test_six_guided_steps_are_those_of_diffusers_scheduler(name, first):
    """The library's model in its pipeline's loop, which steps the frames after a given one, and ours with a mask."""
    model, (_, _, embeds, mask) = transformer(name), inputs(name)
    channels, patch, *_ = MODELS[name]
    noise, image = torch.randn(1, channels, 5, 4 * patch, 4 * patch), torch.randn(1, channels, 1, 4 * patch, 4 * patch)
    start = int(first)
    theirs = scheduler()
    theirs.set_timesteps(6)
    x = torch.cat([image[:, :, :start], noise[:, :, start:]], 2)
    for t in theirs.timesteps:
        times = t.float().expand(2, 1, 5, 4, 4).clone()
        times[:, :, :start] = 0
        out = model(x.repeat(2, 1, 1, 1, 1), embeds, times, encoder_attention_mask=mask).sample
        without, positive = out.chunk(2)
        moved = theirs.step((without + 6 * (positive - without))[:, :, start:], t, x[:, :, start:]).prev_sample
        x = torch.cat([x[:, :, :start], moved], 2)

    flow, keep = SAMPLERS["flow_dpmpp_2m"], torch.ones(1, 1, 5, 1, 1)
    keep[:, :, :start] = 0

    def denoise(state, sigma):
        state = state * keep + image * (1 - keep)
        times = (keep.flatten() * (1000 * torch.tensor(sigma)).floor()).expand(2, -1)
        out = state - sigma * guided(model, embeds, mask, times, state)
        return out * keep + image * (1 - keep)

    sigmas = flow.sigmas(6, 8.0)
    got = flow.sample(denoise, noise * sigmas[0] / sigmas[0], sigmas, **flow.options(RULES[DIFFUSERS], None))
    got = got * keep + image * (1 - keep)
    assert (got - x).abs().max() / x.abs().max() < BOUND


def test_the_instruction_is_the_pipelines():
    lines = inspect.signature(SanaVideoPipeline.__call__).parameters["complex_human_instruction"].default
    assert instruction_text(DIFFUSERS_VIDEO) == "\n".join(lines)


@pytest.mark.parametrize("known_by", ["config", "file name"])
def test_longsana_is_refused_by_name(name, known_by, tmp_path):
    """Its folder has the tensors of SANA-Video 2B."""
    folder = tmp_path / "LongLive_diffusers" / "transformer"
    transformer(name).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    if known_by == "config":
        config = json.loads((folder / "config.json").read_text())
        config["_class_name"] = "SanaVideoCausalTransformer3DModel"
        (folder / "config.json").write_text(json.dumps(config))
    else:
        file.rename(folder / "SANA_Video_2B_480p_LongLive.safetensors")
        (folder / "config.json").write_text("{}")
    (folder.parent / "model_index.json").write_text(json.dumps({"_class_name": "LongSanaVideoPipeline"}))
    info = sana_core.inspect_checkpoint(folder.parent)
    assert [part.kind for part in info.parts] == ["other"]
    message = "not a SANA-Video transformer: found LongSANA, whose layers .*; get SANA-Video_2B_480p_diffusers from Eff"
    with pytest.raises(ValueError, match=message):
        sana_core.load_video_transformer(folder.parent)
    with pytest.raises(ValueError, match="not a SANA transformer: found LongSANA, whose layers read earlier frames"):
        find_part(info, *TRANSFORMER_KINDS)


def test_what_cannot_be_read_is_said(nvidia_file, name, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=f"not a SANA transformer: found a SANA-Video transformer .video-2B-{name}[^;]*.; "
    ):
        sana_core.load_transformer(nvidia_file[1])
    with pytest.raises(ValueError, match="^reference: got 'x', expected one of auto, nvidia, diffusers$"):
        sana_core.load_video_transformer(nvidia_file[1], reference="x")
    shapes = {key: tensor.shape for key, tensor in transformer(name).state_dict().items()}
    file = layouts.sparse(shapes, tmp_path / "narrow.safetensors")
    with pytest.raises(ValueError, match="got width 96, expected a multiple of 112, .*; put the model's config.json"):
        sana_core.load_video_transformer(file)
    shapes["patch_embedding.weight"] = (96, 32, 1, 1, 1)
    layouts.sparse(shapes, file)
    with pytest.raises(ValueError, match="latents with 32 channels, expected 16 or 128; use a released model"):
        sana_core.inspect_checkpoint(file)
    # An older version has no such class. Its lazy import fails at the first use.
    monkeypatch.delattr(diffusers, "SanaVideoTransformer3DModel")
    monkeypatch.delitem(diffusers._class_to_module, "SanaVideoTransformer3DModel")
    with pytest.raises(RuntimeError, match="^diffusers: got .*, expected 0.36 or newer for SANA-Video; pip install"):
        sana_core.load_video_transformer(nvidia_file[1])
