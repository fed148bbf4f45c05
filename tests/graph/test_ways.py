"""One file, one picture, whichever way it is drawn: by nodes, commands and in parts. A cluster is in tests/cluster."""

import pytest
import torch
from variants import SPRINT, make_variant
from ways import CASES, HEIGHT, POSTERS, REFERENCES, SEED, WIDTH, as_image, batched, check, generated, options

from sana_core.runtime.image_files import levels

# the same bits need the same threads
pytestmark = pytest.mark.usefixtures("one_thread", "one_load")


# Inputs of SamplerCustomAdvanced.
CUSTOM = ("noise", "guider", "sampler", "sigmas", "latent_image")


@pytest.fixture(scope="module")
def sprint(host, checkpoint):
    return make_variant(checkpoint, host.models / "diffusers" / "ways-sprint", **SPRINT)


def canvas_graph(case, reference, model, node):
    """The case on the canvas, its sampling by `node`."""
    settings = options(case, reference)
    graph = {
        "load": ("SanaNodesLoader", {"model": model, "reference": reference}),
        "positive": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": case.prompt, "instruction": True}),
        "negative": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": case.negative, "instruction": False}),
        "empty": ("SanaNodesEmptyLatent", {"width": WIDTH, "height": HEIGHT, "batch_size": 1}),
        "decode": ("SanaNodesDecode", {"samples": ["sample", 0], "vae": ["load", 2]}),
        "catch": ("Catch", {"value": ["decode", 0], "name": "image"}),
    }
    links = {"model": ["load", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
    if case.pag:
        graph["pag"] = ("SanaNodesPAG", {"model": ["load", 0], "scale": case.pag, "blocks": ""})
        links["model"] = ["pag", 0]
    if case.control:
        edges = torch.rand(1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(6))
        loader = {"control_net_name": "sana-posters-edges (bundled)", "reference": "diffusers"}
        inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["control", 0]}
        inputs |= {"image": ["edges", 0], "strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, "vae": ["load", 2]}
        graph["edges"] = ("AnyValue", {"value": edges})
        graph["control"] = ("SanaNodesControlNetLoader", loader)
        graph["apply"] = ("ControlNetApplyAdvanced", inputs)
        links |= {"positive": ["apply", 0], "negative": ["apply", 1]}
    ours = {"seed": SEED, **{name: settings[name] for name in ("steps", "guidance", "sampler")}}
    cores = {"seed": SEED, "steps": case.steps, "cfg": 4.5, "sampler_name": "euler", "scheduler": "normal"}
    guider = {
        "model": links["model"],
        "cfg": 1.0 if case.sprint else 4.5,
        "positive": links["positive"],
        "negative": links["negative"],
    }
    scheduler = {"model": links["model"], "sampler": case.sampler, "steps": case.steps, "denoise": 1.0}
    graph["noise"] = ("RandomNoise", {"noise_seed": SEED})
    graph["guider"] = ("CFGGuider", guider)
    graph["select"] = ("SanaNodesSamplerSelect", {"sampler": case.sampler})
    graph["sigmas"] = ("SanaNodesScheduler", scheduler)
    custom = {
        name: [key, 0] for name, key in zip(CUSTOM, ("noise", "guider", "select", "sigmas", "empty"), strict=True)
    }
    if node == "SamplerCustomAdvanced":
        return {**graph, "sample": (node, custom)}
    changes = {
        "SanaNodesSampler": {**ours, "latent_image": ["empty", 0]},
        "KSampler": {**cores, "denoise": 1.0, "latent_image": ["empty", 0]},
        "SanaNodesBatchSampler": {**ours, "count": 1, "latent_image": ["empty", 0], "devices": "default", "chunk": 0},
    }[node]
    return {**graph, "sample": (node, {**links, **changes})}


# Only the first two cases use diffusers' reference without the slow tests.
BOTH = [
    pytest.param(case, reference, id=f"{case.name}-{reference}", marks=pytest.mark.slow if twice else ())
    for case in CASES
    for reference in REFERENCES
    for twice in [reference == "diffusers" and case not in CASES[:2]]
]


@pytest.mark.parametrize("case, reference", BOTH)
def test_every_way_draws_the_same_picture(host, sprint, tmp_path, case, reference):
    def canvas(node):
        model = sprint.name if case.sprint else "sana-posters (bundled)"
        return host.run(canvas_graph(case, reference, model, node))["image"][0]

    checkpoint, expected = sprint if case.sprint else POSTERS, canvas("SanaNodesSampler")
    drawn = {"SamplerCustomAdvanced": canvas("SamplerCustomAdvanced")}
    if case.sampler == "flow_euler":
        drawn["KSampler"] = canvas("KSampler")
    if not case.control:
        picture = generated(case, reference, checkpoint)
        two, three = (generated(case, reference, checkpoint, devices=["cpu"] * n, split=True) for n in (2, 3))
        drawn["SANA Batch Sampler"] = canvas("SanaNodesBatchSampler")
        drawn["generate"], drawn["generate --split"] = as_image(picture), as_image(two)
        check("generate --split, 3 parts beside 2", case, reference, three, two)
        if case.prompt:
            written = batched(case, reference, checkpoint, tmp_path / "batch")
            check("batch", case, reference, written / 255, levels(picture) / 255)
    for way, image in drawn.items():
        check(way, case, reference, image, expected)
