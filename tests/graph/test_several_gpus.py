"""The nodes on several GPUs that are really distinct: pretended GPUs refuse mixed devices, count bytes and fail."""

import gc
import logging
import random
import shutil
from types import SimpleNamespace

import layouts
import pytest
import torch
from clips import PROMPT, save_clip
from fake_cuda import pack
from host_cards import host_cards
from in_process import NodeError
from loading import model_node, random_controlnet
from pretend_card import ERRORS, NAN, computed_on

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = "a red circle on a blue background\na blue square on a white background"
CARDS = [torch.device("cuda", index) for index in range(4)]


def batch_graph(model="load", vae="load", lora=0.0, control=None, compiled=False, text=PROMPTS, **inputs):
    """Two prompts with two images each, by SANA Batch Sampler."""
    links = {"model": [model, 0], "positive": ["list", 0], "negative": ["negative", 0], "latent_image": ["empty", 0]}
    settings = {"count": 2, "seed": 7, "steps": 2, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": "all"}
    graph = {
        "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
        "list": ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": text, "instruction": True}),
        "negative": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "", "instruction": False}),
        "empty": ("SanaNodesEmptyLatent", {"width": 64, "height": 64, "batch_size": 1}),
        "catch latent": ("Catch", {"value": ["batch", 0], "name": "latent"}),
    }
    if vae:
        links["vae"] = [vae, 2 if vae == "load" else 0]
        graph["catch image"] = ("Catch", {"value": ["batch", 1], "name": "image"})
    if lora:
        options = {"model": links["model"], "lora_name": "several.safetensors", "strength_model": lora}
        graph["lora"] = ("SanaNodesLoraLoader", options)
        links["model"] = ["lora", 0]
    if compiled:
        graph["compile"] = ("TorchCompileModel", {"model": links["model"], "backend": "inductor"})
        links["model"] = ["compile", 0]
    if control is not None:
        graph["edges"] = ("AnyValue", {"value": control})
        graph["control"] = ("SanaNodesControlNetLoader", {"control_net_name": "several.safetensors"})
        options = {"control_net": ["control", 0], "image": ["edges", 0], "vae": ["load", 2], "strength": 1.0}
        options |= {"positive": links["positive"], "negative": links["negative"]}
        graph["apply"] = ("ControlNetApplyAdvanced", {**options, "start_percent": 0.0, "end_percent": 1.0})
        links |= {"positive": ["apply", 0], "negative": ["apply", 1]}
    graph["batch"] = ("SanaNodesBatchSampler", {**links, **settings, "chunk": 1, **inputs})
    return graph


def save_files(host):
    """Save a LoRA and a ControlNet in ComfyUI's folders, and return their paths."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for block in range(5):
        for part, shape in (("lora_A", (4, 160)), ("lora_B", (160, 4))):
            name = f"transformer.transformer_blocks.{block}.attn2.to_q.{part}.weight"
            tensors[name] = torch.randn(shape, generator=generator) * 0.2
    model = random_controlnet()
    return [
        layouts.save(tensors, host.models / "loras" / "several.safetensors"),
        layouts.save(
            model.state_dict(),
            host.models / "controlnet" / "several.safetensors",
            config=layouts.with_config(model),
        ),
    ]


@pytest.fixture(scope="module")
def files(host):
    paths = save_files(host)
    yield
    for path in paths:
        path.unlink()


@pytest.fixture(scope="module")
def edges():
    return torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(6))


@pytest.fixture(scope="module")
def on_cpu(host, files, edges):
    """A function of overrides: the result on the CPU. All are computed before there are GPUs."""
    overrides = [{}, {"lora": 1.0}, {"lora": 0.5}, {"control": edges}, {"lora": 1.0, "control": edges}, {"steps": 3}]
    overrides += [{"seed": 8}, {"seed": 9}]
    host.executor.reset()

    def key(options):
        return tuple(sorted((name, "edges" if value is edges else value) for name, value in options.items()))

    results = {key(options): host.run(batch_graph(**options), keep_cache=True) for options in overrides}

    def result(**options):
        return results[key(options)]

    return result


def check(got, expected, *devices):
    """Images equal the CPU's, and no other GPU than `devices` has computed any of them.

    Images of another process do not show which GPU has computed them.
    """
    for name, rows in (("image", got["image"]), ("latent", got["latent"]["samples"])):
        reference = expected[name] if name == "image" else expected[name]["samples"]
        torch.testing.assert_close(rows.cpu(), reference, atol=2e-4, rtol=0)
        assert computed_on(rows) <= set(devices)


class Compiled(torch.nn.Module):
    """In place of torch.compile's module: it runs the module that it has compiled."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def __getattr__(self, name):
        return getattr(self._modules["_orig_mod"], name) if name != "_orig_mod" else self._modules[name]

    def forward(self, *args, **options):
        return self._orig_mod(*args, **options)


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def test_images_are_the_cpus(host, on_cpu, edges, monkeypatch, count):
    compiled = []

    def compile_module(model, **options):
        compiled.append(Compiled(model))
        return compiled[-1]

    with host_cards(host, count) as cards:
        monkeypatch.setattr(torch, "compile", compile_module)
        for options in ({}, {"lora": 1.0}, {"control": edges}, {"lora": 1.0, "compiled": True}):
            expected = on_cpu(**{name: value for name, value in options.items() if name != "compiled"})
            cards.calls.clear()
            check(host.run(batch_graph(**options), keep_cache=True), expected, *CARDS[:count])
            # Another process could not load a compiled MODEL.
            assert len(cards.calls) == (1 if "compiled" in options else count)
        assert set(host.run(batch_graph(vae="", seed=8), keep_cache=True)) == {"latent"}
        assert set(cards.calls) == set(CARDS[:count])
        # The current device of each thread is the one that it computes on.
        strays = [thread for thread, _ in cards.elsewhere if thread.startswith("sana cuda")]
        assert not strays, cards.elsewhere
    assert len(compiled) == 1


SHORT = "1 GPU is visible"
REMEDY = "; if this computer has more, start ComfyUI with --cuda-device all --disable-pinned-memory"


@pytest.mark.parametrize(
    "platform, version, cuda_device, note",
    [
        ("win32", "0.34.0", None, SHORT + REMEDY),
        ("win32", "0.34.0", "0", SHORT),
        # ComfyUI 0.33.0 shows all GPUs, and would take "all" as the name of a GPU.
        ("win32", "0.33.0", None, SHORT),
        ("linux", "0.34.0", None, SHORT),
    ],
)
def test_nodes_set_to_all_gpus_say_that_one_is_visible(host, monkeypatch, caplog, platform, version, cuda_device, note):
    import comfy.cli_args
    import comfyui_version

    monkeypatch.setattr(pack("nodes.host.folders"), "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(comfyui_version, "__version__", version)
    monkeypatch.setattr(comfy.cli_args.args, "cuda_device", cuda_device)
    caplog.set_level(logging.INFO)
    graph = batch_graph(steps=1, count=1, text="a red circle")
    graph["split"] = ("SanaNodesSplitPicture", {"model": ["load", 0], "devices": "all"})
    graph["catch split"] = ("Catch", {"value": ["split", 0], "name": "split"})
    graph["decode"] = ("SanaNodesDecode", {"samples": ["batch", 0], "vae": ["load", 2], "devices": "all"})
    graph["catch decoded"] = ("Catch", {"value": ["decode", 0], "name": "decoded"})
    with host_cards(host, 1):
        host.run(graph)
    lines = [line for message in caplog.messages for line in message.splitlines() if SHORT in line]
    assert sorted(lines) == sorted([note, note, f"one device, cuda:0, computes the image: {note}"])
    if note == SHORT + REMEDY:
        caplog.clear()
        with host_cards(host, 2):
            host.run(graph)
        assert SHORT not in caplog.text


@pytest.mark.parametrize(
    "state", ["LOW_VRAM", "NO_VRAM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("HIGH_VRAM", "SHARED"))]
)
def test_images_in_every_state_of_memory(host, on_cpu, edges, state):
    with host_cards(host, 2, state):
        check(host.run(batch_graph(lora=1.0, control=edges)), on_cpu(lora=1.0, control=edges), *CARDS[:2])


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def test_with_gpu_only_results_are_on_the_first_gpu(host, on_cpu, count):
    with host_cards(host, count, gpu_only=True):
        got = host.run(batch_graph(), keep_cache=True)
        assert got["latent"]["samples"].device == got["image"].device == CARDS[0]
        check(got, on_cpu(), *CARDS[:count])
        assert host.run(batch_graph(vae="", seed=8), keep_cache=True)["latent"]["samples"].device == CARDS[0]


@pytest.mark.parametrize(
    "kind, at",
    [("driver", 100), ("cublas", 600), *(pytest.param(kind, 300, marks=pytest.mark.slow) for kind in ERRORS)],
)
def test_a_gpu_that_fails_takes_no_image_with_it(host, on_cpu, kind, at):
    with host_cards(host) as cards:
        cards.fail(CARDS[1], kind, at=at)
        check(host.run(batch_graph()), on_cpu(), *CARDS[:2])
        assert not cards.failures


def test_an_image_with_nan_costs_no_other_image(host, on_cpu, caplog):
    with host_cards(host, 1) as cards, caplog.at_level(logging.WARNING):
        cards.fail(CARDS[0], NAN, at=300)
        got = host.run(batch_graph())
        assert not cards.failures
    lost = [number for number, row in enumerate(got["latent"]["samples"]) if not row.isfinite().all()]
    assert len(lost) == 1 and not got["image"][lost[0]].any()
    remaining = [number for number in range(4) if number not in lost]
    torch.testing.assert_close(got["image"][remaining], on_cpu()["image"][remaining], atol=2e-4, rtol=0)
    assert f"seed {7 + lost[0]}): samples: 128 of 128 values are NaN" in caplog.text
    with host_cards(host, 1) as cards:
        cards.fail(CARDS[0], NAN, at=300)
        with pytest.raises(NodeError, match=r"^model: all 1 images failed \(image 1 \(seed 7\): samples: 128 of 128"):
            host.run(batch_graph(count=1, text="a red circle"))


@pytest.mark.slow
def test_random_failures_lose_no_image_while_one_gpu_survives(host, on_cpu):
    chance = random.Random(0)
    with host_cards(host, 4) as cards:
        for number in range(60):
            cards.broken.clear()
            cards.failures.clear()
            count = chance.randint(1, 3)
            failures = [
                (device, chance.choice(list(ERRORS)), chance.randint(1, 900)) for device in chance.sample(CARDS, count)
            ]
            for failure in failures:
                cards.fail(*failure)
            # The graph has to change, or ComfyUI would use the last results.
            got = host.run(batch_graph(chunk=1 + number % 2), keep_cache=True)
            try:
                check(got, on_cpu(), *CARDS)
            except AssertionError as error:
                raise AssertionError(f"run {number} with {failures}") from error


def loaded_on():
    """What ComfyUI lists as loaded: (class, device in the list, devices of the weights)."""
    import comfy.model_management as management

    return {
        (type(entry.model.model).__name__, entry.device, frozenset(p.device for p in entry.model.model.parameters()))
        for entry in management.current_loaded_models
    }


def test_further_gpus_keep_no_weights_of_this_process(host, on_cpu):
    import comfy.model_management as management

    with host_cards(host, 3) as cards:
        check(host.run(batch_graph(devices="gpu:2"), keep_cache=True), on_cpu(), CARDS[2])
        assert cards.calls[CARDS[2]] > 100 and not cards.calls[CARDS[1]]
        # Another LoRA between two runs.
        for options in ({"lora": 1.0}, {"lora": 0.5}, {"seed": 8}):
            check(host.run(batch_graph(**options), keep_cache=True), on_cpu(**options), *CARDS[:3])
        gc.collect()
        assert set(+cards.alive) == {CARDS[0]}
        assert {device for _, device, _ in loaded_on()} <= {CARDS[0], torch.device("cpu")}
        management.unload_all_models()
        gc.collect()
        assert not +cards.alive
        check(host.run(batch_graph(steps=3), keep_cache=True), on_cpu(steps=3), *CARDS[:3])
        # Without the MODEL, nothing stays.
        host.executor.reset()
        gc.collect()
        assert not +cards.alive and not management.current_loaded_models


def test_models_on_further_gpus_make_room_for_their_processes(host, on_cpu):
    with host_cards(host):
        host.run(split_graph(), keep_cache=True)
        assert CARDS[1] in {device for _, device, _ in loaded_on()}
        check(host.run(batch_graph(), keep_cache=True), on_cpu(), *CARDS[:2])
        assert {device for _, device, _ in loaded_on()} <= {CARDS[0], torch.device("cpu")}


def test_the_first_gpu_keeps_its_weights_while_others_get_theirs(host, files):
    import comfy.model_management as management

    with host_cards(host):
        host.run(batch_graph(devices="default"), keep_cache=True)
        entries = [
            entry for entry in management.current_loaded_models if type(entry.model.model).__name__ == "SanaModel"
        ]
        weights = list(map(id, entries[0].model.model.parameters()))
        host.run(batch_graph(), keep_cache=True)
        assert list(map(id, entries[0].model.model.parameters())) == weights


@pytest.mark.parametrize("state", ["NORMAL_VRAM", "NO_VRAM"])
def test_a_controlnet_follows_the_device(host, on_cpu, edges, state):
    with host_cards(host, 2, state):
        got = host.run(batch_graph(control=edges, devices="gpu:1"))
        check(got, on_cpu(control=edges), CARDS[1])
    assert (got["image"] - on_cpu()["image"]).abs().mean() > 0.01


def test_a_vae_on_the_cpu_stays_there(host, on_cpu):
    with host_cards(host, cpu_vae=True):
        got = host.run(batch_graph(), keep_cache=True)
        check(got, on_cpu(), *CARDS[:2])
        assert {device for kind, device, _ in loaded_on() if kind == "SanaAutoencoder"} == {torch.device("cpu")}


@pytest.mark.parametrize("devices", ["all", pytest.param("default", marks=pytest.mark.slow)])
def test_select_vae_device_is_respected(host, on_cpu, devices):
    with host_cards(host, 3):
        graph = {**batch_graph(vae="select", devices=devices)}
        graph["select"] = ("SelectVAEDevice", {"vae": ["load", 2], "device": "gpu:2"})
        got = host.run(graph)
        assert computed_on(got["image"]) == {CARDS[2]}
        torch.testing.assert_close(got["image"], on_cpu()["image"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("state", ["NORMAL_VRAM", pytest.param("NO_VRAM", marks=pytest.mark.slow)])
def test_a_vae_is_not_loaded_over_a_model_that_samples(host, on_cpu, state):
    """With little memory, ComfyUI unloads the MODEL of the second GPU to load the VAE for images of the first."""
    with host_cards(host, 2, state, total=10**9):
        for seed in (7, 8, 9):
            graph = batch_graph(vae="select", seed=seed)
            graph["select"] = ("SelectVAEDevice", {"vae": ["load", 2], "device": "gpu:1"})
            got = host.run(graph, keep_cache=True)
            expected = on_cpu(**({"seed": seed} if seed > 7 else {}))
            torch.testing.assert_close(got["image"], expected["image"], atol=2e-4, rtol=0)


def test_a_gpu_that_failed_earlier_is_left_out(host, on_cpu):
    """An earlier node has broken the GPU, and its weights are in the memory of both."""
    with host_cards(host) as cards:
        host.run(split_graph(), keep_cache=True)
        cards.broken.add(CARDS[1])
        check(host.run(batch_graph(chunk=0), keep_cache=True), on_cpu(), CARDS[0])
        cards.broken.clear()


def test_dead_entries_in_comfyuis_list_are_passed_over(host, on_cpu):
    import comfy.model_management as management
    from comfy.model_patcher import ModelPatcher

    with host_cards(host):
        module = torch.nn.Linear(2, 2)
        patcher = ModelPatcher(module, CARDS[0], torch.device("cpu"))
        management.load_models_gpu([patcher])
        del patcher
        assert management.loaded_models() == [None]
        check(host.run(batch_graph(chunk=0)), on_cpu(), *CARDS[:2])


def test_each_gpu_gets_as_many_images_at_once_as_fit(host):
    devices = pack("nodes.host.batch.devices")
    with host_cards(host, 2, total=(4 * 10**9, 10**9)):
        model = host.output_of("SanaNodesLoader", 0, model="sana-tiny")
        large, small = (devices.chunk_that_fits(model, (1, 32, 128, 128), device) for device in CARDS[:2])
        # About 0.3 GB per image, by the formula in sana_core/batch/batch_size.py.
        assert (large, small) == (8, 2)


def test_a_patched_model_is_used_on_its_own_gpu_with_a_line_that_says_why(host, on_cpu, monkeypatch, node_texts):
    def patch(model):
        # Some packs replace the transformer like this for torch.compile.
        model.add_object_patch("diffusion_model", model.model.diffusion_model)

    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "Patch", model_node(patch))
    with host_cards(host) as cards:
        graph = {**batch_graph(model="patch"), "patch": ("Patch", {"model": ["load", 0]})}
        check(host.run(graph), on_cpu(), CARDS[0])
        assert set(cards.calls) == {CARDS[0]}
    line = "only cuda:0 generates, because of model: got a patch that another process cannot apply (diffusion_model); "
    assert line + "remove it to generate on all devices" in node_texts[-1][1].splitlines()


def test_a_shift_reaches_all_gpus(host, on_cpu):
    """Core's node puts one ModelSampling with buffers into all clones."""
    with host_cards(host):
        results = []
        for devices in ("default", "all"):
            graph = batch_graph(model="shift", devices=devices)
            graph["shift"] = ("ModelSamplingSD3", {"model": ["load", 0], "shift": 1.5})
            results.append(host.run(graph, keep_cache=True))
        check(results[1], {"image": results[0]["image"], "latent": results[0]["latent"]}, *CARDS[:2])
        assert (results[0]["image"] - on_cpu()["image"]).abs().mean() > 0.001


def test_every_gpu_computes_in_the_dtype_of_the_model(host, on_cpu):
    """So the images are the same, whichever GPU generates them."""
    with host_cards(host, exact=False, major=(8, 7)):
        one, other = (host.run(batch_graph(devices=f"gpu:{index}"), keep_cache=True)["image"] for index in (0, 1))
    # 0.004 here.
    assert 0 < (one - on_cpu()["image"]).abs().mean() < 0.02
    torch.testing.assert_close(one.cpu(), other.cpu(), atol=2e-4, rtol=0)


def test_a_full_gpu_leaves_the_others_to_work(host, on_cpu, caplog):
    with host_cards(host, 4) as cards, caplog.at_level(logging.WARNING):
        cards.limit(CARDS[3], 10**6)
        check(host.run(batch_graph()), on_cpu(), *CARDS[:3])


def test_decode_on_all_gpus(host, on_cpu):
    with host_cards(host, 4) as cards:
        graph = batch_graph(vae="", devices="default")
        graph["decode"] = ("SanaNodesDecode", {"samples": ["batch", 0], "vae": ["load", 2], "devices": "all"})
        graph["catch image"] = ("Catch", {"value": ["decode", 0], "name": "image"})
        got = host.run(graph)
        torch.testing.assert_close(got["image"], on_cpu()["image"], atol=2e-4, rtol=0)
        assert set(cards.calls) == set(CARDS)


def split_graph(control=None, **options):
    """An image of each prompt, by SANA Sampler with SANA Split Image."""
    graph = batch_graph(vae="", control=control, **options)
    batch = graph.pop("batch")[1]
    links = ("positive", "negative", "seed", "steps", "guidance", "sampler")
    graph["empty"] = ("SanaNodesEmptyLatent", {"width": 64, "height": 256, "batch_size": 2})
    graph["split"] = ("SanaNodesSplitPicture", {"model": batch["model"], "devices": batch["devices"]})
    sampler = {"model": ["split", 0], "latent_image": ["empty", 0], **{name: batch[name] for name in links}}
    graph["sample"] = ("SanaNodesSampler", sampler)
    graph["catch latent"] = ("Catch", {"value": ["sample", 0], "name": "latent"})
    return graph


def test_split_image_on_two_gpus(host, on_cpu, edges):
    options = [{}, {"lora": 1.0}, {"control": edges}]
    on_one = [host.run(split_graph(**option), keep_cache=True)["latent"]["samples"] for option in options]
    with host_cards(host) as cards:
        for option, expected in zip(options, on_one, strict=True):
            cards.calls.clear()
            got = host.run(split_graph(**option), keep_cache=True)["latent"]["samples"]
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
            assert computed_on(got) and set(cards.calls) == set(CARDS[:2])


def test_the_threads_of_a_model_stay_for_its_next_image(host, on_cpu):
    graph = split_graph()
    graph["decode"] = ("SanaNodesDecode", {"samples": ["sample", 0], "vae": ["load", 2], "devices": "all"})
    graph["catch image"] = ("Catch", {"value": ["decode", 0], "name": "image"})
    with host_cards(host, 2) as cards:
        for seed in (7, 8, 9):
            graph["sample"][1]["seed"] = seed
            host.run(graph, keep_cache=True)
        started = {name: count for name, count in cards.started.items() if name.startswith("sana image")}
    # One for the MODEL and one for the VAE.
    assert started == {f"sana image {device} #1": 2 for device in CARDS[:2]}


@pytest.mark.parametrize("kind", ["memory", "driver"])
def test_split_image_while_one_gpu_cannot_load_the_model(host, files, kind):
    expected, with_lora = (
        host.run(split_graph(lora=lora), keep_cache=True)["latent"]["samples"] for lora in (0.0, 1.0)
    )
    # The first call is on the first module. Most other calls are after modules whose load has ended.
    for at in (1, 20, 100):
        with host_cards(host) as cards:
            cards.fail(CARDS[1], kind, at=at)
            got = host.run(split_graph())["latent"]["samples"]
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
            assert not cards.failures
            # The next image has both GPUs again.
            cards.broken.clear()
            cards.calls.clear()
            again = host.run(split_graph(lora=1.0), keep_cache=True)["latent"]["samples"]
            assert cards.calls[CARDS[1]] > 100
            torch.testing.assert_close(again, with_lora, atol=2e-4, rtol=0)


def test_split_image_after_a_partial_load_that_failed_has_no_earlier_lora(host, files):
    """A GPU with little memory loads a part of the model, and adds LoRAs to the other layers in each call."""
    expected = {lora: host.run(split_graph(lora=lora), keep_cache=True)["latent"]["samples"] for lora in (0.5, 0.0)}
    # ComfyUI leaves 1.278 GB free for computations. Of the model's 9 MB, 4 remain.
    with host_cards(host, total=1_282_000_000) as cards:
        cards.fail(CARDS[1], "memory")
        for lora, image in expected.items():
            got = host.run(split_graph(lora=lora), keep_cache=True)["latent"]["samples"]
            assert not cards.failures
            torch.testing.assert_close(got, image, atol=2e-4, rtol=0)
        assert cards.calls[CARDS[1]] > 100


def test_pick_best_scores_what_several_gpus_generated(host, on_cpu):
    folder = host.models / "clip_vision" / "several"
    save_clip(folder)
    try:
        with host_cards(host):
            graph = batch_graph()
            graph["scorer"] = ("SanaNodesScorerLoader", {"scorer_name": "several"})
            links = {"samples": ["batch", 0], "vae": ["load", 2], "scorer": ["scorer", 0]}
            graph["pick"] = ("SanaNodesPickBest", {**links, "prompt": PROMPT, "best": 2})
            graph["catch best"] = ("Catch", {"value": ["pick", 1], "name": "best"})
            got = host.run(graph)
    finally:
        shutil.rmtree(folder)
    check(got, on_cpu(), *CARDS[:2])
    assert all(min((image - best).abs().max() for image in got["image"]) < 2e-4 for best in got["best"])
