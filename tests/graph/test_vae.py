"""Core's VAE nodes and SANA Decode give the same pixels, within their budget, and stop when cancelled."""

import gc
import re

import pytest
import torch
from fake_cuda import pack
from in_process import NodeError

from sana_core.advice import answer, sold_gpu, usual_gpu

pytestmark = pytest.mark.usefixtures("one_load")

LOAD = {"load": ("SanaNodesLoader", {"model": "sana-tiny"})}


@pytest.fixture
def latent():
    """A function of a shape: noise of that shape, and a graph with it."""

    def build(*shape, spoil=None):
        samples = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        if spoil is not None:
            samples[0, 3, 2, 1] = spoil

        return samples, {**LOAD, "noise": ("AnyValue", {"value": {"samples": samples}})}

    return build


def assert_same(got, expected):
    """Equal but for the last bits, which kernels of several threads leave to the size of their input."""
    assert got.shape == expected.shape
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def decoded(host, graph, node="SanaNodesDecode", **inputs):
    graph = {
        **graph,
        "decode": (node, {"samples": ["noise", 0], "vae": ["load", 2], **inputs}),
        "catch": ("Catch", {"value": ["decode", 0], "name": "image"}),
    }
    if node == "SanaNodesDecode":
        graph["catch report"] = ("Catch", {"value": ["decode", 1], "name": "report"})
    return host.run(graph)


@pytest.fixture
def undivided(host, latent, checkpoint):
    """The library's undivided decode of a latent, as an IMAGE."""
    from diffusers import AutoencoderDC

    vae = AutoencoderDC.from_pretrained(checkpoint / "vae")

    @torch.no_grad()
    def decode(samples):
        return ((vae.decode(samples).sample + 1) / 2).clamp(0, 1).movedim(1, -1)

    return decode


@pytest.mark.parametrize("shape", [(1, 32, 1, 1), (2, 32, 9, 7), (1, 32, 16, 24)])
def test_core_s_decode_nodes_give_the_undivided_pixels(host, latent, undivided, shape):
    samples, graph = latent(*shape)
    expected = undivided(samples)
    ours = decoded(host, graph)["image"]
    assert_same(ours, expected)
    assert torch.equal(decoded(host, graph, "VAEDecode")["image"], ours)
    tiled = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
    assert_same(decoded(host, graph, "VAEDecodeTiled", **tiled)["image"], expected)


@pytest.mark.parametrize("options", [{"method": "strips", "budget_gb": 0.02}, {"method": "whole"}, {"devices": "all"}])
def test_every_exact_option_gives_the_same_pixels_and_a_report(host, latent, undivided, options):
    samples, graph = latent(1, 32, 12, 10)
    got = decoded(host, graph, **options)
    assert_same(got["image"], undivided(samples))
    first, plan = got["report"].splitlines()
    assert re.fullmatch(r"(\d+ strips|decoded) in \d+\.\d s, peak \d+ MB predicted", first)
    assert plan.startswith(options.get("method", "strips"))


def test_the_report_counts_all_groups_of_images(host, latent, undivided, monkeypatch):
    """ComfyUI decodes several images together if they fit into the free memory."""
    from comfy.model_patcher import ModelPatcher

    samples, graph = latent(3, 32, 12, 10)
    options = {"method": "strips", "budget_gb": 0.02}
    together = decoded(host, graph, **options)
    real = ModelPatcher.get_free_memory
    monkeypatch.setattr(
        ModelPatcher, "get_free_memory", lambda self, device: 1 if self is not None else real(self, device)
    )
    groups = decoded(host, graph, **options)
    assert_same(groups["image"], undivided(samples))
    strips = [re.search(r"(\d+) strips", got["report"])[1] for got in (together, groups)]
    assert strips[0] == strips[1] and int(strips[0]) % 3 == 0


def test_tiles_have_the_right_size(host, latent):
    _, graph = latent(1, 32, 33, 3)
    assert decoded(host, graph, method="tiles")["image"].shape == (1, 1056, 96, 3)


def test_core_s_encode_nodes_give_the_library_s_latents(host, latent, checkpoint):
    from diffusers import AutoencoderDC

    _, graph = latent(1, 32, 9, 7)
    graph["decode"] = ("SanaNodesDecode", {"samples": ["noise", 0], "vae": ["load", 2]})
    graph["encode"] = ("VAEEncode", {"pixels": ["decode", 0], "vae": ["load", 2]})
    tiled = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
    graph["encode tiled"] = ("VAEEncodeTiled", {"pixels": ["decode", 0], "vae": ["load", 2], **tiled})
    for name in ("decode", "encode", "encode tiled"):
        graph["catch " + name] = ("Catch", {"value": [name, 0], "name": name})
    got = host.run(graph)
    with torch.no_grad():
        vae = AutoencoderDC.from_pretrained(checkpoint / "vae")
        expected = vae.encode(got["decode"].movedim(-1, 1) * 2 - 1).latent
    for name in ("encode", "encode tiled"):
        torch.testing.assert_close(got[name]["samples"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["authors", "diffusers"])
def test_dc_ae_lite_loads_decodes_and_encodes(host, latent, layout):
    import layouts
    import mit_dc_ae

    config = mit_dc_ae.narrow(mit_dc_ae.LITE)
    tensors = mit_dc_ae.tensors(config)
    file = layouts.save(tensors, host.models / "vae" / "lite.safetensors")
    samples, graph = latent(1, 32, 7, 5)
    graph["load"] = ("SanaNodesVAELoader", {"vae_name": file.name})
    graph["decode"] = ("SanaNodesDecode", {"samples": ["noise", 0], "vae": ["load", 0], "budget_gb": 0.4})
    graph["core"] = ("VAEDecode", {"samples": ["noise", 0], "vae": ["load", 0]})
    tiled = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
    graph["tiled"] = ("VAEDecodeTiled", {"samples": ["noise", 0], "vae": ["load", 0], **tiled})
    graph["encode"] = ("VAEEncode", {"pixels": ["decode", 0], "vae": ["load", 0]})
    for name, slot in (("load", 0), ("decode", 0), ("core", 0), ("tiled", 0), ("encode", 0)):
        graph["catch " + name] = ("Catch", {"value": [name, slot], "name": name})
    graph["catch report"] = ("Catch", {"value": ["decode", 1], "name": "report"})
    got = host.run(graph)
    if layout == "diffusers":
        layouts.save(got["load"].first_stage_model.state_dict(), file)
        got = host.run(graph)
    file.unlink()
    reference = mit_dc_ae.Reference(config, tensors)
    expected = ((reference.decode(samples.double()) + 1) / 2).clamp(0, 1).movedim(1, -1)
    for name in ("decode", "core", "tiled"):
        assert_same(got[name].double(), expected)
    assert "\nstrips of " in got["report"] and "attention" not in got["report"]
    encoded = reference.encode(got["decode"].double().movedim(-1, 1) * 2 - 1)
    assert_same(got["encode"]["samples"].double(), encoded)


@pytest.mark.parametrize("node", ["SanaNodesDecode", "VAEDecode"])
def test_nan_is_an_error_and_not_a_black_picture(host, latent, node):
    _, graph = latent(1, 32, 4, 4, spoil=float("nan"))
    with pytest.raises(NodeError, match="^samples: 1 of 512 values are NaN or infinite, the first in image 0, channel"):
        decoded(host, graph, node)


def test_a_budget_below_the_floor_says_the_smallest_that_works(host, latent):
    _, graph = latent(1, 32, 4, 4)
    with pytest.raises(NodeError, match=r"^budget_gb: got 0.001, expected at least 0\.\d+ for an image of 128 x 128"):
        decoded(host, graph, budget_gb=0.001)


LINKED = [
    ("budget_gb", -1.0, "a number from 0 to 1024.0$"),
    ("method", "some", "one of"),
    ("devices", "some", "one of"),
]


@pytest.mark.parametrize("name, value, expected", LINKED)
def test_what_comes_through_a_link_is_checked(host, latent, name, value, expected):
    _, graph = latent(1, 32, 4, 4)
    graph["value"] = ("AnyValue", {"value": value})
    with pytest.raises(NodeError, match=f"^{name}: got {value!r}, expected {expected}"):
        decoded(host, graph, **{name: ["value", 0]})


@pytest.mark.parametrize(
    "method, poll", [*[("strips", poll) for poll in (6, 9, 15, 30)], ("whole", 50), ("whole", 200), ("tiles", 50)]
)
def test_cancel_ends_a_decode_at_once_and_the_next_one_is_whole(host, latent, monkeypatch, method, poll):
    import comfy.model_management

    _, graph = latent(1, 32, 16, 12)
    options = {"method": method, "budget_gb": 0.05 if method == "strips" else 0.0}
    expected = decoded(host, graph, **options)["image"]
    check, calls = comfy.model_management.throw_exception_if_processing_interrupted, []
    autoencoder, begun = pack("nodes.host.loading.vae").SanaAutoencoder, []
    decode = autoencoder.decode

    def begin(self, *args, **kwargs):
        begun.append(self)
        return decode(self, *args, **kwargs)

    def count():
        # loading polls too
        calls.extend(begun)
        if len(calls) == poll:
            host.nodes.interrupt_processing()
        check()

    monkeypatch.setattr(autoencoder, "decode", begin)
    monkeypatch.setattr(comfy.model_management, "throw_exception_if_processing_interrupted", count)
    with pytest.raises(InterruptedError) as stopped:
        decoded(host, graph, **options)
    assert stopped.value.args == ("decode",) and len(calls) == poll
    monkeypatch.undo()
    gc.collect()
    assert torch.equal(decoded(host, graph, **options)["image"], expected)


def test_memory_that_runs_out_shrinks_the_strips_in_core_s_decode_too(host, latent, undivided, monkeypatch):
    rows = pack("sana_core.decode.streaming")
    convolve, calls = rows.convolve, []

    def fail_once(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory")
        return convolve(*arguments)

    monkeypatch.setattr(rows, "convolve", fail_once)
    samples, graph = latent(1, 32, 16, 12)
    assert_same(decoded(host, graph, "VAEDecode")["image"], undivided(samples))
    assert len(calls) > 4


def test_progress_counts_rows(host, latent, watched):
    seen = []
    watched(lambda value, total, preview: seen.append((value, total)))
    decoded(host, latent(1, 32, 16, 4)[1])
    assert seen[-1] == (512, 512)


def test_the_predicted_memory_is_what_core_reserves(host, latent):
    vae = host.output_of("SanaNodesLoader", 2, model="sana-tiny")
    small, large = (vae.memory_used_decode((1, 32, side, side), torch.float32) for side in (4, 64))
    assert 0 < small < large < 0.2 * 2178 * 64 * 64 * 64 * 4
    assert vae.memory_used_encode((1, 3, 128, 128), torch.float32) > 0


def test_the_plan_is_a_chart_and_text(host):
    options = {"variant": "1.6B", "width": 4096, "height": 4096, "batch_size": 1}
    chart, figures = (host.output_of("SanaNodesPlan", slot, **options) for slot in (0, 1))
    assert chart.shape == (1, 300, 900, 3) and chart.std() > 0.05
    assert "decode, whole: not possible" in figures and "decode, strips: " in figures


@pytest.mark.parametrize("gpu", ["this computer", "8 GB", "12 GB"])
def test_the_plan_begins_with_its_answer(host, gpu):
    inputs = {"variant": "recommended", "width": 1024, "height": 1024, "batch_size": 1, "gpu": gpu}
    first, *lines = host.output_of("SanaNodesPlan", 1, **inputs).splitlines()
    expected = usual_gpu() if gpu == "this computer" else sold_gpu(int(gpu.split()[0]))
    assert first == answer(expected)[0]
    cpu = [line for line in lines if line.startswith("This computer has no GPU. Its CPU computes in fp32")]
    assert bool(cpu) == (gpu == "this computer")


def test_the_plan_of_a_gpu_without_bf16_says_so_in_three_lines(host, monkeypatch):
    import comfy.model_management as management

    size = {"width": 1024, "height": 1024, "batch_size": 1}
    short = host.output_of("SanaNodesPlan", 0, **size, variant="1.6B", gpu="8 GB")
    monkeypatch.setattr(management, "get_torch_device", lambda: torch.device("meta"))
    monkeypatch.setattr(management, "get_total_memory", lambda device: 8 * 2**30)
    monkeypatch.setattr(management, "should_use_bf16", lambda device: False)
    chart, figures = (host.output_of("SanaNodesPlan", slot, **size, variant="recommended") for slot in (0, 1))
    assert figures.startswith("This GPU (8 GB): use 1.6B at 1024 px in fp32 (it has no bf16); part of the text encoder")
    # The third line pushes the bars down, and only paper is at the right edge.
    assert short.shape[1] == 300 < chart.shape[1]
    assert bool((chart[:, :, -20:] == chart[0, 0, 0]).all())


def test_comfyui_clears_the_other_cards_for_their_decoders(host, latent, undivided, monkeypatch):
    import comfy.model_management as management

    cpu, second = torch.device("cpu"), torch.device("cpu", 0)
    cleared, real = [], management.free_memory
    monkeypatch.setattr(management, "get_all_torch_devices", lambda exclude_current=False: [cpu, second])
    monkeypatch.setattr(
        management, "free_memory", lambda size, device, *a, **k: cleared.append((size, device)) or real(size, device)
    )
    samples, graph = latent(1, 32, 16, 12)
    got = decoded(host, graph, devices="all")
    assert_same(got["image"], undivided(samples))
    ((size, device),) = [item for item in cleared if item[1] == second]
    vae = host.output_of("SanaNodesLoader", 2, model="sana-tiny")
    assert size == vae.model_size() + vae.memory_used_decode(samples.shape, torch.float32)
