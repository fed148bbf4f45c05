"""SANA-Video 2.0: its file is recognised, and its forward and its sampling equal NVIDIA's code (written down in
tests/nvidia_video2.py), at small random shapes and at the released width."""

import json
import math
import shutil

import nvidia_video
import nvidia_video2
import pytest
import torch
import video_models
from checkpoints import TINY
from diffusers import SanaVideoTransformer3DModel
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import sana_core
from sana_core.__main__ import main
from sana_core.checkpoints.generation import shift_of, text_reference
from sana_core.checkpoints.load import config_of
from sana_core.commands.convert import convert_checkpoint
from sana_core.errors import InputError
from sana_core.model.known_models import VIDEOS, Defaults, model_defaults
from sana_core.model.latents import noise_stream
from sana_core.model.reference import NVIDIA
from sana_core.video import forward as video
from sana_core.video.generate import encode, generate_video, sample

BOUND, STEPS_BOUND = 1e-5, 5e-5
HEADS, CAPTION = 4, 32


class Case:
    """A random file, its module, and inputs for it."""

    def __init__(
        self, folder, width=48, layers=8, heads=HEADS, group=8, caption=CAPTION, size=(5, 4, 6), every=4, tensors=None
    ):
        self.tensors = tensors or nvidia_video2.random_video2_file(width, layers, heads, caption=caption, every=every)
        self.file = folder / "SANA_Video_2.0_5B_720p.pth"
        torch.save({"state_dict": self.tensors}, self.file)
        self.model = sana_core.load_video_transformer(self.file)
        self.model.register_to_config(group_layers=group)
        self.heads, self.group = heads, group
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(2, 128, *size, generator=generator)
        self.embeds, self.mask = torch.randn(2, 20, caption, generator=generator), torch.ones(2, 20)
        self.mask[0, 7:] = 0

    def forward_error(self, timestep):
        """The largest difference between both velocities, relative to the largest value."""
        prompts = self.embeds, self.mask
        expected = nvidia_video2.forward(self.tensors, self.x, timestep, *prompts, self.heads, self.group)
        got = sana_core.predict_velocity(self.model, self.x, timestep, *prompts)
        return relative(got, expected)

    def sampled(self, how, first=None, shift=12.0, noises=None):
        rows = slice(None) if how.guidance != 1 else slice(1, None)
        constants = video.prepare(self.model, self.embeds[rows], self.mask[rows], *self.x.shape[2:])
        return sample(self.model, constants, self.x[:1], shift, first, how, noises)


def relative(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


TIMES = {
    "one time": torch.tensor([700.7, 301.2]),
    "first frame given": torch.tensor([700.7, 301.2])[:, None] * torch.tensor([0.0, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("timestep", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("layers, group", [(4, 8), (8, 8), (8, 3), (8, 2)])
@pytest.mark.parametrize("part", [1, video.PART], ids=["a frame at a time", "at once"])
def test_the_forward_is_nvidias(tmp_path, monkeypatch, timestep, layers, group, part):
    monkeypatch.setattr(video, "PART", part)
    assert Case(tmp_path, layers=layers, group=group).forward_error(timestep) < BOUND


@pytest.mark.parametrize("width, hidden", [(784, 3136), (112, 115), (224, 453)])
def test_a_custom_width_builds_with_the_hidden_width_of_its_weights(tmp_path, width, hidden):
    """In floating point, 1 / 784 * 784 and 115 / 112 * 112 are less than 1 and 115."""
    tensors = nvidia_video2.random_video2_file(width, 4, HEADS)
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensors[name] = tensor[:, :hidden]
        elif "gate_proj" in name or "up_proj" in name:
            tensors[name] = tensor[:hidden]
    case = Case(tmp_path, tensors=tensors)
    assert case.model.transformer_blocks[0].ff.up_proj.out_features == hidden
    assert case.forward_error(TIMES["one time"]) < BOUND


@pytest.mark.parametrize("hidden", [115, 122, 336])
def test_a_custom_sana_video_builds_with_the_hidden_width_of_its_weights(tmp_path, hidden):
    config = {"num_attention_heads": 1, "num_layers": 2, "num_cross_attention_heads": 1, "cross_attention_dim": 112}
    sizes = {"attention_head_dim": 112, "cross_attention_head_dim": 112, "caption_channels": 32}
    model = SanaVideoTransformer3DModel(**config, **sizes, mlp_ratio=(hidden + 0.5) / 112)
    save_file(model.state_dict(), tmp_path / "video.safetensors")
    loaded = sana_core.load_video_transformer(tmp_path / "video.safetensors")
    assert loaded.transformer_blocks[0].ff.conv_point.in_channels == hidden


def test_the_forward_at_the_released_width_is_nvidias(tmp_path):
    """A layer of linear and one of softmax attention, 20 heads of 128 and 10 of 256, each a group."""
    case = Case(tmp_path, 2560, 2, 20, group=1, caption=2304, size=(2, 3, 4), every=2)
    assert case.model.config.softmax_heads == 10 and case.model.config.attention_head_dim == 128
    for timestep in (TIMES["one time"], TIMES["first frame given"][:, :2]):
        assert case.forward_error(timestep) < BOUND


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["plain", "tiled"])
def test_the_scores_of_all_queries_are_never_in_memory(tmp_path, monkeypatch, kernel):
    """Softmax attention in parts of the queries, where torch has no tiled kernel, is the whole one."""
    case = Case(tmp_path, size=(5, 16, 16))
    positions, heads = 5 * 16 * 16, 2
    inputs = case.x[:1], TIMES["one time"][:1], case.embeds[:1], case.mask[:1]
    with sdpa_kernel(kernel):
        monkeypatch.setattr(video, "QUERIES", 100)
        with Largest() as largest:
            got = sana_core.predict_velocity(case.model, *inputs)
        monkeypatch.setattr(video, "QUERIES", positions)
        expected = sana_core.predict_velocity(case.model, *inputs)
    assert relative(got, expected) < 1e-6
    assert largest.elements < heads * positions**2 / 4


@pytest.mark.parametrize("steps", [2, 6, 20])
def test_guided_steps_from_text_are_nvidias(tmp_path, steps):
    case = Case(tmp_path)
    expected = nvidia_video2.text_to_video(
        case.tensors, case.x[:1], (case.embeds, case.mask), steps, 8.0, case.heads, case.group
    )
    assert relative(case.sampled(Defaults("flow_dpmpp_2m", steps, 8.0)), expected) < STEPS_BOUND


@pytest.mark.parametrize("steps", [1, 6, 20])
def test_guided_steps_from_an_image_are_nvidias(tmp_path, steps):
    case = Case(tmp_path)
    noise, first = case.x[:1], case.x[1:, :, :1]
    prompts = case.embeds, case.mask
    expected = nvidia_video.image_to_video(
        case.tensors, noise, first, prompts, steps, 8.0, case.heads, case.group, 12.0, nvidia_video2.forward
    )
    how = model_defaults(case.model.config, begins_with_image=True)
    assert how == Defaults("flow_euler", 50, 8.0)
    assert relative(case.sampled(how._replace(steps=steps), first), expected) < STEPS_BOUND


@pytest.mark.slow
def test_six_guided_steps_at_the_released_width_are_nvidias(tmp_path):
    case = Case(tmp_path, 2560, 2, 20, group=1, caption=64, size=(2, 2, 3), every=2)
    noise, first, prompts = case.x[:1], case.x[1:, :, :1], (case.embeds, case.mask)
    expected = nvidia_video2.text_to_video(case.tensors, noise, prompts, 6, 8.0, case.heads, case.group)
    assert relative(case.sampled(Defaults("flow_dpmpp_2m", 6, 8.0)), expected) < STEPS_BOUND
    expected = nvidia_video.image_to_video(
        case.tensors, noise, first, prompts, 6, 8.0, case.heads, case.group, 12.0, nvidia_video2.forward
    )
    assert relative(case.sampled(Defaults("flow_euler", 6, 8.0), first), expected) < STEPS_BOUND


def test_the_preview_takes_nvidias_four_steps(tmp_path):
    case = Case(tmp_path)
    file = case.file.rename(tmp_path / "SANA_Video_2.0_5B_720p_4step.pth")
    info = sana_core.inspect_checkpoint(file)
    case.model = sana_core.load_video_transformer(info)
    how = model_defaults(case.model.config)
    assert (info.variant, how) == ("video-2.0-5B-4step", Defaults("flow_dmd", 4, 1.0))
    assert model_defaults(config_of(info)) == how
    noises = [case.x[:1], *torch.randn(3, 1, *case.x.shape[1:], generator=torch.Generator().manual_seed(9))]
    prompt = case.embeds[1:], case.mask[1:]
    expected = nvidia_video2.preview(case.tensors, noises, prompt, case.heads)
    assert relative(case.sampled(how, None, shift_of(info), iter(noises[1:])), expected) < BOUND


def sparse_pth(file):
    """A file of the released names, shapes and size, of which torch writes only the zip's headers and the pickle."""
    with torch.device("meta"):
        shapes = {k: t.shape for k, t in nvidia_video2.random_video2_file(2560, 32, 20, caption=2304).items()}
    with FakeTensorMode():
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"state_dict_ema" if "4step" in file.name else "state_dict": tensors}, file)
    return file


@pytest.mark.parametrize("name", ["SANA_Video_2.0_5B_720p", "SANA_Video_2.0_5B_720p_4step"])
def test_the_released_file_is_recognised(tmp_path, name):
    """Names and shapes of all 32 layers, in torch's zip, whose pickle is not run."""
    info = sana_core.inspect_checkpoint(sparse_pth(tmp_path / f"{name}.pth"))
    model = VIDEOS["video-2.0-5B-4step" if name.endswith("4step") else "video-2.0-5B"]
    assert (info.kind, info.variant, info.layout) == ("video_transformer", model.name, "original")
    assert info.reference == NVIDIA and shift_of(info) == model.shift and text_reference(info) == NVIDIA
    assert sum(math.prod(header.shape) for header in info.headers.values()) == model.parameters


def test_the_file_may_become_one_of_diffusers_names(tmp_path):
    case = Case(tmp_path)
    convert_checkpoint(case.file, tmp_path / "out.safetensors")
    info = sana_core.inspect_checkpoint(tmp_path / "out.safetensors")
    assert (info.kind, info.variant, info.layout) == ("video_transformer", "video-2.0-5B", "diffusers")
    assert info.reference == NVIDIA
    again = sana_core.load_video_transformer(info)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), case.model.parameters(), strict=True))


def test_broken_files_are_one_line(tmp_path):
    tensors = nvidia_video2.random_video2_file(48, 4, HEADS)
    file = tmp_path / "broken.safetensors"
    for name, message in (
        ("blocks.0.attn.beta_proj.weight", "no transformer_blocks.0.attn1.to_beta.weight; the file is incomplete"),
        ("blocks.1.mlp.up_proj.bias", "no transformer_blocks.1.ff.up_proj.bias; the file is incomplete"),
        ("attn_res.mlp_proj.weight", "no attn_res.mlp_proj.weight; the file is incomplete"),
    ):
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
        with pytest.raises(ValueError, match=f"^.*/broken.safetensors: {message}"):
            sana_core.load_video_transformer(file)
    save_file({**tensors, "x_embedder.proj.weight": torch.zeros(48, 16, 1, 1, 1)}, file)
    with pytest.raises(ValueError, match="latents with 16 channels, expected 128; use a released model"):
        sana_core.inspect_checkpoint(file)


def test_gradients_are_refused(tmp_path):
    case = Case(tmp_path, layers=4)
    with pytest.raises(InputError, match="^model: got SANA-Video 2.0 for training, expected a SANA model of images"):
        case.model(case.x, case.embeds, TIMES["one time"], case.mask)
    with torch.no_grad():
        (got,) = case.model(case.x, case.embeds, TIMES["one time"], case.mask)
    case.model.register_to_config(reference="diffusers")  # Its timesteps are fractions.
    assert torch.equal(got, sana_core.predict_velocity(case.model, case.x, TIMES["one time"], case.embeds, case.mask))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """NVIDIA's folder with the VAE and the text encoder beside checkpoints/, and the tensors of its file."""
    folder = tmp_path_factory.mktemp("SANA-Video_2.0_5B_720p")
    caption = json.loads((TINY / "text_encoder" / "config.json").read_text())["hidden_size"]
    tensors = nvidia_video2.random_video2_file(48, 4, HEADS, caption=caption)
    (folder / "checkpoints").mkdir()
    torch.save({"state_dict": tensors}, folder / "checkpoints" / "SANA_Video_2.0_5B_720p.pth")
    video_models.second_autoencoder().save_pretrained(folder / "vae")
    # The released configuration has the types of the stages by another name, the finest first.
    config = json.loads((folder / "vae" / "config.json").read_text())
    config["decoder_upsample_type"] = config.pop("upsample_type")[::-1]
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    for part in ("text_encoder", "tokenizer"):
        (folder / part).symlink_to(TINY / part, target_is_directory=True)
    return folder, tensors


@pytest.mark.parametrize("begins", ["text", "image"])
def test_a_video_without_a_host_is_nvidias(folder, begins):
    path, tensors = folder
    first = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(5)) * 2 - 1
    got = generate_video("A red circle.", path, 3, 9, (64, 64), first if begins == "image" else None, "chaos", steps=6)
    vae = video_models.second_autoencoder()
    mean, std = (part.view(1, -1, 1, 1, 1) for part in (vae.latents_mean, vae.latents_std))
    noise = next(noise_stream(torch.empty(1, 128, 2, 2, 2), 3))
    prompts = encode(
        sana_core.inspect_checkpoint(path), ["chaos", "A red circle. motion score: 20."], "cpu", torch.float32, "auto"
    )
    if begins == "text":
        latents = nvidia_video2.text_to_video(tensors, noise, prompts, 6, 8.0, HEADS)
    else:
        latent = (vae.encode(first[None, :, None]).latent_dist.mode() - mean) / std
        latents = nvidia_video.image_to_video(
            tensors, noise, latent, prompts, 6, 8.0, HEADS, 8, 12.0, nvidia_video2.forward
        )
    with torch.no_grad():
        expected = vae.decode((latents * std + mean).float()).sample[0].clamp(-1, 1)
    assert got.shape == (3, 9, 64, 64) and (got - expected).abs().max() < 1e-4


def test_the_command_writes_a_clip_at_the_models_rate(folder, tmp_path):
    av = pytest.importorskip("av")
    words = ["generate", "A red circle.", "--checkpoint", str(folder[0]), "--frames", "9", "--steps", "1"]
    assert main([*words, "--width", "64", "--height", "64", "--out", str(tmp_path / "clip.mp4")]) == 0
    with av.open(str(tmp_path / "clip.mp4")) as clip:
        stream = clip.streams.video[0]
        assert (stream.frames, float(stream.average_rate)) == (9, 24.0)


def test_the_preview_begins_with_no_image(folder, tmp_path):
    path = tmp_path / "preview"
    shutil.copytree(folder[0], path, symlinks=True)
    (path / "checkpoints" / "SANA_Video_2.0_5B_720p.pth").rename(path / "checkpoints" / "SANA_Video_5B_4step.pth")
    with pytest.raises(InputError, match="^first_image: got one for video-2.0-5B-4step, .* remove it, or use video-2"):
        generate_video("A red circle.", path, first=torch.zeros(3, 736, 1280))
    assert generate_video("A red circle.", path, 3, 9, (64, 64)).isfinite().all()


def test_a_vae_of_ltx_2_is_refused(folder, tmp_path):
    path = tmp_path / "other"
    shutil.copytree(folder[0], path, symlinks=True)
    shutil.rmtree(path / "vae")
    video_models.autoencoder("720p").save_pretrained(path / "vae")
    with pytest.raises(ValueError, match="got the VAE ltx-2, expected ltx-2.3; download the folder again"):
        generate_video("A red circle.", path, 3, 9, (64, 64))
