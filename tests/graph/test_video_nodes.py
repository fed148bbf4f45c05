"""SANA-Video in the host against diffusers' pipelines, with small random models: text and image to video."""

import json
import re
import shutil

import layouts
import pytest
import torch
import video_models
from bounded import bounded
from diffusers import FlowMatchEulerDiscreteScheduler, SanaVideoTransformer3DModel
from fake_cuda import CARD, fake_card, no_numbers, pack
from in_process import NodeError
from loading import interrupted_steps, through
from safetensors.torch import load_file, save_file
from test_memory_states import load_model, state_of

pytestmark = pytest.mark.usefixtures("one_load")

PROMPT, NEGATIVE = "A red circle rolls away. motion score: 30.", "a chaotic sequence"
SIDE, FRAMES = 64, 9
BOUND = 1e-5


@pytest.fixture(scope="module")
def folders(host):
    root = host.models / "diffusers"
    path = {name: video_models.save_folder(name, root / f"video-{name}") for name in video_models.MODELS}
    yield path
    for folder in path.values():
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image():
    """In 256 steps, as files have them."""
    return torch.randint(256, (1, SIDE, SIDE, 3), generator=torch.Generator().manual_seed(5)) / 255


@pytest.fixture(params=video_models.MODELS)
def name(request, folders):
    return request.param


@pytest.fixture
def build(name):
    """A function of overrides: the graph up to the sampler's LATENT, caught as "latent", and its frames."""

    def graph(first=None, node="SanaNodesSampler", **inputs):
        size = {"width": SIDE, "height": SIDE, "frames": FRAMES, "batch_size": 1}
        if first is not None:
            size |= {"vae": ["load", 2], "first_image": ["first", 0]}
        links = {"model": ["load", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
        return {
            "load": ("SanaNodesLoader", {"model": f"video-{name}"}),
            "positive": ("CLIPTextEncode", {"clip": ["load", 1], "text": PROMPT}),
            "negative": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": NEGATIVE, "instruction": False}),
            **({"first": ("AnyValue", {"value": first})} if first is not None else {}),
            "empty": ("SanaNodesVideoLatent", {"model": ["load", 0], **size}),
            "sample": (node, {**links, "latent_image": ["empty", 0], "seed": 3, "steps": 4, **inputs}),
            "decode": ("VAEDecode", {"samples": ["sample", 0], "vae": ["load", 2]}),
            "catch latent": ("Catch", {"value": ["sample", 0], "name": "latent"}),
            "catch frames": ("Catch", {"value": ["decode", 0], "name": "frames"}),
        }

    return graph


OURS = {"guidance": 6.0, "sampler": "flow_dpmpp_2m"}
CORE = {"cfg": 6.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}


@pytest.fixture
def expect(name, folders):
    """A function of the first image and the scheduler: latent, and frames, that diffusers' pipeline makes."""

    def run(first=None, scheduler=None):
        image = None if first is None else first.movedim(-1, 1)
        size = FRAMES, SIDE, SIDE
        return video_models.by_pipeline(name, folders[name], (PROMPT, NEGATIVE), size, image, "latent", scheduler)

    return run


def close(got, expected):
    return (got - expected).abs().max() / expected.abs().max() < BOUND


def normalised(name, latents):
    """LATENT of the host as the pipelines have it: theirs is normalised."""
    import comfy.latent_formats

    return comfy.latent_formats.Wan21().process_in(latents) if name == "480p" else latents


@pytest.mark.parametrize("kind", ["text", "image"])
def test_sana_sampler_draws_what_the_pipeline_does(host, build, expect, image, name, kind):
    first = image if kind == "image" else None
    got = host.run(build(first, **OURS))
    expected = expect(first)
    assert close(normalised(name, got["latent"]["samples"]), expected)
    assert got["frames"].shape == (FRAMES, SIDE, SIDE, 3)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_model_defaults_are_the_pipelines_with_and_without_a_first_image(host, build, image, kind):
    first = image if kind == "image" else None
    authors, other = ("flow_euler", "flow_dpmpp_2m") if kind == "image" else ("flow_dpmpp_2m", "flow_euler")
    expected = host.run(build(first, guidance=6.0, sampler=authors, steps=50))["latent"]["samples"]
    got = host.run(build(first, guidance=1.0, sampler=other, steps=1, model_defaults=True))["latent"]["samples"]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_ksampler_draws_what_the_pipeline_does_with_euler(host, build, expect, image, name, kind):
    first = image if kind == "image" else None
    got = host.run(build(first, "KSampler", **CORE))
    expected = expect(first, FlowMatchEulerDiscreteScheduler(shift=8.0))
    assert close(normalised(name, got["latent"]["samples"]), expected)


def test_core_decodes_what_diffusers_does(host, build, name):
    got = host.run(build(**OURS))
    vae, latents = video_models.autoencoder(name), normalised(name, got["latent"]["samples"])
    shape = (1, -1, 1, 1, 1)
    mean, std = (vae.config[key] if name == "480p" else getattr(vae, key) for key in ("latents_mean", "latents_std"))
    mean, std = (torch.as_tensor(item).view(shape) for item in (mean, std))
    with torch.no_grad():
        expected = vae.decode(latents * std + mean, return_dict=False)[0] / 2 + 0.5
    torch.testing.assert_close(got["frames"], expected.clamp(0, 1)[0].movedim(0, -1), atol=BOUND, rtol=0)


def test_a_row_of_wans_latent_reaches_98_pixels(host):
    """The reach is measured behind the attention of the decoder. docs/video.md gives the cost of strips."""
    import comfy.ldm.wan.vae

    torch.manual_seed(0)
    vae = video_models.randomise(comfy.ldm.wan.vae.WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True]))
    # Some processors round away the small change of the outermost rows in float32.
    vae = vae.double()
    latents, shift = torch.randn(1, 16, 2, 64, 4).double(), torch.zeros(64).double()
    vae.decoder.middle[2].register_forward_hook(lambda module, inputs, out: out + shift[:, None])
    before = vae.decode(latents)
    shift[32] = 1
    (rows,) = (vae.decode(latents) - before).abs().amax((0, 1, 2, 4)).nonzero(as_tuple=True)
    assert (int(rows.min()), int(rows.max())) == (32 * 8 - 98, 33 * 8 - 1 + 98)


def custom(graph, model=("load", 0)):
    """`graph` with core's SamplerCustomAdvanced in the place of our sampler."""
    conds = {"model": list(model), "positive": ["positive", 0], "negative": ["negative", 0]}
    links = {part: [part, 0] for part in ("noise", "guider", "sampler", "sigmas")}
    return {
        **graph,
        "noise": ("RandomNoise", {"noise_seed": 3}),
        "guider": ("CFGGuider", {**conds, "cfg": 6.0}),
        "sampler": ("SanaNodesSamplerSelect", {"sampler": "flow_dpmpp_2m"}),
        "sigmas": ("SanaNodesScheduler", {"model": list(model), "sampler": "flow_dpmpp_2m", "steps": 4}),
        "sample": ("SamplerCustomAdvanced", {**links, "latent_image": ["empty", 0]}),
    }


@pytest.mark.parametrize("kind", ["text", "image"])
def test_sampler_custom_advanced_draws_the_same(host, build, image, kind):
    graph = build(image if kind == "image" else None, **OURS)
    expected = host.run(graph)["latent"]["samples"]
    assert close(host.run(custom(graph))["latent"]["samples"], expected)


def test_easycache_skips_steps_and_draws_nearly_the_video(host, build, name):
    inputs = {"reuse_threshold": 3.0, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    graph = through(build(**OURS), "EasyCache", **inputs)
    got = host.run({**graph, "model": ("Catch", {"value": ["load", 0], "name": "model"})})
    calls = []
    hook = got["model"].model.diffusion_model.patch_embedding.register_forward_pre_hook(lambda *_: calls.append(1))
    graph["sample"][1]["steps"] = 12
    drawn = host.run(graph, keep_cache=True)["latent"]["samples"]
    hook.remove()
    assert 0 < len(calls) < 12 and drawn.isfinite().all()


def test_guidance_limited_to_no_step_is_the_prompt_alone(host, build):
    limited = through(build(**OURS), "SanaNodesGuidanceInterval", start=1.0, end=1.0)
    got, alone = host.run(limited), host.run(build(**{**OURS, "guidance": 1.0}))
    assert close(got["latent"]["samples"], alone["latent"]["samples"])


@pytest.mark.parametrize("node", ["SanaNodesLoraLoader", "LoraLoaderModelOnly"])
def test_a_lora_changes_every_kind_of_layer(host, build, folders, name, node):
    """Also the convolution over time; as a model with the changed weights draws."""
    from sana_core.checkpoints.headers import read_file

    file = folders[name] / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = read_file(file)
    layers = ["attn1.to_q", "attn2.to_out.0", "ff.conv_point", "ff.conv_temp", "ff.conv_depth"]
    layers, tensors = [f"transformer_blocks.1.{layer}" for layer in layers], {}
    torch.manual_seed(1)
    for layer in layers:
        weight = weights[f"{layer}.weight"]
        down = torch.randn(2, *weight.shape[1:]) * 0.1
        up = torch.randn(len(weight), 2, *[1] * (weight.ndim - 2)) * 0.1
        tensors |= {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}
        weights[f"{layer}.weight"] = weight + (up.flatten(1) @ down.flatten(1)).view(weight.shape)
    lora = layouts.save(tensors, host.models / "loras" / "video.safetensors")
    changed = layouts.save(weights, host.models / "diffusion_models" / "video.safetensors")
    shutil.copy(file.with_name("config.json"), changed.with_name("config.json"))
    shown = through(build(**OURS), node, lora_name=lora.name, strength_model=1.0)
    got = host.run(shown)["latent"]["samples"]
    graph = build(**OURS)
    graph["changed"] = ("SanaNodesModelLoader", {"model_name": changed.name})
    graph["sample"][1]["model"] = ["changed", 0]
    assert close(got, host.run(graph)["latent"]["samples"])
    assert not close(got, host.run(build(**OURS))["latent"]["samples"])
    for path in (lora, changed, changed.with_name("config.json")):
        path.unlink()


@pytest.mark.parametrize("options", [{"weight_dtype": "fp8_e4m3fn"}, {"quantise": "int8"}], ids=str)
def test_a_model_in_8_bits_draws_nearly_the_video(host, build, options):
    graph = build(**OURS)
    expected = host.run(graph)["latent"]["samples"]
    graph["load"][1].update(options)
    got = host.run(graph)["latent"]["samples"]
    assert 0 < (got - expected).norm() / expected.norm() < 0.5


@pytest.mark.parametrize("state", ["LOW_VRAM", "NO_VRAM"])
def test_a_video_is_the_same_in_every_state_of_memory(host, build, monkeypatch, short_memory, state):
    expected = host.run(build(**OURS))["latent"]["samples"]
    casts = []
    monkeypatch.setattr(
        pack("nodes.host.loading.weights").CastLayer,
        "is_ready",
        lambda layer, device: casts.append(type(layer).__name__),
    )
    short_memory(state, 10_000_000)
    assert torch.equal(host.run(build(**OURS))["latent"]["samples"], expected)
    assert {"CastRMSNorm", "CastConv3d"} < set(casts)


def check_on_card(monkeypatch, file, state, *shape):
    """Run the model of `file` without numbers on latents of `shape`, with a time for each frame."""
    with fake_card(monkeypatch, **state_of(file.stat().st_size, state)) as patched, no_numbers(patched):
        patcher = load_model(patched, file)
        prompts = pack("nodes.host.sampling.model")
        prompt = prompts.Prompt("positive", torch.empty(1, 300, 2304, device=CARD), None, keep=False)
        x, mask = torch.empty(2, *shape, device=CARD), torch.ones(2, *shape, device=CARD)
        context = torch.empty(2, 300, 2304, device=CARD, dtype=patcher.model.get_dtype_inference())
        both, sigma = prompts.PromptBatch([prompt, prompt]), torch.empty(2, device=CARD)
        out = patcher.model.apply_model(x, sigma, c_crossattn=context, prompt=both, denoise_mask=mask)
        assert out.device == CARD and out.shape == x.shape


@pytest.mark.parametrize("state", ["fits", "half fits", "--novram", "dynamic VRAM, half fits"])
def test_a_released_model_draws_on_a_card(host, monkeypatch, tmp_path, state, name):
    """Its sizes without numbers, on a card that is not there, where devices that mix raise; a time for each frame."""
    channels, patch, *_ = video_models.MODELS[name]
    with torch.device("meta"):
        config = {"in_channels": channels, "out_channels": channels, "patch_size": (1, patch, patch)}
        undivided = SanaVideoTransformer3DModel(num_layers=2, mlp_ratio=3.0, **config)
    file = layouts.sparse(undivided, tmp_path / "video.safetensors")
    check_on_card(monkeypatch, file, state, channels, 3, 4 * patch, 6 * patch)


def test_cancel_ends_it_before_the_next_step(host, build, monkeypatch):
    assert interrupted_steps(host, build(**OURS), monkeypatch) == 1


def test_previews_show_the_middle_frame(host, build, name):
    got = host.run({"load": build()["load"], "model": ("Catch", {"value": ["load", 0], "name": "model"})})
    import latent_preview

    model = got["model"].model
    latents = torch.zeros(1, model.latent_format.latent_channels, 3, 4, 4)
    previewer = latent_preview.get_previewer(torch.device("cpu"), model.latent_format)
    first = previewer.decode_latent_to_preview(latents).tobytes()
    latents[:, :, 0] = 5
    assert previewer.decode_latent_to_preview(latents).tobytes() == first
    latents[:, :, 1] = 5
    assert previewer.decode_latent_to_preview(latents).tobytes() != first


def test_a_saved_model_loads_again(host, build, name):
    graph = build(**OURS)
    expected = host.run(graph)["latent"]["samples"]
    host.run({"load": graph["load"], "save": ("ModelSave", {"model": ["load", 0], "filename_prefix": f"video/{name}"})})
    (file,) = host.output.glob(f"video/{name}*.safetensors")
    again = shutil.move(file, host.models / "diffusion_models" / "again.safetensors")
    graph["again"] = ("SanaNodesModelLoader", {"model_name": "again.safetensors"})
    graph["sample"][1]["model"] = ["again", 0]
    assert torch.equal(host.run(graph)["latent"]["samples"], expected)
    again.unlink()


REFUSED = [
    (
        "SanaNodesPAG",
        {"scale": 2.0},
        "^model: got SANA-Video, expected a SANA model of images; generate videos with SANA V",
    ),
    ("SanaNodesSplitPicture", {"devices": "2 workers on the CPU (to try)"}, "^model: got SANA-Video, expected a SANA "),
]


@pytest.mark.parametrize("node, inputs, message", REFUSED, ids=[node for node, _, _ in REFUSED])
def test_what_is_for_images_refuses_the_model(host, build, node, inputs, message):
    with pytest.raises(NodeError, match=message):
        host.run(through(build(**OURS), node, **inputs))


def test_samplers_for_images_refuse_a_video(host, build, image, name):
    graph = build(**OURS)
    _, links = graph["sample"]
    batch = {key: links[key] for key in ("model", "positive", "negative", "latent_image", "seed", "steps")}
    batch |= {"count": 1, "devices": "default", "chunk": 0, **OURS}
    with pytest.raises(
        NodeError, match="^model: got SANA-Video, expected a SANA model of images; generate videos with"
    ):
        host.run({**graph, "sample": ("SanaNodesBatchSampler", batch)})
    sprint = {key: links[key] for key in ("model", "positive", "latent_image", "seed")} | {"steps": 2, "guidance": 4.5}
    with pytest.raises(NodeError, match="^sampler: got scm"):
        host.run({**graph, "sample": ("SanaNodesSprint", sprint)})
    graph["positive area"] = ("ConditioningSetArea", {"conditioning": ["positive", 0], **AREA})
    graph["sample"][1]["positive"] = ["positive area", 0]
    with pytest.raises(NodeError, match="^positive: got an area, which SANA-Video does not have; remove Cond"):
        host.run(graph)


def test_a_decoder_of_images_says_how_to_decode_a_video_and_which_vae_an_image_needs(host, build, image, name, clip):
    graph = build(**OURS)
    folder = host.models / "clip_vision" / "judge"
    folder.parent.mkdir(exist_ok=True)
    shutil.copytree(clip, folder, dirs_exist_ok=True)
    graph["image model"] = ("SanaNodesLoader", {"model": "sana-tiny"})
    graph["image latent"] = ("SanaNodesEmptyLatent", {"width": 64, "height": 64, "batch_size": 1})
    graph["scorer"] = ("SanaNodesScorerLoader", {"scorer_name": "judge"})
    channels = 16 if name == "480p" else 128
    video = "^samples: got the latent of a video, expected one of images; use VAE Decode for videos$"
    vae = f"^vae: got one of {channels} channels, expected 32; use the VAE of a SANA model of images$"
    pick = {"scorer": ["scorer", 0], "prompt": PROMPT, "best": 1}
    for node, inputs in (("SanaNodesDecode", {}), ("SanaNodesPickBest", pick)):
        for latent, loader, message in (
            ("empty", "load", video),
            ("empty", "image model", video),
            ("image latent", "load", vae),
        ):
            decoder = (node, {"samples": [latent, 0], "vae": [loader, 2], **inputs})
            with pytest.raises(NodeError, match=message):
                host.run({**graph, "decoder": decoder, "catch": ("Catch", {"value": ["decoder", 0], "name": "out"})})
    # Here a video model gives only the VAE.
    links = {"positive": ["text", 0], "negative": ["text", 0], "latent_image": ["image latent", 0], "seed": 0}
    graph["text"] = ("SanaNodesTextEncode", {"clip": ["image model", 1], "text": "", "instruction": False})
    batch = {"model": ["image model", 0], **links, "count": 1, "devices": "default", "chunk": 0, "vae": ["load", 2]}
    graph["sample"] = ("SanaNodesBatchSampler", {**batch, "steps": 1, **OURS})
    with pytest.raises(NodeError, match=vae):
        host.run(graph)


def test_a_video_latent_has_the_size_of_its_widgets_or_of_its_model(host, build, name, node_texts):
    graph = {key: node for key, node in build(**OURS).items() if key in ("load", "empty")}
    graph["catch"] = ("Catch", {"value": ["empty", 0], "name": "latent"})
    default, cell = ("832 x 480", 8) if name == "480p" else ("1280 x 704", 32)
    height, width = [int(side) // cell for side in reversed(default.split(" x "))]
    near = "; the nearest training size of this model is "
    for sides, cells, text in (
        ((0, 0), (height, width), default),
        ((640, 640), (640 // cell, 640 // cell), f"640 x 640{near}" + ("624 x 624" if name == "480p" else "960 x 960")),
        ((256, 128), (128 // cell, 256 // cell), "256 x 128 is far from this model's training size; use "),
    ):
        graph["empty"][1].update(width=sides[0], height=sides[1])
        assert host.run(graph)["latent"]["samples"].shape[-2:] == cells
        assert node_texts[-1][0] == "empty" and node_texts[-1][1].startswith(text)
    graph["empty"][1].update(width=0)
    with pytest.raises(NodeError, match="^width: got 0 beside 128; set both sides, or both to 0 for the model's size$"):
        host.run(graph)


AREA = {"width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0}


@pytest.mark.parametrize("field, value", [("width", 72), ("height", 40), ("frames", 8), ("frames", -7)])
def test_a_size_that_no_video_has_is_refused(host, build, field, value):
    graph = build(**OURS)
    graph["value"] = ("AnyValue", {"value": value})
    graph["empty"][1][field] = ["value", 0]
    with pytest.raises(NodeError, match=rf"^{field}: got {value}, expected .*"):
        host.run(graph)


def test_what_the_latent_needs_is_said(host, build, image, name):
    graph = build(image, **OURS)
    del graph["empty"][1]["vae"]
    with pytest.raises(NodeError, match="^first_image: got one without a VAE, which encodes it; connect the VAE of"):
        host.run(graph)
    graph["other"] = ("SanaNodesLoader", {"model": "sana-tiny"})
    graph["empty"][1]["vae"] = ["other", 2]
    with pytest.raises(NodeError, match="^vae: got one of 32 channels, expected (16|128); use the VAE of the SANA-V"):
        host.run(graph)
    graph["empty"][1]["model"] = ["other", 0]
    with pytest.raises(NodeError, match="^model: got one of images, expected SANA-Video; use SANA Empty Latent for"):
        host.run(graph)
    wrong = {"width": SIDE, "height": SIDE, "batch_size": 1, "length": 9}
    graph["empty"] = ("EmptyLTXVLatentVideo" if name == "480p" else "EmptyHunyuanLatentVideo", wrong)
    graph["ones"] = ("AnyValue", {"value": {"samples": torch.ones(1, 32, 4, 4)}})
    graph["sample"][1]["latent_image"] = ["ones", 0]
    with pytest.raises(NodeError, match="^latent_image: got a latent of shape .*; use SANA Video Latent"):
        host.run(graph)


def with_config(**fields):
    def change(folder):
        file = folder / "vae" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def with_tensor(name, change_tensor):
    def change(folder):
        file = folder / "vae" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(file)
        tensors[name] = change_tensor(tensors[name])
        save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)

    return change


LAYER = {"480p": "decoder.conv_in.weight", "720p": "decoder.conv_in.conv.weight"}
BROKEN = {
    "a size that asks for terabytes": lambda name: with_config(z_dim=10**9, latent_channels=10**9),
    "another width": lambda name: with_config(base_dim=16, block_out_channels=[64] * 4),
    "no layer": lambda name: with_tensor(LAYER[name], lambda tensor: None),
    "another shape": lambda name: with_tensor(LAYER[name], lambda tensor: tensor[:1].clone()),
    "another rank": lambda name: with_tensor(LAYER[name], lambda tensor: tensor.flatten()),
    "NaN": lambda name: with_tensor(LAYER[name], lambda tensor: tensor * torch.nan),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_vae_is_one_line_that_names_it(host, name, tmp_path, folders, broken):
    folder = shutil.copytree(folders[name], host.models / "diffusers" / "video-broken", symlinks=True)
    try:
        BROKEN[broken](name)(folder)
        with pytest.raises(NodeError) as caught, bounded():
            load = ("SanaNodesLoader", {"model": "video-broken"})
            host.run({"load": load, "catch": ("Catch", {"value": ["load", 2], "name": "vae"})})
    finally:
        shutil.rmtree(folder)
    message = str(caught.value)
    assert message.startswith("vae/diffusion_pytorch_model.safetensors: ") and len(message) < 400, message
    assert "\n" not in message


@pytest.mark.parametrize("change", ["another shape", "another rank", "no layer", "NaN"])
def test_a_broken_vae_without_a_configuration_is_one_line(host, install, name, folders, change):
    tensors = load_file(folders[name] / "vae" / "diffusion_pytorch_model.safetensors")
    layer = tensors.pop(LAYER[name])
    changes = {"another shape": layer[:1].clone(), "another rank": layer.flatten(), "NaN": layer * torch.nan}
    if change in changes:
        tensors[LAYER[name]] = changes[change]
    install("vae", "broken.safetensors", tensors)
    with pytest.raises(NodeError) as caught:
        load = ("SanaNodesVAELoader", {"vae_name": "broken.safetensors"})
        host.run({"load": load, "catch": ("Catch", {"value": ["load", 0], "name": "vae"})})
    message = str(caught.value)
    assert re.match("(vae/)?broken.safetensors: |vae_name: ", message) and len(message) < 400, message
