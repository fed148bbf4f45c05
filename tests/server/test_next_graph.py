"""After any broken file, hostile name or hostile prompt there is one error, and the server runs the next graph."""

import copy
import itertools
import json
import os
import random
import re
import shutil
import signal

import pytest
from checkpoints import TINY, link_tiny
from clips import save_clip
from host import GraphError, base_directory, get, images_of, run_graph, start_server
from names import EXAMPLES, NO_FILE, cut
from setup import ROOT
from verdicts import check_line

TEXT = 3  # the kind of a websocket's event, in its first four bytes
# The next graph takes a tenth of a second.
PATIENCE = 60
# Characters of an error. The errors of the loaders list their choices.
LONGEST_MESSAGE = 2100
COLOURS = re.compile(r"\x1b\[\d*m")
SEEDS = itertools.count(1)
GARBAGE = random.Random(0).randbytes(4096)


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def show(source):
    return {"show": node("PreviewAny", source=source)}


def loader(kind, field, **inputs):
    """A function that returns the graph of a loader whose file is `name`."""
    return lambda name: {"load": node(kind, **{field: name}, **inputs), **show(["load", 0])}


def with_model(graph):
    return {"tiny": node("SanaNodesLoader", model="sana-tiny"), **graph}


def training(dataset="cyanotypes (bundled)", name="names", **settings):
    """The graph of a training of one step."""
    inputs = {"name": name, "rank": 2, "steps": 1, "learning_rate": 1e-3, "batch_size": 1, "settings": ["settings", 0]}
    return with_model(
        {
            "settings": node("SanaNodesTrainSettings", **settings),
            "images": node("SanaNodesDataset", folder=dataset, resolution=32),
            "train": node("SanaNodesTrain", model=["tiny", 0], dataset=["images", 0], **inputs),
        }
    )


def images(name):
    graph = {"images": node("SanaNodesDataset", folder=name, resolution=32)}
    return {**graph, "show": node("PreviewImage", images=["images", 1])}


# {kind of file: (its folder, its suffix, the function that returns a graph with its name)}
FILES = {
    "model": ("models/diffusion_models", ".safetensors", loader("SanaNodesModelLoader", "model_name")),
    "model in .pth": ("models/diffusion_models", ".pth", loader("SanaNodesModelLoader", "model_name")),
    "whole model": ("models/checkpoints", ".safetensors", loader("SanaNodesLoader", "model")),
    "text encoder": ("models/text_encoders", ".safetensors", loader("SanaNodesTextEncoderLoader", "text_encoder_name")),
    "VAE": ("models/vae", ".safetensors", loader("SanaNodesVAELoader", "vae_name")),
    "ControlNet": ("models/controlnet", ".safetensors", loader("SanaNodesControlNetLoader", "control_net_name")),
    "LoRA": (
        "models/loras",
        ".safetensors",
        lambda name: with_model(loader("SanaNodesLoraLoader", "lora_name", model=["tiny", 0], strength_model=1)(name)),
    ),
    "LoRA to train": ("models/loras", ".safetensors", lambda name: training(existing_lora=name)),
    "diffusers folder": ("models/diffusers", "", loader("SanaNodesLoader", "model")),
    "scorer": ("models/clip_vision", "", loader("SanaNodesScorerLoader", "scorer_name")),
    "data set": ("input", "", images),
    "training run": ("output/sana_training", "", lambda name: training(name=name)),
}
EXAMPLE = ROOT / "recipes" / "cyanotypes" / "000000.png"
WEIGHTS = TINY / "transformer" / "diffusion_pytorch_model.safetensors"


def incomplete(path):
    path.write_bytes(WEIGHTS.read_bytes()[:5000])


def garbage(path):
    path.write_bytes(GARBAGE)


def unreadable(path):
    # Root reads it too, and reads garbage.
    garbage(path)
    path.chmod(0)


def loop(path):
    path.symlink_to(path.name)


FAULTS = {
    "incomplete": incomplete,
    "garbage": garbage,
    "empty": lambda path: path.touch(),
    "missing": None,
    "deleted": None,
    "unreadable": unreadable,
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
}
PROMPTS = {**EXAMPLES, **NO_FILE, "a million characters": "red circle " * 100_000, "nothing": ""}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    return folder


@pytest.fixture(scope="module")
def base(server):
    """The server's base directory."""
    return server.log.parent


def make_fault(server, base, clip_folder, kind, name, fault):
    """Put the fault where the server finds it under `name`. Returns the path to remove and the graph that reads it."""
    place, suffix, graph = FILES[kind]
    folder = server.output / "sana_training" if kind == "training run" else base / place
    folder.mkdir(parents=True, exist_ok=True)
    path, graph = folder / cut(name, suffix), graph(cut(name, suffix))
    if fault in ("missing", "deleted"):
        if fault == "deleted":
            path.write_bytes(GARBAGE) if suffix else path.mkdir()
            for kind_of_node in {entry["class_type"] for entry in graph.values()}:
                get(server, f"/object_info/{kind_of_node}")
            path.unlink() if suffix else path.rmdir()
        return path, graph
    broken = path
    if kind == "diffusers folder":
        path.mkdir()
        for part in TINY.iterdir():
            (path / part.name).symlink_to(part)
        (path / "transformer").unlink()
        shutil.copytree(TINY / "transformer", path / "transformer")
        broken = path / "transformer" / WEIGHTS.name
    elif kind == "scorer":
        shutil.copytree(clip_folder, path, copy_function=os.link)
        broken = path / "model.safetensors"
    elif kind == "data set":
        path.mkdir()
        broken = path / cut(name, ".png")
        broken.with_suffix(".txt").write_text("a red circle")
    elif kind == "training run":
        path.mkdir(parents=True)
        broken = path / "run.json"
    if fault == "good":
        if kind == "VAE":
            shutil.copy(TINY / "vae" / WEIGHTS.name, path)
        elif kind == "data set":
            shutil.copy(EXAMPLE, broken)
        return path, graph
    broken.unlink(missing_ok=True)
    {**FAULTS, "a loop": loop}[fault](broken)
    return path, graph


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run(server, graph):
    """Return the events of `graph`, and the server's or the node's error or None."""
    events = []
    try:
        for event in run_graph(server, graph, PATIENCE):
            events.append(event)
    except GraphError as error:
        return events, str(error)
    return events, None


def check_next(server, demo, case):
    """Check that the server runs the demo. One that does not is ended, so that the tests after this fail at once."""
    graph = copy.deepcopy(demo)
    graph["4"]["inputs"] |= {"width": 32, "height": 32}
    graph["5"]["inputs"] |= {"seed": next(SEEDS), "steps": 1}
    try:
        assert images_of(list(run_graph(server, graph, PATIENCE)))
    except TimeoutError:
        os.kill(server.pid, signal.SIGKILL)
        pytest.fail(f"the server runs no graph after {case}:\n{log_of(server)[-2000:]}")


def log_of(server, start=0, encoding="utf-8"):
    return server.log.read_bytes()[start:].decode(encoding)


def check_case(server, demo, case, graph, has_error=True, encoding="utf-8"):
    """Check the error, the messages and the log of a graph, and that the next one runs. `has_error` None: either."""
    start = server.log.stat().st_size
    try:
        events, error = run(server, graph)
    except TimeoutError:
        os.kill(server.pid, signal.SIGKILL)
        pytest.fail(f"no answer to {case}:\n{log_of(server)[-2000:]}")
    check_next(server, demo, case)
    assert has_error is None or (error is not None) == has_error, (case, error)
    failures = [event for event in events if isinstance(event, dict) and event["type"] == "execution_error"]
    if failures:
        check_line(error, LONGEST_MESSAGE)
    if error is not None:
        # The host writes one line for each input that it refuses.
        assert all(line.isprintable() for line in error.split("\n")), error
        assert "Traceback" not in error and str(ROOT) not in error and "custom_nodes" not in error, error
    for event in events:
        if isinstance(event, bytes) and event[3] == TEXT:
            length = int.from_bytes(event[4:8], "big")
            assert all(line.isprintable() for line in event[8 + length :].decode().split("\n")), (case, event)
    if failures:
        (prompt_id,) = {event["data"]["prompt_id"] for event in failures}
        (entry,) = json.loads(get(server, f"/history/{prompt_id}")).values()
        messages = [
            data["exception_message"] for kind, data in entry["status"]["messages"] if kind == "execution_error"
        ]
        assert [message.strip() for message in messages] == [error]
    log = COLOURS.sub("", log_of(server, start, encoding))
    assert "--- Logging error ---" not in log and "Exception in thread" not in log, log
    assert log.count("!!! Exception during processing !!!") == len(failures), log
    # The host writes the traceback of each error. A second one in it would contain the text of another error.
    assert log.count("Traceback") == len(failures), log
    wrong = [line for line in log.replace("\r", "\n").split("\n") if not line.replace("\t", " ").isprintable()]
    assert not wrong, (case, wrong)


def check_fault(server, base, clip_folder, demo, kind, name, fault, **options):
    if kind == "training run" and fault in ("missing", "deleted", "a folder"):
        # That is a new run, which trains.
        return
    path, graph = make_fault(server, base, clip_folder, kind, name, fault)
    try:
        check_case(server, demo, f"{fault} {kind} {name!a:.300}", graph, **options)
    finally:
        remove(path)


# With eight kinds of names and of faults, the quick test has all pairs of kind and name, and of kind and fault.
COMMON = ["line breaks", "controls", "right to left", "Chinese", "emoji", "dots and spaces", "backslash"]
LATIN_255 = "\udce8" * 255


@pytest.mark.parametrize("kind", FILES)
def test_the_next_graph_runs_after_a_broken_file_of_any_name(server, base, clip_folder, demo, kind):
    """Each kind of file with each name, and each of both with each fault."""
    shift = list(FILES).index(kind)
    for number, name in enumerate([*(EXAMPLES[label] for label in COMMON), LATIN_255]):
        fault = list(FAULTS)[(number + shift) % len(FAULTS)]
        check_fault(server, base, clip_folder, demo, kind, name, fault)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_next_graph_runs_after_every_fault_of_every_name(server, base, clip_folder, demo, kind, fault):
    for name in [*EXAMPLES.values(), LATIN_255]:
        check_fault(server, base, clip_folder, demo, kind, name, fault)


@pytest.mark.parametrize("kind", ["diffusers folder", "scorer", "data set", "VAE"])
def test_a_good_file_of_any_name_loads(server, base, clip_folder, demo, kind):
    for name in [*(EXAMPLES[label] for label in COMMON), LATIN_255]:
        path, graph = make_fault(server, base, clip_folder, kind, name, "good")
        # A data set refuses names that a list in JSON cannot contain, and control characters.
        has_error = None if kind == "data set" and not name.isprintable() else False
        try:
            check_case(server, demo, f"good {kind} {name!a}", graph, has_error)
        finally:
            remove(path)


@pytest.mark.parametrize("label", NO_FILE)
def test_the_next_graph_runs_after_a_name_that_no_file_has(server, demo, label):
    for kind, (_, suffix, graph) in FILES.items():
        check_case(server, demo, f"{kind} {label}", graph(NO_FILE[label] + suffix))


def test_the_next_graph_runs_after_any_prompt(server, demo):
    for label, text in PROMPTS.items():
        graph = copy.deepcopy(demo)
        graph["2"]["inputs"]["text"] = text
        graph["4"]["inputs"] |= {"width": 32, "height": 32}
        graph["5"]["inputs"] |= {"seed": next(SEEDS), "steps": 1}
        has_half = any("\ud800" <= character <= "\udfff" for character in text)
        check_case(server, demo, label, graph, has_error=has_half)


def test_the_next_graph_runs_after_an_image_that_is_left_out_of_a_data_set(server, base, demo):
    for name in EXAMPLES.values():
        folder = base / "input" / cut(name, "")
        folder.mkdir()
        try:
            shutil.copy(EXAMPLE, folder / "good.png")
            (folder / cut(name, ".png")).write_bytes(GARBAGE)
            check_case(server, demo, f"data set {name!a}", images(folder.name), has_error=None)
        finally:
            remove(folder)


def test_the_next_graph_runs_on_a_server_whose_log_is_not_utf_8(tmp_path, clip_folder, worker_id):
    """As on a Windows with cp1252, which can write neither Chinese nor emoji."""
    name = f"test-server-cp1252-{worker_id}"
    link_tiny(base_directory(name))
    demo = json.loads((ROOT / "tests" / "graphs" / "tiny.json").read_text())
    environment = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    with start_server(name, tmp_path, environment=environment) as server:
        for number, kind in enumerate(FILES):
            example = EXAMPLES[("Chinese", "Latin-1", "emoji")[number % 3]]
            fault = list(FAULTS)[number % len(FAULTS)]
            check_fault(server, base_directory(name), clip_folder, demo, kind, example, fault, encoding="cp1252")
        # The error of the operating system that led to ours contains the path too, and the host logs both.
        base, chinese = base_directory(name), EXAMPLES["Chinese"]
        check_fault(server, base, clip_folder, demo, "diffusers folder", chinese, "a loop", encoding="cp1252")
        graph = copy.deepcopy(demo)
        graph["2"]["inputs"]["text"] = chinese
        check_case(server, demo, "a Chinese prompt", graph, has_error=False, encoding="cp1252")
