"""SANA Batch Sampler with a real process for the second device. Its images are ComfyUI's in every bit."""

import multiprocessing
import os
import re
import signal
import time

import pytest
import torch
from fake_cuda import pack
from in_process import NodeError
from test_batch_sampler import TWO, batch_graph, with_lora  # noqa: F401
from test_several_gpus import files  # noqa: F401

# the same bits need the same threads
pytestmark = [pytest.mark.usefixtures("one_thread", "one_load"), pytest.mark.timeout(600)]


@pytest.fixture
def by_process(host, monkeypatch, node_texts):
    """A function of a graph: what it gives if a process generates all images of its batch.

    The thread of the MODEL's own device is left out at its first images, because its driver fails.
    """

    def generate(body, *inputs):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def run(graph):
        with monkeypatch.context() as patch:
            patch.setattr(pack("nodes.host.batch.devices").CanvasBody, "generate", generate)
            batch = {**graph["batch"][1], "devices": TWO}
            got = host.run({**graph, "batch": ("SanaNodesBatchSampler", batch)}, keep_cache=True)
        text = next(text for node, text in reversed(node_texts) if node == "batch" and " images in " in text)
        assert re.search(r"cpu 0, cpu #2 [1-9]", text), text
        return got

    return run


@pytest.fixture
def check(host, by_process):
    """A function of a graph: the process generates the same bits as this one. Returns the image."""

    def run(graph):
        expected = host.run(graph, keep_cache=True)
        got = by_process(graph)
        assert expected.keys() == got.keys()
        latents, reference = got["latent"]["samples"], expected["latent"]["samples"]
        assert torch.equal(latents, reference), (latents - reference).abs().max()
        for name in expected.keys() - {"latent"}:
            assert torch.equal(got[name], expected[name]), (name, (got[name] - expected[name]).abs().max())
        return got.get("image")

    return run


def through(graph, kind, name="patch", **inputs):
    """Put a node between the batch and what gives it its MODEL."""
    graph[name] = (kind, {"model": graph["batch"][1]["model"], **inputs})
    graph["batch"][1]["model"] = [name, 0]
    return graph


def from_image(graph, mask=False):
    """Let the batch start from a picture, and with a mask change a part of it."""
    graph["edges"] = ("AnyValue", {"value": torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(6))})
    graph["encode"] = ("VAEEncode", {"pixels": ["edges", 0], "vae": ["load", 2]})
    graph["batch"][1]["latent_image"] = ["encode", 0]
    if mask:
        area = torch.zeros(1, 128, 128)
        area[:, :, 64:] = 1
        graph["mask"] = ("AnyValue", {"value": area})
        graph["masked"] = ("SetLatentNoiseMask", {"samples": ["encode", 0], "mask": ["mask", 0]})
        graph["batch"][1]["latent_image"] = ["masked", 0]
    return graph


def with_control(graph, name, **options):
    """Put the ControlNet of the file `several.safetensors` before the batch. Repeated, it makes a chain."""
    links = {field: graph["batch"][1][field] for field in ("positive", "negative")}
    generator = torch.Generator().manual_seed(len(graph))
    graph[f"{name} edges"] = ("AnyValue", {"value": torch.rand(1, 128, 128, 3, generator=generator)})
    graph[f"{name} net"] = ("SanaNodesControlNetLoader", {"control_net_name": "several.safetensors"})
    inputs = {"control_net": [f"{name} net", 0], "image": [f"{name} edges", 0], "vae": ["load", 2], **links}
    inputs |= {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, **options}
    graph[name] = ("ControlNetApplyAdvanced", inputs)
    graph["batch"][1].update(positive=[name, 0], negative=[name, 1])
    return graph


def test_plain_images(batch_graph, check):  # noqa: F811
    check(batch_graph(count=2))


@pytest.mark.parametrize("sampler", ["flow_euler", "flow_heun"])
def test_images_of_other_samplers_with_a_chunk_that_fits(batch_graph, check, sampler):  # noqa: F811
    check(batch_graph(count=1, sampler=sampler, chunk=0, guidance=1.0 if sampler == "flow_heun" else 3.0))


def test_a_lora_on_and_off_and_on(batch_graph, with_lora, check):  # noqa: F811
    first, plain, again = (check(build(count=1)) for build in (with_lora, batch_graph, with_lora))
    assert torch.equal(first, again) and not torch.equal(first, plain)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_lora_that_the_device_cannot_merge_now(host, with_lora, by_process, monkeypatch, caplog, failures):  # noqa: F811
    """A GPU without memory leaves it to the CPU. If that fails too, the process is left out and the thread goes on."""
    job, calls = pack("nodes.host.batch.job"), []
    real = job.changed_weights

    def changed_weights(*args):
        calls.append(args)
        if len(calls) <= failures:
            raise torch.OutOfMemoryError("fake")
        return real(*args)

    expected = host.run(with_lora(), keep_cache=True)["image"]
    monkeypatch.setattr(job, "changed_weights", changed_weights)
    # Another strength makes another revision.
    graph = with_lora()
    graph["lora"][1]["strength_model"] = 0.5
    if failures == 1:
        changed = by_process(graph)["image"]
        assert not torch.equal(changed, expected)
    else:
        body = pack("nodes.host.batch.devices").CanvasBody
        generate = body.generate

        def generate_later(self, *inputs):
            while len(calls) < 2:
                self.poll()
                time.sleep(0.02)
            generate(self, *inputs)

        monkeypatch.setattr(body, "generate", generate_later)
        graph["batch"][1]["devices"] = TWO
        changed = host.run(graph, keep_cache=True)["image"]
        assert "cpu #2 is left out: OutOfMemoryError: fake" in caplog.text
    graph["batch"][1]["devices"] = "default"
    assert torch.equal(host.run(graph, keep_cache=True)["image"], changed) and len(calls) == 2


def test_guidance_patches_and_another_shift(batch_graph, check):  # noqa: F811
    plain = check(batch_graph(count=1))
    images = []
    for kind, inputs in (
        ("SanaNodesPAG", {"scale": 2.0, "blocks": "2"}),
        ("SanaNodesGuidanceInterval", {"start": 0.2, "end": 0.7}),
        ("ModelSamplingSD3", {"shift": 1.5}),
        ("ModelSamplingAuraFlow", {"shift": 2.0}),
    ):
        images.append(check(through(batch_graph(count=1), kind, **inputs)))
    assert all((image - plain).abs().mean() > 1e-3 for image in images)
    check(
        through(
            through(batch_graph(count=1), "SanaNodesPAG", scale=2.0, blocks="2"), "ModelSamplingSD3", "s", shift=5.0
        )
    )


def test_images_that_start_from_an_image(batch_graph, check):  # noqa: F811
    whole, part = check(from_image(batch_graph(count=1))), check(from_image(batch_graph(count=1), mask=True))
    assert not torch.equal(whole, part)


def test_controlnets(batch_graph, with_lora, files, check):  # noqa: F811
    plain = check(batch_graph(count=1))
    one = check(with_control(batch_graph(count=1), "a"))
    weak = check(with_control(batch_graph(count=1), "a", strength=0.6, start_percent=0.2, end_percent=0.7))
    chain = with_control(with_control(with_lora(count=1), "a", strength=0.5), "b", end_percent=0.6)
    both = check(through(chain, "SanaNodesPAG", "pag", scale=2.0, blocks="2"))
    assert all((image - plain).abs().mean() > 1e-3 for image in (one, weak, both))
    # Files of the models that are loaded stay as they are.
    assert torch.equal(check(batch_graph(count=1)), plain)


def test_nvidia_s_reference_and_weights_of_eight_bits(batch_graph, check):  # noqa: F811
    for inputs in ({"reference": "nvidia"}, {"weight_dtype": "fp8_e4m3fn"}, {"resolution": "512"}):
        graph = batch_graph(count=1)
        graph["load"][1].update(inputs)
        check(graph)


def test_sana_sprint(batch_graph, check, variants):  # noqa: F811
    graph = batch_graph(count=1, sampler="scm", steps=2)
    graph["load"][1]["model"] = "sprint"
    # The model has no negative prompt, so two of them have no effect.
    graph["combine"] = ("ConditioningCombine", {"conditioning_1": ["negative", 0], "conditioning_2": ["negative", 0]})
    graph["batch"][1]["negative"] = ["combine", 0]
    check(graph)


def test_single_files_and_no_vae(batch_graph, check, single_files):  # noqa: F811
    graph = batch_graph(count=1)
    del graph["load"]
    graph.update(single_files)
    graph["batch"][1].update(model=["model", 0], vae=["vae", 0])
    for name in ("list", "negative"):
        graph[name][1]["clip"] = ["clip", 0]
    check(graph)
    del graph["batch"][1]["vae"], graph["catch image"]
    check(graph)


def test_a_killed_process_loses_no_image(host, batch_graph, by_process, watched):  # noqa: F811
    expected = host.run(batch_graph())["image"]
    killed = []

    def kill(value, total, preview):
        # A killed process may be there for a while, beside the next one.
        for child in multiprocessing.active_children():
            if len(killed) < 2 and child.name == "sana cpu #2" and child.pid not in killed:
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)

    watched(kill)
    assert torch.equal(by_process(batch_graph())["image"], expected)
    assert len(killed) == 2


def test_previews_of_a_process_show_x0_at_most_five_times_a_second(batch_graph, by_process, watched):  # noqa: F811
    seen = []
    watched(lambda value, total, preview: seen.append((time.monotonic(), value, total, preview)))
    by_process(batch_graph(steps=20))
    assert [value for _, value, *_ in seen[:5]] == [1, 2, 3, 4, 5] and seen[-1][1:3] == (6 * 20, 6 * 20)
    shown = [moment for moment, _, _, preview in seen if preview is not None]
    # The chart of the devices comes at the end.
    assert len(shown) > 2 and all(after - before > 0.19 for before, after in zip(shown, shown[1:-1], strict=False))


def test_cancel_ends_the_process_s_work_and_the_next_queue_is_whole(host, batch_graph, by_process, watched):  # noqa: F811
    expected = host.run(batch_graph(count=8))["image"]
    moments = []

    def cancel(value, total, preview):
        if not moments:
            moments.append(time.monotonic())
            host.nodes.interrupt_processing()

    watched(cancel)
    with pytest.raises(InterruptedError):
        by_process(batch_graph(count=8))
    # The target is a second. Machines of tests are busy.
    assert time.monotonic() - moments[0] < 3
    assert torch.equal(by_process(batch_graph(count=8))["image"], expected)


def test_images_with_nan_cost_no_others(host, batch_graph, by_process, node_texts):  # noqa: F811
    graph = batch_graph(count=2)
    graph["catch positive"] = ("Catch", {"value": ["list", 0], "name": "positive"})
    caught = host.run(graph)
    ((embeds, options),) = caught["positive"]
    broken = embeds.clone()
    broken[1] = torch.nan
    graph["broken"] = ("AnyValue", {"value": {"__value__": [[broken, options]]}})
    graph["batch"][1]["positive"] = ["broken", 0]
    got = by_process(graph)["image"]
    assert torch.equal(got[:2], caught["image"][:2]) and not got[2:].any()
    note = r" of \d images failed and are black; image 3 \(seed 7\): samples: .* NaN or infinit"
    assert re.search(note, node_texts[-1][1])


def test_a_file_that_has_changed_since_it_was_loaded(host, batch_graph, single_files, node_texts):  # noqa: F811
    graph = batch_graph(count=1, vae=["vae", 0])
    graph.update(single_files)
    graph["batch"][1]["model"] = ["model", 0]
    graph["delay"] = ("Touch", {"model": ["model", 0]})
    graph["batch"][1]["model"] = ["delay", 0]
    path = host.models / "diffusion_models" / "sana.safetensors"

    class Touch:
        RETURN_TYPES, FUNCTION = ("MODEL",), "touch"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"model": ("MODEL",)}}

        def touch(self, model):
            os.utime(path, ns=(time.time_ns(),) * 2)
            return (model,)

    host.nodes.NODE_CLASS_MAPPINGS["Touch"] = Touch
    try:
        expected = host.run(graph)["image"]
        graph["batch"][1]["devices"] = TWO
        assert torch.equal(host.run(graph)["image"], expected)
    finally:
        del host.nodes.NODE_CLASS_MAPPINGS["Touch"]
    assert any("the file has changed since it was loaded" in text for _, text in node_texts)


def test_a_controlnet_without_a_vae_is_an_error(batch_graph, host, files):  # noqa: F811
    graph = with_control(batch_graph(devices=TWO), "a")
    del graph["a"][1]["vae"]
    with pytest.raises(NodeError, match="vae: got none in Apply ControlNet, expected a VAE"):
        host.run(graph)
