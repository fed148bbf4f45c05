"""What cannot be trained is refused by name, before anything is unloaded or written; and what SANA Dataset shows."""

import re
import shutil

import numpy as np
import pytest
import torch
from in_process import NodeError
from PIL import Image

NAMES = (
    "..",
    ".",
    "",
    "a/b",
    "a\\b",
    "/tmp/a",
    "../../a",
    ".hidden",
    "a.",
    "a\0b",
    "x" * 51,
    " a",
    "a ",
    "  ",
    "a\n",
    7,
)


@pytest.fixture
def pictures(host):
    """A function that puts pictures and captions {name: (width, height) or bytes, or text} into input/NAME."""
    root = host.models.parent / "input"
    created = []

    def put(name, files):
        (root / name).mkdir(parents=True)
        created.append(root / name)
        for file, content in files.items():
            if isinstance(content, tuple):
                rows = np.linspace(0, 255, content[0] * content[1] * 3).astype(np.uint8)
                Image.fromarray(rows.reshape(content[1], content[0], 3)).save(root / name / file)
            elif isinstance(content, str):
                (root / name / file).write_text(content, encoding="utf-8")
            else:
                (root / name / file).write_bytes(content)
        return name

    yield put
    for folder in created:
        shutil.rmtree(folder)


PAIR = {"a.png": (128, 128), "a.txt": "a grey picture"}


@pytest.fixture
def refused(host, train_node, pictures):
    """A function of SANA Train's and its settings' inputs and a pattern: the graph fails so, and leaves nothing."""

    def run(pattern, before=None, load=None, **options):
        graph = {"load": ("SanaNodesLoader", {"model": "sana-tiny", **(load or {})}), **(before or {})}
        graph["data"] = ("SanaNodesDataset", {"folder": pictures("bad", PAIR), "resolution": 128})
        inputs = {"name": "refused", "rank": 4, "steps": 2, "learning_rate": 1e-3, "batch_size": 1}
        links = {"model": [list(graph)[-2], 0], "dataset": ["data", 0]}
        graph |= {f"{field} value": ("AnyValue", {"value": value}) for field, value in options.items()}
        train_node(graph, **{**links, **inputs, **{field: [f"{field} value", 0] for field in options}})
        with pytest.raises(NodeError) as caught:
            # The model stays loaded between the cases.
            host.run(graph, keep_cache=True)
        message = str(caught.value)
        assert re.search(pattern, message), message
        assert "\n" not in message and len(message) < 300
        assert not (host.output / "sana_training").exists()

    return run


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_no_name_of_a_folder(refused, host, name):
    refused(
        "^name: got .*, expected a folder's name of at most 50 characters; use letters, digits, - and _$", name=name
    )
    assert not (host.models.parent / "a").exists()


def test_names_that_windows_reserves(refused):
    refused("^name: got 'com1', which Windows reserves for a device; choose another$", name="com1")


NUMBERS = [
    ("rank", 0, "^rank: got 0, expected a whole number from 1 to 1024$"),
    ("rank", 2.5, "^rank: got 2.5, expected a whole number"),
    ("steps", 0, "^steps: got 0, expected a whole number"),
    ("batch_size", 0, "^batch_size: got 0, expected a whole number"),
    ("learning_rate", float("nan"), "^learning_rate: got nan, expected a number from 0 to 10$"),
    ("method", "full", "^method: got 'full', expected one of lora, dora, lokr"),
    ("optimizer", "adam", "^optimizer: got 'adam', expected one of .*; the nearest is adamw$"),
]


@pytest.mark.parametrize("field, value, pattern", NUMBERS)
def test_numbers_and_choices_through_links(refused, field, value, pattern):
    refused(pattern, **{field: value})


TRAINING = ("SanaNodesDataset", "SanaNodesTrainSettings", "SanaNodesTrain", "SanaNodesTrainControlNet")


def wrong_values(widget):
    """Values that the widget does not allow, some of another type."""
    match widget.io_type:
        case "INT" | "FLOAT":
            beyond = 2 * widget.max + 1
            return widget.min - 1, beyond, -beyond, float("nan"), float("inf"), "many", None, [1]
        case "COMBO":
            return "no such choice", 3, None, ["lora"]
        case "BOOLEAN":
            return "yes", 2, None
    return 7, None, "a \ud83d"


@pytest.mark.parametrize("kind", TRAINING)
def test_errors_begin_with_the_widget_that_the_user_sees(host, kind):
    graph = {
        "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
        "data": ("SanaNodesDataset", {"folder": "cyanotypes (bundled)", "resolution": 128}),
    }
    catches = {name: ("Catch", {"value": [name, 0], "name": name}) for name in graph}
    objects = host.run({**graph, **{f"catch {name}": catch for name, catch in catches.items()}})
    node = host.nodes.NODE_CLASS_MAPPINGS[kind]
    inputs = node.GET_SCHEMA().inputs
    links = {"model": "load", "dataset": "data"}
    sockets = {item.id: links[item.id] for item in inputs if item.id in links}
    widgets = {item.id: item for item in inputs if hasattr(item, "default")}
    good = {name: widget.default for name, widget in widgets.items()}
    if kind == "SanaNodesDataset":
        good["folder"] = "cyanotypes (bundled)"
    for name, widget in widgets.items():
        for value in wrong_values(widget):
            # Over a link, which ComfyUI does not check.
            with pytest.raises(ValueError) as caught:
                node.execute(**{socket: objects[source] for socket, source in sockets.items()}, **{**good, name: value})
            message = str(caught.value)
            assert message.startswith((f"{name}: got ", f"{name}: contains half")) and len(message) < 300, message
            assert "\n" not in message
            # Entered by the user: ComfyUI refuses it with the name, or makes it a text or a BOOLEAN.
            if widget.io_type in ("STRING", "BOOLEAN") or name == "existing_lora" or isinstance(value, list):
                continue
            values = {**{socket: [source, 0] for socket, source in sockets.items()}, **good, name: value}
            refused = {**graph, "node": (kind, values), "catch": ("Catch", {"value": ["node", 0], "name": "caught"})}
            with pytest.raises(NodeError, match=f"'input_name': '{name}'|^{name}: got "):
                host.run(refused, keep_cache=True)
    assert not (host.output / "sana_training").exists()


TOGETHER = {
    "base": ({"base": "int8", "method": "dora"}, "^base: got int8 with method dora, expected full; or choose lora or"),
    "existing_lora": ({"existing_lora": "gone.safetensors"}, "^existing_lora: no file 'gone.safetensors'"),
    "d0": ({"d0": 1e-3}, "^d0: got 0.001 without optimizer prodigy, where it does nothing; set that, or remove this$"),
    "d_coef": ({"d_coef": 2.0, "optimizer": "came"}, "^d_coef: got 2.0 without optimizer prodigy, where it does"),
    "prior_loss_weight": ({"prior_loss_weight": 0.5}, "^prior_loss_weight: got 0.5 without regularisation, where it"),
    "validate_every": ({"validate_every": 7}, "^validate_every: got 7 without validation_prompts or held_out, where"),
    "held_out": ({"validate_every": 0, "held_out": 0.1}, "^held_out: got 0.1 without validate_every, where it does"),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_widgets_that_do_not_fit_each_other(refused, case):
    values, pattern = TOGETHER[case]
    refused(pattern, **values)


CONTROLNET = {
    "method": "dora",
    "targets": "both",
    "alpha": 4.0,
    "base": "int8",
    "trigger": "x",
    "prior_loss_weight": 2.0,
}


@pytest.mark.parametrize("name", [*CONTROLNET, "existing_lora", "regularisation"])
def test_a_controlnet_refuses_settings_that_only_a_lora_has(host, train_node, install, controlled, name):
    graph = {"load": ("SanaNodesLoader", {"model": "sana-tiny"})}
    graph["data"] = ("SanaNodesDataset", {"folder": controlled, "resolution": 128})
    value = CONTROLNET.get(name, ["data", 0])
    if name == "existing_lora":
        value = install("loras", "some.safetensors", {"a": torch.zeros(1)})
    train_node(
        graph,
        "SanaNodesTrainControlNet",
        **{"model": ["load", 0], "dataset": ["data", 0], "name": "refused", "blocks": 3, "steps": 1},
        **{"learning_rate": 1e-3, "batch_size": 1, name: value},
    )
    with pytest.raises(NodeError, match=f"^{name}: got .* for a ControlNet, which has no use for it; reset it in SANA"):
        host.run(graph)


def test_a_resumed_run_names_the_widget_that_has_changed(host, train_node):
    graph = {"load": ("SanaNodesLoader", {"model": "sana-tiny"})}
    graph["data"] = ("SanaNodesDataset", {"folder": "cyanotypes (bundled)", "resolution": 64})
    inputs = {"name": "resumed", "rank": 2, "steps": 1, "learning_rate": 1e-3, "batch_size": 1}
    links = {"model": ["load", 0], "dataset": ["data", 0]}
    host.run(train_node(graph, **links, **inputs))
    try:
        for name, value in {"training_seed": 1, "alpha": 4.0}.items():
            with pytest.raises(NodeError, match=f"^{name}: got .*{value}.*, but the run in sana_training.resumed has "):
                host.run(train_node(dict(graph), **links, **{**inputs, name: value}))
    finally:
        shutil.rmtree(host.output / "sana_training")
        shutil.rmtree(host.output / "loras")


def patched(node, **inputs):
    return {"patched": (node, {"model": ["load", 0], **inputs})}


PATCHED = {
    r"\(model_sampling\)": patched("ModelSamplingSD3", shift=5.0),
    r"\(.*sana_perturbed_attention.*\)": patched("SanaNodesPAG", scale=2.0, blocks=""),
}


@pytest.mark.parametrize("found", PATCHED)
def test_a_model_with_patches(refused, found):
    refused(f"^model: got a patch that training does not see {found}, expected the model alone", PATCHED[found])


def test_a_model_with_a_lora(refused, host, install):
    from test_lora import written

    name = install("loras", "style.safetensors", written("diffusers"))
    lora = patched("SanaNodesLoraLoader", lora_name=name, strength_model=1.0)
    refused(r"^model: got a patch that training does not see \(LoRA\), expected the model alone; connect", lora)


def test_a_sprint_model(refused, variants):
    refused("^model: got a SANA-Sprint model, which this loss would undo; train the SANA", load={"model": "sprint"})


def test_a_model_that_is_not_as_its_file_has_it(refused):
    refused("^model: training needs weights as they are in a plain file", load={"weight_dtype": "fp8_e4m3fn"})


def test_a_model_of_another_size_than_its_file_says(refused):
    refused("^model: got resolution 512 of its loader, which training does not see", load={"resolution": "512"})


def test_a_model_without_text_encoder_and_vae(refused, single_files):
    alone = {"alone": single_files["model"]}
    refused("^clip: got none, expected one for a MODEL of a single file; connect its loader's$", alone)


def test_a_vae_that_training_cannot_load(refused, host):
    other = host.output_of("VAELoader", vae_name="pixel_space")
    refused("^vae: got .*, which training cannot load; use SANA Loader or SANA Load VAE$", vae=other)


def test_a_clip_with_a_lora(refused, host):
    clip = host.output_of("SanaNodesLoader", 1, model="sana-tiny").clone()
    name = next(key for key in clip.cond_stage_model.state_dict() if key.endswith("q_proj.weight"))
    clip.add_patches({name: (torch.ones_like(clip.cond_stage_model.state_dict()[name]),)}, 1.0)
    refused("^clip: got one that training cannot load, or with a LoRA; connect that of a SANA loader$", clip=clip)


@pytest.mark.parametrize("field", ["trigger", "validation_prompts"])
def test_a_lone_surrogate_in_a_text_is_refused_before_the_first_step(refused, field):
    refused(f"^{field}: contains half a character .* at position 2; write the text again$", **{field: "a \ud83d"})


def test_a_clip_that_is_none(refused):
    refused("^clip: got 'text', expected a CLIP; connect an output of that type$", clip="text")


def test_what_is_no_dataset(refused):
    refused("^dataset: got 'a folder', expected a SANA_DATASET; connect an output of that type$", dataset="a folder")


def test_errors_name_no_place_outside_of_comfyuis_folders_and_no_process(host, pictures):
    from sana_core.runtime.folder_lock import hold

    graph = {"load": ("SanaNodesLoader", {"model": "sana-tiny"})}
    graph["data"] = ("SanaNodesDataset", {"folder": pictures("bad", PAIR), "resolution": 128})
    inputs = {"name": "held", "rank": 2, "steps": 1, "learning_rate": 1e-3, "batch_size": 1}
    graph["train"] = ("SanaNodesTrain", {"model": ["load", 0], "dataset": ["data", 0], **inputs})
    run = host.output / "sana_training" / "held"
    with hold(run), pytest.raises(NodeError) as caught:
        host.run(graph)
    assert str(caught.value).startswith("name: another run is using that folder; wait for its end")
    (run / "held.safetensors").write_text("mine")
    with pytest.raises(NodeError, match="^out: sana_training.held.held.safetensors is not of this run"):
        host.run(graph)
    assert (run / "held.safetensors").read_text() == "mine"
    shutil.rmtree(host.output / "sana_training")
    graph["train"][1]["name"] = "taken"
    host.run(graph)
    graph["train"][1]["rank"] = 3
    with pytest.raises(NodeError, match="^rank: got 3, but the run in .*taken has 2; name another folder"):
        host.run(graph)
    shutil.rmtree(host.output / "sana_training")
    graph["train"][1]["name"] = "State"
    with pytest.raises(NodeError, match="^name: got 'State', which is the name of a state's file; choose another"):
        host.run(graph)
    with pytest.raises(NodeError, match="^dataset: no image in bad empty, expected files"):
        look(host, pictures("bad empty", {"a.txt": "a"}))


def look(host, folder, resolution=128, keep_cache=False):
    graph = {"data": ("SanaNodesDataset", {"folder": folder, "resolution": resolution})}
    graph["catch sheet"] = ("Catch", {"value": ["data", 1], "name": "sheet"})
    return host.run({**graph, "catch": ("Catch", {"value": ["data", 0], "name": "dataset"})}, keep_cache)


def test_folders_that_cannot_be_learnt(host, pictures):
    with pytest.raises(NodeError, match=r"^a.png: has no caption, .*; also 1 more of the data set, .*: b.png$"):
        look(host, pictures("faulty", {"a.png": (64, 64), "b.png": b"none", "b.txt": "b"}))


@pytest.mark.parametrize("resolution", [100, 0, 8224, 128.5])
def test_resolutions(host, pictures, resolution):
    with pytest.raises(NodeError, match=f"^resolution: got {resolution}, expected a (multiple of 32|whole number)"):
        host.output_of("SanaNodesDataset", linked={"resolution": resolution}, folder=pictures("bad", PAIR))


@pytest.mark.parametrize("folder", ["..", "../models", "missing", "/etc", 3])
def test_folders_outside_of_the_input_folder(host, folder):
    with pytest.raises(
        NodeError, match="^folder: got .*, expected a folder in ComfyUI's input folder; put your images"
    ):
        host.output_of("SanaNodesDataset", linked={"folder": folder}, resolution=128)


def test_the_contact_sheet_has_each_shape_and_runs_again_when_a_file_changes(host, pictures, node_texts):
    files = {f"{index}.png": (128, 128) for index in range(7)} | {"wide.png": (300, 100), "small.png": (40, 40)}
    name = pictures("sheet", files | {f"{file[:-4]}.txt": "words " * 20 for file in files})
    seen = look(host, name)
    assert node_texts == [
        ("data", "9 images: 8 of 128 x 128, 1 of 256 x 64; 1 are smaller than that and will be blurred")
    ]
    # six columns: two rows of the first shape, one of the second, each below a line of its own
    assert seen["sheet"].shape == (1, 32 + 2 * 40 + 3 * 222, 32 + 6 * 200, 3)
    dataset = seen["dataset"]
    assert (dataset.folder, dataset.resolution) == (str(host.models.parent / "input" / "sheet"), 128)
    look(host, name, keep_cache=True)
    assert len(node_texts) == 1
    (host.models.parent / "input" / "sheet" / "wide.txt").write_text("another caption")
    look(host, name, keep_cache=True)
    assert len(node_texts) == 2
    seen = look(host, "cyanotypes (bundled)")
    assert node_texts[-1][1] == "20 images: 20 of 128 x 128" and seen["sheet"].std() > 0.1
