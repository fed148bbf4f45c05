"""Wrong shapes and types through ComfyUI's nodes end in one line."""

import re

import pytest
import torch
from in_process import NodeError
from wrong_tensors import DECODES, ENCODES, base, cases, outcome

pytestmark = pytest.mark.usefixtures("one_load")

TILED = ("VAEDecodeTiled", "VAEEncodeTiled")


def node_fails(host, node, inputs, wrong):
    """The message with which `node` refuses the value `wrong`, a link."""
    field = "pixels" if node in ENCODES else "samples"
    mask = ("SolidMask", {"value": 1.0, "width": 64, "height": 64})
    graph = {**base(), "mask": mask, "value": ("AnyValue", {"value": wrong})}
    graph["sample"] = (node, {field: ["value", 0], "vae": ["load", 2], **inputs})
    with pytest.raises(NodeError) as caught:
        host.run(graph)
    return str(caught.value)


@pytest.mark.parametrize("size", [(1, 1), (31, 31), (64, 31), (31, 64), (8, 512), (512, 8), (16, 16), (0, 64), (30, 1)])
@pytest.mark.parametrize("node", [name for name in ENCODES if name != "VAEEncodeForInpaint"])
def test_images_below_32_pixels_are_refused_with_their_own_size(host, node, size):
    width, height = size
    said = node_fails(host, node, ENCODES[node], torch.ones(1, height, width, 3))
    # InpaintModelConditioning crops to multiples of 8 first
    step = 8 if node == "InpaintModelConditioning" else 1
    if 0 in (width // step, height // step) and node == "InpaintModelConditioning":
        assert said
    else:
        shown = f"{width // step * step} x {height // step * step}"
        assert said == f"pixels: got images of {shown}, expected at least 32 x 32; scale them"


SHAPES = [
    (0, 32, 4, 4),
    (1, 32, 0, 4),
    (1, 32, 4, 0),
    (32, 4, 4),
    (32,),
    (),
    (1, 32, 0, 4, 4),
    (1, 4, 8, 8),
    # ComfyUI's KSampler fails at this shape before it calls a model.
    (0, 0, 0, 0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("node", DECODES)
def test_malformed_latents_are_refused_by_each_decode(host, node, shape):
    said = node_fails(host, node, DECODES[node], {"samples": torch.rand(shape)})
    message = f"samples: got a latent of shape {list(shape)}, expected [batch, 32, height / 32, width / 32]"
    if len(shape) == 5 and node == "SanaNodesDecode":
        message = "samples: got the latent of a video, expected one of images"
    assert said.startswith(message)


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("node", ["KSampler", "SamplerCustomAdvanced", "SanaNodesSampler", "SanaNodesBatchSampler"])
def test_malformed_latents_are_refused_by_each_sampler(host, node, shape):
    graph = {**base(node, latent_image=["value", 0]), "value": ("AnyValue", {"value": {"samples": torch.rand(shape)}})}
    with pytest.raises(NodeError, match=r"^latent_image: got a latent of shape \["):
        host.run(graph)


@pytest.mark.parametrize("factor", [1e20, 1e30, -1e30, 3e38])
@pytest.mark.parametrize("node", DECODES)
def test_latents_that_overflow_in_the_decoder_are_an_error(host, node, factor):
    latents = factor * torch.ones(2, 32, 4, 4)
    latents[0] = 0
    said = node_fails(host, node, DECODES[node], {"samples": latents})
    message = (
        r"^samples: image 1 has NaN or infinity after the decode, because its latents reach \S+, expected about 10; "
    )
    assert pytest.approx(abs(factor), rel=0.01) == float(said.split("reach ")[1].split(",")[0]), said
    assert re.match(message, said), said


def test_a_batch_whose_decoder_overflows_names_its_images(host, monkeypatch):
    # This test changes the weights of the VAE.
    monkeypatch.setattr(host, "loaded", None)
    vae = host.output_of("SanaNodesLoader", 2, model="sana-tiny")
    with torch.inference_mode():
        vae.first_stage_model.decoder.conv_out.bias.fill_(float("inf"))
    graph = base("SanaNodesBatchSampler", vae=["value", 0], count=3)
    graph["value"] = ("AnyValue", {"value": vae})
    expected = r"^model: all 3 images failed \(image 1 \(seed 3\): image: [0-9]+ of [0-9]+ values are NaN or infinite, "
    with pytest.raises(NodeError, match=expected):
        host.run(graph)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_no_wrong_value_is_a_bare_error(host, step):
    every = list(cases())
    ends = {case.name: outcome(host, case) for case in every[::step]}
    assert len(every) > 500 and len(ends) > 60
    assert not {name: said for name, (end, said) in ends.items() if end == "bare" or "\n" in said}
    assert sum(end == "refused" for end, _ in ends.values()) > len(ends) / 3
