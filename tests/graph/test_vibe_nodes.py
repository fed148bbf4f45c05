"""VIBE on the canvas: the command line's images, by SANA Sampler, KSampler and core's own nodes for edits."""

import shutil

import pytest
import torch
import vibe_models
from host_cards import host_cards
from in_process import NodeError
from safetensors.torch import load_file, save_file

import sana_core
from sana_core.batch.pipeline import SamplingSettings

pytestmark = pytest.mark.usefixtures("one_load")

TEXT, STEPS, NAME = "make it winter", 4, "VIBE-Image-Edit"
BOUND = 1e-4


@pytest.fixture(scope="module")
def folder(host):
    folder = host.models / "diffusers" / NAME
    vibe_models.save_vibe(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def image():
    rows = torch.randint(256, (1, 3, 7, 9), generator=torch.Generator().manual_seed(5)) / 255
    return (torch.nn.functional.interpolate(rows, (416, 608), mode="bilinear") * 255).round()[0].byte()


@pytest.fixture
def build(folder, image):
    """A function of overrides: the graph from the folder and an image to the edit."""

    def graph(node="SanaNodesSampler", image_guidance=1.2, model=("load", 0), **inputs):
        links = {"clip": ["load", 1], "vae": ["load", 2], "image": ["image", 0]}
        conds = {"model": list(model), "positive": ["edit", 0], "negative": ["edit", 1], "latent_image": ["edit", 2]}
        sampling = {"seed": 3, "steps": STEPS, "guidance": 4.5, "sampler": "flow_dpmpp_2m"}
        return {
            "load": ("SanaNodesLoader", {"model": NAME}),
            "image": ("AnyValue", {"value": image.movedim(0, -1)[None] / 255}),
            "edit": ("SanaNodesEdit", {**links, "text": TEXT, "image_guidance": image_guidance}),
            "sample": (node, {**conds, **sampling, **inputs}),
            "decode": ("VAEDecode", {"samples": ["sample", 0], "vae": ["load", 2]}),
            "catch image": ("Catch", {"value": ["decode", 0], "name": "image"}),
            "catch latent": ("Catch", {"value": ["sample", 0], "name": "latent"}),
        }

    return graph


def by_command(folder, image, image_guidance=1.2, **changes):
    settings = SamplingSettings(steps=STEPS, **changes)
    return sana_core.edit_images(TEXT, folder, image, 3, settings=settings, image_guidance=image_guidance)


def shown(caught):
    return caught["image"].movedim(-1, 1) * 2 - 1


def test_guidance_nodes_round_as_the_command_line(host, build, folder, image):
    """A process that shares a batch computes as the command line does, so all images have the same bits."""
    guidance = {"pag_scale": 2.0, "pag_blocks": "1", "guidance_interval": (0.2, 0.9)}
    difference = shown(host.run(with_guidance_nodes(build()))) - by_command(folder, image, guidance=4.5, **guidance)
    # The image in [0, 1] and back rounds once.
    assert difference.abs().max() <= 2e-7


@pytest.mark.parametrize(("guidance", "image_guidance"), [(4.5, 1.2), (4.5, 0.5), (1.0, 1.2)])
def test_the_canvas_edits_as_the_command_line(host, build, folder, image, node_texts, guidance, image_guidance):
    caught = host.run(build(guidance=guidance, image_guidance=image_guidance))
    expected = by_command(folder, image, image_guidance, guidance=guidance)
    assert (shown(caught) - expected).abs().max() <= BOUND
    # VIBE was trained for three sizes, so no line names another one.
    assert not [text for where, text in node_texts if where == "sample"]


def with_guidance_nodes(graph):
    """The graph with PAG and an interval on its MODEL."""
    graph["pag"] = ("SanaNodesPAG", {"model": ["load", 0], "scale": 2.0, "blocks": "1"})
    graph["limit"] = ("SanaNodesGuidanceInterval", {"model": ["pag", 0], "start": 0.2, "end": 0.9})
    graph["sample"][1]["model"] = ["limit", 0]
    return graph


@pytest.mark.parametrize("change", [lambda graph: graph, with_guidance_nodes])
def test_core_nodes_make_the_same_edit(host, build, image, change):
    ours = host.run(change(build()))["latent"]["samples"]
    graph = change(build())
    graph |= {
        "positive": ("CLIPTextEncode", {"clip": ["load", 1], "text": TEXT}),
        "pixels": ("VAEEncode", {"pixels": ["image", 0], "vae": ["load", 2]}),
        "empty": ("CLIPTextEncode", {"clip": ["load", 1], "text": ""}),
        "middle": ("ReferenceLatent", {"conditioning": ["empty", 0], "latent": ["pixels", 0]}),
        "noise": ("RandomNoise", {"noise_seed": 3}),
        "guider": (
            "DualCFGGuider",
            {
                "model": graph["sample"][1]["model"],
                "cond1": ["edit", 0],
                "cond2": ["middle", 0],
                "negative": ["empty", 0],
                "cfg_conds": 4.5,
                "cfg_cond2_negative": 1.2,
                "style": "regular",
            },
        ),
        "select": ("SanaNodesSamplerSelect", {"sampler": "flow_dpmpp_2m"}),
        "sigmas": (
            "SanaNodesScheduler",
            {"model": ["load", 0], "sampler": "flow_dpmpp_2m", "steps": STEPS, "denoise": 1.0},
        ),
        "sample": (
            "SamplerCustomAdvanced",
            {
                "noise": ["noise", 0],
                "guider": ["guider", 0],
                "sampler": ["select", 0],
                "sigmas": ["sigmas", 0],
                "latent_image": ["edit", 2],
            },
        ),
    }
    theirs = host.run(graph)["latent"]["samples"]
    assert (ours - theirs).abs().max() <= 5e-5


SKIPPED = {"double_layers": "1", "single_layers": "1", "start_percent": 0.0, "end_percent": 1.0}


@pytest.mark.parametrize(
    ("node", "inputs"),
    [
        ("PerturbedAttentionGuidance", {"scale": 3.0}),
        ("SkipLayerGuidanceDiT", {**SKIPPED, "scale": 3.0, "rescaling_scale": 0.0}),
        # The empty prompt is the negative one, so that nothing of it is perpendicular.
        ("PerpNeg", {"empty_conditioning": ["edit", 1], "neg_scale": 1.0}),
    ],
)
def test_guidance_of_core_without_effect_changes_no_edit(host, build, node, inputs):
    graph = build(model=("guidance", 0))
    graph["guidance"] = (node, {"model": ["load", 0], **inputs})
    expected = host.run(build())["latent"]["samples"]
    assert (host.run(graph)["latent"]["samples"] - expected).abs().max() <= 5e-5


def test_guidance_of_core_that_separates_the_passes_is_refused(host, build):
    graph = build(model=("guidance", 0))
    # In the first steps it would change nothing yet.
    skipped = {**SKIPPED, "start_percent": 0.7}
    graph["guidance"] = ("SkipLayerGuidanceDiTSimple", {"model": ["load", 0], **skipped})
    with pytest.raises(NodeError, match="model: got SkipLayerGuidanceDiTSimple, which needs layers"):
        host.run(graph)


@pytest.mark.parametrize("state", ["LOW_VRAM", "NO_VRAM"])
def test_an_edit_is_the_same_with_little_memory(host, build, short_memory, state):
    expected = host.run(build())["latent"]["samples"]
    short_memory(state)
    assert (host.run(build())["latent"]["samples"] - expected).abs().max() <= BOUND


def test_a_bare_transformer_makes_the_same_edit(host, build, folder):
    file = host.models / "diffusion_models" / "vibe.safetensors"
    file.parent.mkdir(exist_ok=True)
    shutil.copy(folder / "transformer" / "diffusion_pytorch_model.safetensors", file)
    shutil.copy(folder / "transformer" / "config.json", file.with_name("config.json"))
    try:
        graph = build(model=("bare", 0))
        graph["bare"] = ("SanaNodesModelLoader", {"model_name": file.name})
        latents = host.run(graph)["latent"]["samples"]
    finally:
        file.unlink()
        file.with_name("config.json").unlink()
    assert torch.equal(latents, host.run(build())["latent"]["samples"])


def test_a_saved_model_makes_the_same_edit(host, build):
    # ComfyUI writes the graph into the file, and no tensor.
    white = ("EmptyImage", {"width": 608, "height": 416, "batch_size": 1, "color": 0xFFFFFF})
    graph = {**build(), "image": white}
    graph["save"] = ("ModelSave", {"model": ["load", 0], "filename_prefix": "vibe"})
    expected = host.run(graph)["latent"]["samples"]
    (file,) = host.output.glob("vibe*.safetensors")
    target = host.models / "diffusion_models" / "saved-vibe.safetensors"
    target.parent.mkdir(exist_ok=True)
    shutil.move(file, target)
    try:
        graph = {**build(model=("saved", 0)), "image": white}
        graph["saved"] = ("SanaNodesModelLoader", {"model_name": target.name})
        assert torch.equal(host.run(graph)["latent"]["samples"], expected)
    finally:
        target.unlink()


def test_a_quantised_model_edits_nearly_the_same(host, build):
    expected = host.run(build())["latent"]["samples"]
    graph = build()
    graph["load"][1]["quantise"] = "int8"
    latents = host.run(graph)["latent"]["samples"]
    assert 0 < (latents - expected).abs().mean() < 0.1 * expected.abs().mean()


LORA = {"transformer_blocks.0.attn2.to_q": (64, 64), "transformer_blocks.1.ff.conv_inverted": (320, 64, 1, 1)}


@pytest.fixture
def lora(install, folder, tmp_path):
    """The name of a LoRA's file, and a copy of the model into whose file the LoRA is merged with strength 0.8."""
    merged, tensors = shutil.copytree(folder, tmp_path / NAME), {}
    file = merged / "transformer" / "diffusion_pytorch_model.safetensors"
    weights, generator = load_file(file), torch.Generator().manual_seed(1)
    for layer, (rows, columns, *kernel) in LORA.items():
        down = 0.3 * torch.randn(4, columns, *kernel, generator=generator)
        up = 0.3 * torch.randn(rows, 4, *kernel, generator=generator)
        tensors |= {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}
        weights[f"{layer}.weight"] += 0.8 * (up.flatten(1) @ down.flatten(1)).reshape(LORA[layer])
    save_file(weights, file)
    return install("loras", "edit.safetensors", tensors), merged


@pytest.mark.parametrize("loader", ["SanaNodesLoraLoader", "LoraLoaderModelOnly"])
def test_an_edit_with_a_lora_is_the_edit_with_merged_weights(host, build, folder, image, lora, loader):
    name, merged = lora
    graph = build(model=("lora", 0))
    graph["lora"] = (loader, {"model": ["load", 0], "lora_name": name, "strength_model": 0.8})
    expected = by_command(merged, image)
    assert (shown(host.run(graph)) - expected).abs().max() <= BOUND
    by_option = by_command(folder, image, loras=((host.models / "loras" / name, 0.8),))
    assert (by_option - expected).abs().max() <= BOUND
    assert (by_command(folder, image) - expected).abs().max() > 0.1


def test_a_cancelled_edit_leaves_the_next_one_as_it_is(host, build, watched):
    import comfy.model_management

    expected = host.run(build())["latent"]["samples"]
    watched(lambda value, *_: comfy.model_management.interrupt_current_processing(value == 2))
    with pytest.raises(InterruptedError, match="sample"):
        host.run(build())
    watched(lambda *_: None)
    assert torch.equal(host.run(build(), keep_cache=True)["latent"]["samples"], expected)


def batched(graph, devices):
    links = {"model": ["load", 0], "positive": ["edit", 0], "negative": ["edit", 1], "latent_image": ["edit", 2]}
    sampling = {"seed": 2, "steps": STEPS, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "count": 2, "chunk": 0}
    graph["batch"] = ("SanaNodesBatchSampler", {**links, **sampling, "devices": devices})
    graph["catch batch"] = ("Catch", {"value": ["batch", 0], "name": "batch"})
    return graph


@pytest.mark.parametrize("devices", ["default", "cpu x 2"])
@pytest.mark.parametrize("change", [lambda graph: graph, with_guidance_nodes])
def test_a_batch_makes_the_same_edits(host, build, node_texts, devices, change):
    graph = batched(change(build()), devices)
    graph["batch"][1]["model"] = graph["sample"][1]["model"]
    caught = host.run(graph)
    assert torch.equal(caught["batch"]["samples"][1], caught["latent"]["samples"][0])
    assert not [text for where, text in node_texts if where == "batch" and "only cpu generates" in text]


def test_a_batch_with_two_different_images_is_edited_by_one_device(host, build, node_texts):
    graph = batched(build(), "cpu x 2")
    graph["grey"] = ("EmptyImage", {"width": 608, "height": 416, "batch_size": 1, "color": 0x808080})
    graph["other"] = ("SanaNodesEdit", {**graph["edit"][1], "image": ["grey", 0]})
    for node in ("batch", "sample"):
        graph[node][1]["negative"] = ["other", 1]
    caught = host.run(graph)
    assert torch.equal(caught["batch"]["samples"][1], caught["latent"]["samples"][0])
    assert any("negative: got another image than positive" in text for where, text in node_texts if where == "batch")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("state", ["NORMAL_VRAM", pytest.param("NO_VRAM", marks=pytest.mark.slow)])
@pytest.mark.parametrize("node", ["SanaNodesSampler", "SanaNodesBatchSampler", "SanaNodesSplitPicture"])
def test_edits_on_gpus_are_the_cpus(host, build, state, node):
    expected = host.run(build())
    graph = build(model=("split" if node == "SanaNodesSplitPicture" else "load", 0))
    graph["split"] = ("SanaNodesSplitPicture", {"model": ["load", 0], "devices": "all"})
    if node == "SanaNodesBatchSampler":
        graph = batched(graph, "all")
    with host_cards(host, 2, state):
        got = host.run(graph)
    assert (got["image"] - expected["image"]).abs().max() <= BOUND
    if "batch" in got:
        assert (got["batch"]["samples"][1] - expected["latent"]["samples"][0]).abs().max() <= BOUND


def test_a_cluster_is_refused(host, build, operators_file):
    with pytest.raises(NodeError, match="^model: got VIBE, which a cluster does not run"):
        host.run(batched(build(), "cluster"))


def test_a_split_edit_is_the_whole_edit(host, build):
    graph = build(model=("split", 0))
    graph["split"] = ("SanaNodesSplitPicture", {"model": ["load", 0], "devices": "cpu x 2"})
    expected = host.run(build())["latent"]["samples"]
    assert (host.run(graph)["latent"]["samples"] - expected).abs().max() <= BOUND


def test_guidance_nodes_work_on_edits(host, build, folder, image):
    caught = host.run(with_guidance_nodes(build()))
    changes = {"pag_scale": 2.0, "pag_blocks": "1", "guidance_interval": (0.2, 0.9)}
    assert (shown(caught) - by_command(folder, image, **changes)).abs().max() <= BOUND


def test_without_an_image_core_nodes_generate(host, build, folder):
    graph = build()
    graph["positive"] = ("CLIPTextEncode", {"clip": ["load", 1], "text": TEXT})
    graph["empty"] = ("CLIPTextEncode", {"clip": ["load", 1], "text": ""})
    graph["latent"] = ("SanaNodesEmptyLatent", {"width": 128, "height": 96, "batch_size": 1})
    links = {"positive": ["positive", 0], "negative": ["empty", 0], "latent_image": ["latent", 0]}
    graph["sample"] = ("SanaNodesSampler", {**graph["sample"][1], **links})
    expected = by_command(folder, None, width=128, height=96)
    assert (shown(host.run(graph)) - expected).abs().max() <= BOUND


def test_the_plan_of_an_edit_has_its_text_encoder_its_passes_and_the_encode(host):
    plan = sana_core.plan_memory("vibe-1.6B", 2048, 2048)
    inputs = {"width": 2048, "height": 2048, "batch_size": 1, "gpu": "8 GB"}
    text = host.output_of("SanaNodesPlan", 1, variant="vibe-1.6B", **inputs)
    assert text.startswith("A GPU of 8 GB: vibe-1.6B at 2048 px in bf16 fits.")
    two = sana_core.plan_memory("vibe-1.6B", 2048, 2048, image_guidance=1.0)["transformer"]
    assert two["activations"] < 0.75 * plan["transformer"]["activations"]
    for words, stage in (
        ("text encoder", plan["text"]),
        ("sampling step of vibe-1.6B, 1 prompt", plan["transformer"]),
        ("the same with image_guidance of 1 and below", two),
        ("encode, strips", plan["encode"]),
    ):
        assert f"{words}: {stage['weights'] / 1e9:.2f} + {stage['activations'] / 1e9:.2f} GB" in text


def test_wrong_inputs_are_one_line(host, build):
    graph = build()
    graph["load other"] = ("SanaNodesLoader", {"model": "sana-tiny"})
    graph["edit"][1]["clip"] = ["load other", 1]
    with pytest.raises(NodeError, match="clip: got SanaTextModel, expected VIBE's Qwen3-VL"):
        host.run(graph)
    graph = build()
    graph["encode"] = ("SanaNodesTextEncode", {"clip": ["load", 1], "text": TEXT, "instruction": True})
    graph["sample"][1]["positive"] = ["encode", 0]
    with pytest.raises(NodeError, match="clip: got EditTextModel, .* for VIBE use SANA Edit or CLIP Text Encode"):
        host.run(graph)
    graph = build()
    graph["latent"] = ("SanaNodesEmptyLatent", {"width": 128, "height": 96, "batch_size": 1})
    graph["sample"][1]["latent_image"] = ["latent", 0]
    with pytest.raises(NodeError, match="got images with latents of .* expected one like"):
        host.run(graph)


@pytest.mark.parametrize("node", ["CLIPSave", "CheckpointSave"])
def test_saving_a_clip_that_no_loader_reads_is_refused(host, node):
    links = {"clip": ["load", 1]} | ({"model": ["load", 0], "vae": ["load", 2]} if node == "CheckpointSave" else {})
    graph = {"load": ("SanaNodesLoader", {"model": NAME}), "save": (node, {**links, "filename_prefix": "no-reader"})}
    with pytest.raises(NodeError, match="clip: got VIBE's CLIP, expected SANA's Gemma 2 to save"):
        host.run(graph)
    assert not list(host.output.glob("no-reader*"))


def test_embeddings_of_another_clip_are_refused(host, build, folder):
    """The real widths of both text encoders are the same."""
    wide = host.models / "diffusers" / "wide"
    shutil.copytree(folder, wide)
    shutil.rmtree(wide / "transformer")
    model, head = vibe_models.transformer(caption_channels=64), vibe_models.head(output=64)
    vibe_models.save_transformer(wide / "transformer", model, head)
    try:
        graph = build()
        graph["load"][1]["model"] = "wide"
        graph["load other"] = ("SanaNodesLoader", {"model": "sana-tiny"})
        graph["other"] = ("SanaNodesTextEncode", {"clip": ["load other", 1], "text": TEXT, "instruction": True})
        for field, value in (("positive", ["other", 0]), ("model", ["load other", 0])):
            conds = {**graph["sample"][1], field: value}
            with pytest.raises(NodeError, match="positive: got embeddings of another model's CLIP"):
                host.run({**graph, "sample": (graph["sample"][0], conds)})
    finally:
        shutil.rmtree(wide)


def test_images_that_do_not_fit_are_one_line(host, build, image):
    graph = build()
    photo = image.movedim(0, -1)[None] / 255
    for pixels in (photo[..., :1], photo[:0], photo[0]):
        graph["image"] = ("AnyValue", {"value": pixels})
        with pytest.raises(NodeError, match=r"image: got \[.*expected \[1, height, width, 3 or 4\]"):
            host.run(graph)

    graph = build()
    graph["two"] = ("AnyValue", {"value": photo.repeat(2, 1, 1, 1)})
    graph["pixels"] = ("VAEEncode", {"pixels": ["two", 0], "vae": ["load", 2]})
    graph["empty"] = ("CLIPTextEncode", {"clip": ["load", 1], "text": ""})
    graph["both"] = ("ReferenceLatent", {"conditioning": ["empty", 0], "latent": ["pixels", 0]})
    graph["sample"][1]["negative"] = ["both", 0]
    with pytest.raises(NodeError, match=r"negative: got images with latents of \[2, .* expected one like \[1, "):
        host.run(graph)


def test_an_image_with_a_grey_mask_is_refused(host, build):
    graph = build()
    graph["mask"] = ("SolidMask", {"value": 1.0, "width": 608, "height": 416})
    links = {"positive": ["edit", 0], "negative": ["edit", 1], "vae": ["load", 2], "pixels": ["image", 0]}
    graph["grey"] = ("InpaintModelConditioning", {**links, "mask": ["mask", 0], "noise_mask": True})
    graph["sample"][1].update(positive=["grey", 0], negative=["grey", 1], latent_image=["grey", 2])
    with pytest.raises(NodeError, match="masked part is grey"):
        host.run(graph)
