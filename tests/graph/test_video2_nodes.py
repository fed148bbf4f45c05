"""SANA-Video 2.0 in the host: its files load one by one, and its samplers make what NVIDIA's code makes."""

import json
import shutil

import layouts
import nvidia_video
import nvidia_video2
import pytest
import torch
import video_models
from checkpoints import TINY
from in_process import NodeError
from loading import through
from test_video_nodes import check_on_card

from sana_core.model.latents import noise_stream
from sana_core.video.transformer import SanaVideo2Transformer3DModel

pytestmark = pytest.mark.usefixtures("one_load")

PROMPT, NEGATIVE = "A red circle rolls away. motion score: 20.", "a chaotic sequence"
SIDE, FRAMES, HEADS, LAYERS = 64, 9, 4, 8
BOUND, STEPS_BOUND = 1e-5, 5e-5
NAMES = {False: "SANA_Video_2.0_5B_720p.pth", True: "SANA_Video_2.0_5B_720p_4step.pth"}


@pytest.fixture(scope="module")
def tensors(host):
    """The tensors of the file that both models have; the files are in the host's folders."""
    caption = json.loads((TINY / "text_encoder" / "config.json").read_text())["hidden_size"]
    tensors = nvidia_video2.random_video2_file(48, LAYERS, HEADS, caption=caption)
    (host.models / "diffusion_models").mkdir(exist_ok=True)
    for is_preview, name in NAMES.items():
        torch.save({"state_dict_ema" if is_preview else "state_dict": tensors}, host.models / "diffusion_models" / name)
    video_models.second_autoencoder().save_pretrained(host.models / "vae" / "ltx23")
    yield tensors
    for name in NAMES.values():
        (host.models / "diffusion_models" / name).unlink()
    shutil.rmtree(host.models / "vae" / "ltx23")


@pytest.fixture
def image():
    return torch.randint(256, (1, SIDE, SIDE, 3), generator=torch.Generator().manual_seed(5)) / 255


@pytest.fixture
def build(tensors):
    """A function of overrides: the graph from three files to the frames."""

    def graph(first=None, preview=False, node="SanaNodesSampler", **inputs):
        size = {"width": SIDE, "height": SIDE, "frames": FRAMES, "batch_size": 1}
        if first is not None:
            size |= {"vae": ["vae", 0], "first_image": ["first", 0]}
        links = {"model": ["load", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
        return {
            "load": ("SanaNodesModelLoader", {"model_name": NAMES[preview]}),
            "vae": ("SanaNodesVAELoader", {"vae_name": "ltx23/diffusion_pytorch_model.safetensors"}),
            "text": ("SanaNodesLoader", {"model": "sana-tiny"}),
            "positive": ("CLIPTextEncode", {"clip": ["text", 1], "text": PROMPT}),
            "negative": ("SanaNodesTextEncode", {"clip": ["text", 1], "text": NEGATIVE, "instruction": False}),
            **({"first": ("AnyValue", {"value": first})} if first is not None else {}),
            "empty": ("SanaNodesVideoLatent", {"model": ["load", 0], **size}),
            "sample": (node, {**links, "latent_image": ["empty", 0], "seed": 3, "steps": 6, **inputs}),
            "decode": ("VAEDecode", {"samples": ["sample", 0], "vae": ["vae", 0]}),
            "catch latent": ("Catch", {"value": ["sample", 0], "name": "latent"}),
            "catch frames": ("Catch", {"value": ["decode", 0], "name": "frames"}),
            **{
                f"catch {node_id}": ("Catch", {"value": [node_id, 0], "name": node_id})
                for node_id in ("positive", "negative")
            },
        }

    return graph


OURS = {"guidance": 8.0, "sampler": "flow_dpmpp_2m"}


def prompts_of(got):
    """Embeddings and mask of the negative and the positive prompt, as the host encoded them."""
    parts = [got[name][0] for name in ("negative", "positive")]
    length = max(embeds.shape[1] for embeds, _ in parts)
    masks = [options.get("attention_mask", torch.ones(1, embeds.shape[1])) for embeds, options in parts]
    pad = torch.nn.functional.pad
    embeds = [pad(embeds, (0, 0, 0, length - embeds.shape[1])) for embeds, _ in parts]
    return torch.cat(embeds).float(), torch.cat([pad(mask.float(), (0, length - mask.shape[1])) for mask in masks])


def noises():
    return noise_stream(torch.empty(1, 128, 1 + FRAMES // 8, SIDE // 32, SIDE // 32), 3)


def relative(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


def test_text_to_video_is_nvidias(host, build, tensors):
    got = host.run(build(**OURS))
    expected = nvidia_video2.text_to_video(tensors, next(noises()), prompts_of(got), 6, 8.0, HEADS)
    assert relative(got["latent"]["samples"], expected) < STEPS_BOUND


def test_image_to_video_is_nvidias(host, build, tensors, image):
    got = host.run(build(image, guidance=8.0, sampler="flow_euler"))
    vae = video_models.second_autoencoder()
    mean, std = (part.view(1, -1, 1, 1, 1) for part in (vae.latents_mean, vae.latents_std))
    first = (vae.encode(image.movedim(-1, 1)[:, :, None] * 2 - 1).latent_dist.mode() - mean) / std
    expected = nvidia_video.image_to_video(
        tensors, next(noises()), first, prompts_of(got), 6, 8.0, HEADS, 8, 12.0, nvidia_video2.forward
    )
    assert relative(got["latent"]["samples"], expected) < STEPS_BOUND
    assert got["frames"].shape == (FRAMES, SIDE, SIDE, 3)


def test_the_models_own_defaults_are_nvidias(host, build, image):
    defaults = {"guidance": 1.0, "sampler": "flow_heun", "steps": 1, "model_defaults": True}
    for first, sampler in ((None, "flow_dpmpp_2m"), (image, "flow_euler")):
        expected = host.run(build(first, guidance=8.0, sampler=sampler, steps=50))["latent"]["samples"]
        assert torch.equal(host.run(build(first, **defaults))["latent"]["samples"], expected)


def test_the_preview_takes_nvidias_four_steps(host, build, tensors):
    got = host.run(build(None, True, guidance=8.0, sampler="flow_euler", steps=1, model_defaults=True))
    stream, (embeds, mask) = noises(), prompts_of(got)
    expected = nvidia_video2.preview(tensors, [next(stream) for _ in range(4)], (embeds[1:], mask[1:]), HEADS)
    assert relative(got["latent"]["samples"], expected) < BOUND


def test_the_preview_begins_with_no_image(host, build, image):
    with pytest.raises(NodeError, match="^first_image: got one for video-2.0-5B-4step, which generates videos from"):
        host.run(build(image, True, **OURS))


def test_the_sampler_of_the_preview_fits_no_other_model(host, build):
    message = (
        "sampler: got flow_dmd for SANA-Video 2.0 5B 720p, expected another, .* 4-step preview of SANA-Video 2.0; ch"
    )
    with pytest.raises(NodeError, match=f"^{message}oose flow_dpmpp_2m$"):
        host.run(build(**OURS | {"sampler": "flow_dmd"}))


@pytest.mark.parametrize(
    "node, inputs, message",
    [
        (
            "SanaNodesSampler",
            {"sampler": "flow_dpmpp_2m"},
            "sampler: got flow_dpmpp_2m for 4-step preview of SANA-Video",
        ),
        (
            "SanaNodesSampler",
            {"sampler": "flow_dmd", "steps": 20},
            "steps: got 20 for .*, expected 4, for which it was",
        ),
        (
            "SanaNodesSampler",
            {"sampler": "flow_dmd", "steps": 0, "guidance": 4.5},
            "guidance: got 4.5 for .*, expected 1",
        ),
        (
            "KSampler",
            {"sampler_name": "euler", "scheduler": "normal", "cfg": 1.0},
            "sampler_name: got euler for 4-step",
        ),
        ("KSampler", {"sampler_name": "lcm", "scheduler": "normal", "cfg": 4.5}, "cfg: got 4.5 for 4-step preview"),
    ],
)
def test_the_preview_refuses_what_it_was_not_distilled_for(host, build, node, inputs, message):
    core = {"denoise": 1.0} if node == "KSampler" else {"guidance": 1.0}
    with pytest.raises(NodeError, match=f"^{message}"):
        host.run(build(None, True, node, **core | inputs))


def test_steps_and_frames_of_0_are_the_models(host, build, tensors):
    options = {"guidance": 1.0, "sampler": "flow_dmd"}
    graph = build(None, True, steps=0, **options)
    graph["catch fps"] = ("Catch", {"value": ["empty", 1], "name": "fps"})
    got = host.run(graph)
    assert torch.equal(got["latent"]["samples"], host.run(build(None, True, steps=4, **options))["latent"]["samples"])
    assert got["fps"] == 16.0
    for preview, frames, fps in ((False, 193, 24.0), (True, 81, 16.0)):
        graph = {name: node for name, node in build(None, preview).items() if name in ("load", "empty")}
        graph["empty"][1]["frames"] = 0
        graph |= {
            f"catch {name}": ("Catch", {"value": ["empty", output], "name": name})
            for output, name in enumerate(("latent", "fps"))
        }
        got = host.run(graph)
        assert (got["latent"]["samples"].shape[2], got["fps"]) == (1 + (frames - 1) // 8, fps)


def test_core_decodes_ltx_2_3_as_diffusers_does(host, build):
    got = host.run(build(**OURS))
    vae = video_models.second_autoencoder()
    mean, std = (part.view(1, -1, 1, 1, 1) for part in (vae.latents_mean, vae.latents_std))
    with torch.no_grad():
        expected = vae.decode(got["latent"]["samples"] * std + mean, return_dict=False)[0] / 2 + 0.5
    torch.testing.assert_close(got["frames"], expected.clamp(0, 1)[0].movedim(0, -1), atol=BOUND, rtol=0)


@pytest.fixture
def folder(host, tensors):
    """NVIDIA's folder in models/diffusers, with the folders of the VAE and the text encoder beside checkpoints/."""
    folder = host.models / "diffusers" / "SANA-Video_2.0_5B_720p"
    (folder / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": tensors}, folder / "checkpoints" / NAMES[False])
    for part in ("text_encoder", "tokenizer"):
        (folder / part).symlink_to(TINY / part, target_is_directory=True)
    (folder / "vae").symlink_to(host.models / "vae" / "ltx23", target_is_directory=True)
    yield folder
    shutil.rmtree(folder)


def test_the_loader_lists_and_loads_nvidias_folder(host, build, folder):
    options = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesLoader"].INPUT_TYPES()["required"]["model"][1]["options"]
    assert folder.name in options and not any(name.startswith(f"{folder.name}/") for name in options)
    graph = build(**OURS)
    # The prompt is read as in NVIDIA's folder.
    graph["text"][1]["reference"] = "nvidia"
    expected = host.run(graph)
    graph["load"] = ("SanaNodesLoader", {"model": folder.name})
    graph["positive"][1]["clip"] = graph["negative"][1]["clip"] = ["load", 1]
    graph["decode"][1]["vae"] = ["load", 2]
    got = host.run({name: node for name, node in graph.items() if name not in ("vae", "text")})
    assert torch.equal(got["frames"], expected["frames"])


@pytest.fixture
def other_vae(host, tensors):
    """The folder of LTX-2's VAE, whose latents have the 128 channels of LTX-2.3's."""
    folder = host.models / "vae" / "ltx2"
    video_models.autoencoder("720p").save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("begins", ["text", "image"])
def test_a_connected_vae_of_ltx_2_is_refused(host, build, image, other_vae, begins):
    graph = build(image if begins == "image" else None, **OURS)
    graph["vae"][1]["vae_name"] = "ltx2/diffusion_pytorch_model.safetensors"
    graph["empty"][1]["vae"] = ["vae", 0]
    with pytest.raises(NodeError, match="^vae: got ltx-2, expected ltx-2.3; use the VAE of the SANA-Video model$"):
        host.run(graph)


def test_a_folder_with_the_vae_of_ltx_2_is_refused(host, folder, other_vae):
    (folder / "vae").unlink()
    (folder / "vae").symlink_to(other_vae, target_is_directory=True)
    with pytest.raises(NodeError, match="got the VAE ltx-2, expected ltx-2.3; download the folder again$"):
        host.output_of("SanaNodesLoader", model=folder.name)


def test_the_line_under_the_loader_names_the_model(host, build, node_texts, monkeypatch):
    # A loader that does not run again writes no line.
    monkeypatch.setattr(host, "loaded", None)
    host.run(build(**OURS))
    assert any(
        text.startswith("SANA-Video 2.0 5B 720p (assumed from the file's name), NVIDIA's layout")
        for _, text, *_ in node_texts
    )


@pytest.mark.parametrize("dialect", ["PEFT", "kohya", "ComfyUI"])
def test_a_lora_changes_every_kind_of_layer(host, build, tensors, dialect):
    """As a file with the changed weights."""
    layers = {"attn1.to_gate": "attn.output_gate", "attn2.to_q": "cross_attn.q_linear", "ff.up_proj": "mlp.up_proj"}
    lora, changed = {}, dict(tensors)
    torch.manual_seed(1)
    for block in (2, 3):
        for ours, theirs in layers.items():
            weight = tensors[f"blocks.{block}.{theirs}.weight"]
            down, up = torch.randn(2, weight.shape[1]) * 0.1, torch.randn(len(weight), 2) * 0.1
            changed[f"blocks.{block}.{theirs}.weight"] = weight + up @ down
            layer = f"transformer_blocks.{block}.{ours}"
            if dialect == "kohya":
                layer = f"lora_unet_{layer.replace('.', '_')}"
                lora |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
                lora[f"{layer}.alpha"] = torch.tensor(2.0)
            else:
                prefix = "transformer" if dialect == "PEFT" else "diffusion_model"
                lora |= {f"{prefix}.{layer}.lora_A.weight": down, f"{prefix}.{layer}.lora_B.weight": up}
    file = layouts.save(lora, host.models / "loras" / "video2.safetensors")
    got = host.run(through(build(**OURS), "SanaNodesLoraLoader", lora_name=file.name, strength_model=1.0))
    file.unlink()
    expected = nvidia_video2.text_to_video(changed, next(noises()), prompts_of(got), 6, 8.0, HEADS)
    plain = nvidia_video2.text_to_video(tensors, next(noises()), prompts_of(got), 6, 8.0, HEADS)
    assert relative(got["latent"]["samples"], expected) < STEPS_BOUND < 1e-3 < relative(plain, expected)


def test_every_large_layer_of_a_block_is_quantised(host, build):
    graph = build(**OURS)
    graph["load"][1]["quantise"] = "int8"
    graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
    layers = host.run(graph)["model"].model.diffusion_model.transformer_blocks.named_modules()
    quantised = {name.partition(".")[2] for name, layer in layers if hasattr(layer, "quant_format")}
    attention = {
        f"{attention}.{part}" for attention in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")
    }
    assert quantised == attention | {"attn1.to_gate", "ff.gate_proj", "ff.up_proj", "ff.down_proj"}


@pytest.mark.parametrize("preview", [False, True])
def test_a_saved_model_loads_again(host, build, preview):
    defaults = {"guidance": 1.0, "sampler": "flow_heun", "steps": 1, "model_defaults": True}
    graph = build(None, preview, **defaults)
    expected = host.run(graph)["latent"]["samples"]
    host.run({"load": graph["load"], "save": ("ModelSave", {"model": ["load", 0], "filename_prefix": f"v2/{preview}"})})
    (file,) = host.output.glob(f"v2/{preview}*.safetensors")
    again = shutil.move(file, host.models / "diffusion_models" / "again.safetensors")
    graph["again"] = ("SanaNodesModelLoader", {"model_name": "again.safetensors"})
    graph["sample"][1]["model"] = ["again", 0]
    assert torch.equal(host.run(graph)["latent"]["samples"], expected)
    again.unlink()


@pytest.mark.parametrize("state", ["LOW_VRAM", "NO_VRAM"])
def test_a_video_is_the_same_in_every_state_of_memory(host, build, short_memory, state):
    expected = host.run(build(**OURS))["latent"]["samples"]
    short_memory(state, 1_000_000)
    assert torch.equal(host.run(build(**OURS))["latent"]["samples"], expected)


@pytest.mark.parametrize("state", ["fits", "half fits", "--novram", "dynamic VRAM, half fits"])
def test_the_released_sizes_run_on_a_card(host, monkeypatch, tmp_path, state):
    """Its sizes without numbers, on a card that is not there, where devices that mix raise; a time for each frame."""
    with torch.device("meta"):
        transformer = SanaVideo2Transformer3DModel(num_layers=4)
    file = layouts.sparse(transformer, tmp_path / "video.safetensors")
    check_on_card(monkeypatch, file, state, 128, 3, 4, 6)
