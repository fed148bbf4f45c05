"""Training on the canvas: the LoRA in the next node and in core's, cancel and going on, and core's trainer on ours."""

import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cuda import pack
from in_process import NodeError
from loading import through
from PIL import Image
from safetensors.torch import load_file
from shapes import combinations, draw_scene, prompt, random_scene

from sana_core.training.plan import plan_training, read_base
from sana_core.training.settings import Phase, TrainingSettings
from sana_core.training.states import find_states

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINED = {"lora": ["train", 0], "strength_model": 1.0, "bypass": False}


@pytest.fixture(scope="module")
def captions(host):
    """The captions of two pictures in "two", a folder in ComfyUI's input folder."""
    root = host.models.parent / "input" / "two"
    root.mkdir(parents=True)
    rng, (combos, _) = random.Random(3), combinations()
    for index in range(2):
        Image.fromarray(draw_scene(random_scene(rng, combos[9 * index]))).save(root / f"{index}.png")
        (root / f"{index}.txt").write_text(prompt(*combos[9 * index]))
    yield [prompt(*combos[9 * index]) for index in range(2)]
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def runs(host):
    """The folder that SANA Train writes into."""
    yield host.output / "sana_training"
    for name in ("sana_training", "loras", "controlnet"):
        shutil.rmtree(host.output / name, ignore_errors=True)


@pytest.fixture
def training_graph(base_graph, train_node, captions, runs):
    """A function of SANA Train's inputs: the base graph with two pictures learnt between loader and sampler."""

    def build(text=captions[0], seed=0, draw=20, **options):
        graph = base_graph(text=text, seed=seed, steps=draw)
        graph["data"] = ("SanaNodesDataset", {"folder": "two", "resolution": 128})
        inputs = {"name": "run", "rank": 4, "steps": 6, "learning_rate": 3e-3, "batch_size": 2}
        train_node(graph, model=["load", 0], dataset=["data", 0], **{**inputs, **options})
        graph["sample"][1]["model"] = ["train", 2]
        graph["catch lora"] = ("Catch", {"value": ["train", 0], "name": "lora"})
        graph["catch loss"] = ("Catch", {"value": ["train", 1], "name": "loss"})
        return graph

    return build


def pixels(image):
    """An IMAGE as the file of a picture has it."""
    return (127.5 * (2 * image[0])).round().numpy().astype(np.uint8)


def picture_of(runs, name, step):
    return np.asarray(Image.open(runs / name / "pictures" / f"step-{step:07d}-00.png"))


def said_by(node_texts, node):
    """The last text under the node."""
    return [text for events, text in node_texts if events == node][-1]


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def state_of(runs, name):
    return load_file(find_states(runs / name)[-1][1] / "state.safetensors")


def test_two_pictures_are_learnt_and_drawn_by_the_next_nodes(host, base_graph, training_graph, captions, runs):
    options = {
        "targets": "both",
        "rank": 16,
        "gradient_clip": 1.0,
        "caption_dropout": 0.0,
        "checkpoint_gradients": False,
    }
    graph = training_graph(
        name="learnt", steps=80, validate_every=80, validation_prompts=f"\n{captions[0]}\n", **options
    )
    graph["save"] = ("SaveLoRA", {"lora": ["train", 0], "prefix": "loras/learnt"})
    graph["plot"] = ("LossGraphNode", {"loss": ["train", 1], "filename_prefix": "loss"})
    outputs = host.run(graph)
    losses = outputs["loss"]["loss"]
    assert len(losses) == 80 and sum(losses[-20:]) < 0.6 * sum(losses[:20])

    # The previews before and after the run equal images from the canvas.
    before, after = (picture_of(runs, "learnt", step).astype(int) for step in (0, 80))
    plain = host.run(base_graph(text=captions[0], seed=0, steps=20))["image"]
    assert (pixels(plain) == before).all() and (pixels(outputs["image"]) == after).all()
    learnt = np.asarray(Image.open(host.models.parent / "input" / "two" / "0.png")).astype(int)
    assert np.abs(after - learnt).mean() < 0.5 * np.abs(before - learnt).mean()

    # The LoRA in the loaders' lists generates the same image, and core saves the same LoRA.
    (saved,) = (host.output / "loras").glob("learnt_*.safetensors")
    assert same_tensors(load_file(saved), load_file(runs / "learnt" / "learnt.safetensors"))
    both = {"lora_name": "learnt.safetensors", "strength_model": 1.0}
    pair = {"clip": ["load", 1], "strength_clip": 1.0}
    loaders = {"LoraLoader": {**both, **pair}, "LoraLoaderModelOnly": both, "SanaNodesLoraLoader": both}
    for loader, inputs in loaders.items():
        graph = through(base_graph(text=captions[0], seed=0, steps=20), loader, **inputs)
        assert torch.equal(host.run(graph)["image"], outputs["image"]), loader


@pytest.mark.parametrize("method", ["dora", pytest.param("lokr", marks=pytest.mark.slow)])
def test_core_puts_each_method_s_lora_on_a_model_as_we_do(host, training_graph, runs, method):
    graph = training_graph(name=method, method=method, alpha=2.0, targets="both", validate_every=0, draw=4)
    graph["core"] = ("LoraModelLoader", {"model": ["load", 0], **TRAINED})
    graph["core sample"] = ("SanaNodesSampler", {**graph["sample"][1], "model": ["core", 0]})
    graph["catch core"] = ("Catch", {"value": ["core sample", 0], "name": "core"})
    outputs = host.run(graph)
    assert torch.equal(outputs["core"]["samples"], outputs["latent"]["samples"])


CANCELS = {"in the report of a step": (3, True, 0), "between two steps": (3, False, 0), "while it draws": (3, False, 3)}


@pytest.mark.parametrize(
    "case", ["in the report of a step", "while it draws", pytest.param("between two steps", marks=pytest.mark.slow)]
)
def test_a_cancelled_run_goes_on_as_if_it_never_was(host, training_graph, runs, watched, case):
    from comfy.model_management import interrupt_current_processing, throw_exception_if_processing_interrupted

    at, raises, every = CANCELS[case]
    options = {"draw": 4, "warmup": 4, "schedule": "cosine", "ema": 0.9, "batch_size": 1, "validate_every": every}
    options["validation_prompts"] = "a red circle on a blue background"
    undivided = host.run(training_graph(name=f"whole {every}", **options))

    def cancel(value, total, preview):
        if (value, total) == (at, 6):
            interrupt_current_processing()
        if raises:
            throw_exception_if_processing_interrupted()

    watched(cancel)
    with pytest.raises(InterruptedError, match="train"):
        host.run(training_graph(name=case, **options))
    assert [step for step, _ in find_states(runs / case)] == [at]
    watched(lambda value, total, preview: None)
    again = host.run(training_graph(name=case, **options))
    assert again["loss"] == undivided["loss"] and len(again["loss"]["loss"]) == 6
    assert same_tensors(again["lora"], undivided["lora"]) and torch.equal(again["image"], undivided["image"])
    assert same_tensors(state_of(runs, case), state_of(runs, f"whole {every}"))


def test_a_trained_lora_is_in_the_lists_and_replaces_no_file_of_the_user(
    host, training_graph, runs, node_texts, install
):
    import folder_paths

    options = {"validate_every": 0, "draw": 1}
    for steps in (1, 2):
        host.run(training_graph(name="listed", steps=steps, **options))
        assert "listed.safetensors" in folder_paths.get_filename_list("loras")
        assert said_by(node_texts, "train").startswith("press R, then choose listed.safetensors; ")
        listed = folder_paths.get_full_path("loras", "listed.safetensors")
        assert Path(listed).read_bytes() == (runs / "listed" / "listed.safetensors").read_bytes()

    mine = torch.zeros(3)
    install("loras", "hidden.safetensors", {"mine": mine})
    (host.output / "loras" / "taken.safetensors").write_text("mine")
    for name in ("hidden", "taken"):
        for steps in (1, 2):
            host.run(training_graph(name=name, steps=steps, **options))
            listed = host.output / "loras" / f"{name}-2.safetensors"
            assert listed.read_bytes() == (runs / name / f"{name}.safetensors").read_bytes()
        assert said_by(node_texts, "train").startswith(
            f"press R, then choose {name}-2.safetensors; {name}.safetensors is another file, which"
        )
        assert not (host.output / "loras" / f"{name}-3.safetensors").exists()
    assert (host.output / "loras" / "taken.safetensors").read_text() == "mine"
    assert torch.equal(load_file(host.models / "loras" / "hidden.safetensors")["mine"], mine)


def test_loaders_list_and_load_after_a_folder_of_results_was_deleted(
    host, base_graph, training_graph, runs, install, tmp_path
):
    host.run(training_graph(name="deleted", steps=1, validate_every=0, draw=1))
    lora = install("loras", "stays.safetensors", load_file(runs / "deleted" / "deleted.safetensors"))
    (host.output / "controlnet").mkdir(exist_ok=True)
    shutil.copytree(host.output, tmp_path / "output")
    inputs = {"lora_name": lora, "strength_model": 1.0, "clip": ["load", 1], "strength_clip": 1.0}
    graph = through(base_graph(steps=1), "LoraLoader", **inputs)
    replacements = {"nothing": Path.exists, "a file": Path.touch, "a link": lambda path: path.symlink_to("nowhere")}

    def lists():
        return {name: str(node.INPUT_TYPES()) for name, node in host.nodes.NODE_CLASS_MAPPINGS.items()}

    for name in ("loras", "controlnet", "sana_training", ""):
        for replacement, put_there in replacements.items():
            assert "deleted.safetensors" in lists()["LoraLoader"]
            # As a user empties the output folder.
            folder = host.output / name
            shutil.rmtree(folder)
            put_there(folder)
            assert ("deleted.safetensors" in lists()["LoraLoader"]) == (name not in ("loras", "")), replacement
            host.run(graph)
            folder.unlink(missing_ok=True)
            shutil.copytree(tmp_path / "output" / name, folder)


def test_a_list_that_cannot_be_written_is_completed_by_the_next_run(host, training_graph, runs):
    shutil.rmtree(host.output / "loras", ignore_errors=True)
    (host.output / "loras").write_text("in the way")
    graph = training_graph(name="blocked", steps=1, validate_every=0, draw=1)
    try:
        with pytest.raises(
            NodeError, match="^name: loras cannot be made .*; see its rights .* the result is sana_training"
        ):
            host.run(graph)
    finally:
        (host.output / "loras").unlink()
    log = (runs / "blocked" / "log.jsonl").read_text()
    host.run(graph)
    assert (host.output / "loras" / "blocked.safetensors").exists()
    assert (runs / "blocked" / "log.jsonl").read_text() == log


def test_a_run_begins_with_an_existing_lora(host, training_graph, runs, install):
    options = {"validate_every": 0, "draw": 1, "steps": 2}
    lora = host.run(training_graph(name="before", **options))["lora"]
    again = {"existing_lora": install("loras", "before.safetensors", lora), "learning_rate": 0.0, **options}
    assert same_tensors(host.run(training_graph(name="after", **again))["lora"], lora)
    with pytest.raises(
        NodeError, match="^existing_lora: loras/before.safetensors: .*got rank 4, but rank is 8; set rank to 4"
    ):
        host.run(training_graph(name="wider", **{**again, "rank": 8}))
    with pytest.raises(NodeError, match="^existing_lora: no file 'none.safetensors' in models/loras"):
        host.run(training_graph(name="none", **{**again, "existing_lora": "none.safetensors"}))


def test_regularisation_images_are_learnt_as_often_as_the_others(host, training_graph, runs):
    shutil.copytree(host.models.parent / "input" / "two", host.models.parent / "input" / "others")
    options, losses = {"validate_every": 0, "draw": 1, "steps": 4, "batch_size": 1}, {}
    try:
        for weight in (0.0, 1.0):
            graph = training_graph(name=f"beside {weight:.0f}", prior_loss_weight=weight, **options)
            graph["others"] = ("SanaNodesDataset", {"folder": "others", "resolution": 128})
            graph["settings"][1]["regularisation"] = ["others", 0]
            losses[weight] = host.run(graph)["loss"]["loss"]
            graph["others"][1]["resolution"] = 64
            with pytest.raises(NodeError, match="^regularisation: got resolution 64, expected dataset's 128"):
                host.run(graph)
    finally:
        shutil.rmtree(host.models.parent / "input" / "others")
    # two of an epoch's four
    assert [loss == 0.0 for loss in losses[0.0]].count(True) == 2 and all(losses[1.0])


def test_a_controlnet_is_trained_and_steers_the_next_nodes(host, base_graph, train_node, controlled, runs, node_texts):
    inputs = {"name": "edges", "blocks": 3, "steps": 6, "learning_rate": 3e-3, "batch_size": 2, "gradient_clip": 0.0}
    graph = base_graph(steps=2)
    graph["load"][1]["model"] = "sana-posters (bundled)"
    graph["data"] = ("SanaNodesDataset", {"folder": controlled, "resolution": 128})
    train_node(graph, "SanaNodesTrainControlNet", model=["load", 0], dataset=["data", 0], **inputs)
    graph["hint"] = ("AnyValue", {"value": torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(3))})
    texts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    steps = {"control_net": ["train", 0], "image": ["hint", 0], "vae": ["load", 2], "strength": 1.0}
    graph["apply"] = ("ControlNetApplyAdvanced", {**texts, **steps, "start_percent": 0.0, "end_percent": 1.0})
    graph["steered"] = ("SanaNodesSampler", {**graph["sample"][1], "positive": ["apply", 0], "negative": ["apply", 1]})
    graph["catch steered"] = ("Catch", {"value": ["steered", 0], "name": "steered"})
    graph["catch loss"] = ("Catch", {"value": ["train", 1], "name": "loss"})
    graph["catch control"] = ("Catch", {"value": ["train", 0], "name": "control"})
    outputs = host.run(graph)
    assert len(outputs["loss"]["loss"]) == 6
    assert (outputs["steered"]["samples"] - outputs["latent"]["samples"]).abs().mean() > 1e-3
    folder = find_states(runs / "edges")[-1][1] / "controlnet"
    listed = "edges/diffusion_pytorch_model.safetensors"
    assert said_by(node_texts, "train").startswith(f"press R, then choose {listed}; 6 steps")
    loaded = host.output_of("SanaNodesControlNetLoader", control_net_name=listed).control_model.state_dict()
    assert same_tensors(loaded, outputs["control"].control_model.state_dict())
    saved, held = (
        load_file(folder / "diffusion_pytorch_model.safetensors"),
        outputs["control"].control_model.state_dict(),
    )
    assert saved.keys() == held.keys() and all(torch.equal(saved[name], held[name].cpu()) for name in saved)

    graph["train"][1]["steps"] = 7
    control = host.run(graph)["control"].control_model.state_dict()
    assert [item.name for item in (host.output / "controlnet").glob("edges*")] == ["edges"]
    assert same_tensors(load_file(host.output / "controlnet" / listed), {n: item.cpu() for n, item in control.items()})

    graph["data"][1]["folder"] = "cyanotypes (bundled)"
    graph["train"][1]["name"] = "none"
    with pytest.raises(NodeError, match="has no control image, expected .*-control.png beside it"):
        host.run(graph)
    for blocks, pattern in ((0, "^blocks: got 0, expected a whole number"), (14, "^blocks: got 14 for a model of 14")):
        graph["number"] = ("AnyValue", {"value": blocks})
        graph["train"][1]["blocks"] = ["number", 0]
        with pytest.raises(NodeError, match=pattern):
            host.run(graph)


def test_before_it_begins_it_says_what_fits(host, checkpoint):
    training = pack("nodes.host.training.run")
    settings = TrainingSettings(str(checkpoint), "out", (Phase(("two",), 128, batch=64),), checkpoint_gradients=False)
    base = read_base(settings)
    plan = plan_training(settings, base)
    assert re.fullmatch(r"needs 1\.\d of 24\.0 GB", training.describe_fit(settings, base, plan, 24 * 10**9))
    short = training.describe_fit(settings, base, plan, plan.gpu_bytes - 1)
    assert "does not fit a GPU of" in short and "fits with checkpoint_gradients = true" in short
    proposal = 'batch = 16 and accumulate = 4 in phase 1; base = "int8" in [method]'
    assert training.proposal_with_widgets(proposal) == 'batch_size = 16 and accumulate = 4; base = "int8"'


def test_prodigy_has_its_first_estimate_and_its_factor_from_the_node(host, training_graph, runs):
    pytest.importorskip("pytorch_optimizer")
    options, learnt = {"optimizer": "prodigy", "learning_rate": 1.0, "gradient_clip": 1.0, "steps": 4, "draw": 1}, {}
    for name, values in {"as set": {}, "farther": {"d0": 1e-3}, "faster": {"d_coef": 100.0}}.items():
        lora = host.run(training_graph(name=name, **options, **values))["lora"]
        learnt[name] = sum(float(lora[key].abs().sum()) for key in lora if "lora_B" in key)
    assert 2 * learnt["as set"] < min(learnt["farther"], learnt["faster"]), learnt


def test_the_node_shows_step_and_pictures(host, training_graph, watched, node_texts):
    seen = []
    watched(lambda value, total, preview: seen.append((value, total, preview)))
    host.run(training_graph(name="shown", validation_prompts="a\u2028cat\r\nb", validate_every=2, draw=2))
    assert [value for value, total, _ in seen if total == 6][-1] == 6
    previews = {value: preview for value, total, preview in seen if total == 6 and preview is not None}
    # Each validation has a preview at once, even directly after the last curve.
    assert {2, 4, 6} <= previews.keys()
    kind, image, largest = previews[6]
    # two pictures side by side above the curve
    assert kind == "JPEG" and image.size == (512, 256 + 128) and largest is None
    assert len(image.crop((0, 256, 512, 384)).getcolors(10_000)) > 2
    events = [text for node, text in node_texts if node == "train"]
    assert any(text.startswith("encoding images and captions: ") for text in events)
    assert any(text.startswith("step 6 of 6, loss 0.") for text in events)
    assert events[-1] == "press R, then choose shown.safetensors; 6 steps"


def test_a_model_of_single_files_learns_the_same_with_their_clip_and_vae(host, training_graph, single_files, runs):
    options = {"validate_every": 0, "draw": 2}
    uninterrupted = host.run(training_graph(name="whole", **options))
    graph = {**training_graph(name="parts", clip=["clip", 0], vae=["vae", 0], **options), **single_files}
    graph["train"][1]["model"] = ["model", 0]
    # a text encoder alone reads prompts as NVIDIA's code does
    for loader in ("model", "clip"):
        graph[loader] = (graph[loader][0], {**graph[loader][1], "reference": "diffusers"})
    parts = host.run(graph)
    assert same_tensors(parts["lora"], uninterrupted["lora"]) and parts["loss"] == uninterrupted["loss"]


CORE = {
    "batch_size": 2,
    "grad_accumulation_steps": 1,
    "steps": 12,
    "rank": 4,
    "optimizer": "AdamW",
    "loss_function": "MSE",
    "seed": 0,
    "training_dtype": "fp32",
    "lora_dtype": "fp32",
    "quantized_backward": False,
    "gradient_checkpointing": True,
    "checkpoint_depth": 1,
    "offloading": False,
    "existing_lora": "[None]",
    "bucket_mode": False,
    "bypass_mode": False,
}


# Core enters autocast for fp32 too. The CPU warns and computes without it.
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("algorithm", ["LoRA", pytest.param("LoKr", marks=pytest.mark.slow)])
def test_core_s_trainer_trains_our_model(host, base_graph, captions, algorithm):
    losses, images = {}, {}
    for rate in (1e-7, 3e-3):
        graph = base_graph(steps=4, text=captions[0])
        graph["pictures"] = ("LoadImageTextDataSetFromFolder", {"folder": "two"})
        links = {"images": ["pictures", 0], "texts": ["pictures", 1], "clip": ["load", 1], "vae": ["load", 2]}
        graph["data"] = ("MakeTrainingDataset", links)
        inputs = {"model": ["load", 0], "latents": ["data", 0], "positive": ["data", 1], "learning_rate": rate}
        graph["train"] = ("TrainLoraNode", {**CORE, **inputs, "algorithm": algorithm})
        graph = through(graph, "LoraModelLoader", **TRAINED)
        graph["catch loss"] = ("Catch", {"value": ["train", 1], "name": "loss"})
        outputs = host.run(graph)
        losses[rate], images[rate] = outputs["loss"]["loss"], outputs["image"]
    assert sum(losses[3e-3][6:]) < 0.9 * sum(losses[1e-7][6:])
    assert (images[3e-3] - images[1e-7]).abs().mean() > 1e-3


def test_a_run_frees_the_planned_memory_and_a_reserve_for_fragments(host, training_graph, monkeypatch):
    """Other models stay in memory if there is room for them."""
    import comfy.model_management as management

    training = pack("nodes.host.training.run")
    plans, asked = [], []
    plan_memory, free_memory = training.plan_training, management.free_memory

    def record_plan(*arguments, **options):
        plans.append(plan_memory(*arguments, **options))
        return plans[-1]

    def record_request(memory_required, device, *arguments, **options):
        asked.append(memory_required)
        return free_memory(memory_required, device, *arguments, **options)

    monkeypatch.setattr(training, "plan_training", record_plan)
    monkeypatch.setattr(management, "free_memory", record_request)
    host.run(training_graph(name="asked", steps=1))
    largest = max(stage.bytes for stage in plans[0].stages)
    assert 1.05 * largest <= asked[0] - management.minimum_inference_memory() <= 1.2 * largest
