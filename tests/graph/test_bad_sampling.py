"""Wrong use of sampling, guidance and SANA-Sprint gives one short error that names the field and the remedy."""

import math
import re

import pytest
import torch
from in_process import NodeError
from loading import ksampler, through

pytestmark = pytest.mark.usefixtures("one_load")


def error(host, graph):
    with pytest.raises(NodeError) as caught:
        host.run(graph)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, message
    return message


def on(graph, model):
    graph["load"][1]["model"] = model
    return graph


def test_blocks_that_the_model_has_not(host, base_graph):
    message = error(host, through(base_graph(), "SanaNodesPAG", scale=2.0, blocks="9" * 500))
    assert re.fullmatch(r"blocks: got '.*, expected numbers from 0 to 4, like 8 or 7, 8", message), message


def test_an_interval_that_ends_before_it_starts(host, base_graph):
    graph = through(base_graph(), "SanaNodesGuidanceInterval", start=0.6, end=0.4)
    assert error(host, graph) == "end: got 0.4, expected a number from 0.6 to 1"


def test_sprint_in_other_samplers_and_other_models_in_scm(host, base_graph, custom_graph, variants):
    distilled = "for which it was distilled"
    use = "; use SANA Sampler with model_defaults, or lcm with cfg 1$"
    for sampler in ("flow_dpmpp_2m", "flow_euler"):
        expected = f"sampler: got {sampler} for SANA-Sprint, expected scm, {distilled}; choose that"
        assert error(host, on(base_graph(sampler=sampler), "sprint")) == expected
        assert error(host, on(custom_graph(sampler, guidance=1.0), "sprint")) == expected
    for name in ("euler", "dpmpp_2m", "uni_pc"):
        message = error(host, ksampler(on(base_graph(), "sprint"), sampler_name=name, cfg=1.0))
        assert re.search(f"^sampler_name: got .* for SANA-Sprint, expected scm, {distilled}{use}", message), message
    message = error(host, ksampler(on(base_graph(), "sprint"), sampler_name="lcm", cfg=4.5))
    assert re.search(f"^cfg: got 4.5 for SANA-Sprint, .* expected 1{use}", message), message

    links = {"model": ["load", 0], "positive": ["positive", 0], "latent_image": ["empty", 0]}
    sprint = {**base_graph(), "sample": ("SanaNodesSprint", {**links, "seed": 0, "steps": 2, "guidance": 4.5})}
    for graph in (base_graph(sampler="scm"), custom_graph("scm"), sprint):
        message = error(host, graph)
        assert re.search(
            "^sampler: got scm for SANA, expected another, .* SANA-Sprint 1.6B; choose flow_dpmpp", message
        )
    pag = through(on(base_graph(), "sprint"), "SanaNodesPAG", scale=2.0)
    assert error(host, pag).startswith("model: got a SANA-Sprint")
    assert host.run(base_graph(steps=1))["image"].isfinite().all()


def test_model_sampling_of_another_kind_in_core_s_sampler(host, base_graph):
    """In ours too, of each node: test_core_nodes_table.py."""
    graph = through(base_graph(), "ModelSamplingDiscrete", sampling="eps", zsnr=False)
    message = (
        r"^model: got a ModelSampling of another kind \(\w+, \w+\), expected flow matching; remove that node, or use "
    )
    assert re.search(message, error(host, ksampler(graph)))


def test_model_sampling_of_the_same_kind_with_another_shift(host, base_graph):
    plain = host.run(base_graph(steps=3))["latent"]["samples"]
    expected = host.run(through(base_graph(steps=3), "ModelSamplingSD3", shift=6.0))["latent"]["samples"]
    aura = host.run(through(base_graph(steps=3), "ModelSamplingAuraFlow", shift=6.0))["latent"]["samples"]
    size = {"width": 1024, "height": 1024, "max_shift": math.log(6.0), "base_shift": math.log(6.0)}
    flux = host.run(through(base_graph(steps=3), "ModelSamplingFlux", **size))["latent"]["samples"]
    assert (expected - plain).abs().max() > 0.01
    assert torch.equal(aura, expected)
    torch.testing.assert_close(flux, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pictures", [1, 2])
def test_a_batch_that_has_no_picture_for_each_prompt(host, base_graph, pictures):
    graph = base_graph(batch_size=pictures)
    graph["positive"] = ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": "a\nb\nc", "instruction": True})
    message = (
        f"positive: got 3 prompts for a batch of {pictures}, expected a batch_size of 3; set it so, "
        "or use SANA Batch Sampler"
    )
    assert error(host, graph) == message
    assert error(host, ksampler(graph)) == message


def test_a_batch_that_the_prompts_fill_twice(host, base_graph):
    graph = base_graph(batch_size=4, steps=1)
    graph["positive"] = ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": "a\nb", "instruction": True})
    assert len(host.run(graph)["image"]) == 4


@pytest.mark.parametrize("field, value", [("size", "768"), ("ratio", "1.5"), ("size", None), ("ratio", {})])
def test_a_resolution_that_is_not_on_the_list(host, base_graph, field, value):
    graph = base_graph()
    inputs = {"size": "1024", "ratio": "1.0", field: ["value", 0]}
    graph["value"] = ("AnyValue", {"value": value})
    graph["resolution"] = ("SanaNodesResolution", inputs)
    graph["empty"][1].update(width=["resolution", 0], height=["resolution", 1])
    assert re.search(f"^{field}: got {value!r}, expected one of ", error(host, graph))


def test_a_list_without_prompts(host, base_graph):
    graph = base_graph()
    graph["positive"] = ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": " \n\n", "instruction": True})
    assert error(host, graph) == "prompts: got 0 prompts, expected 1 to 4096; write one a line"


def test_embeddings_of_another_text_encoder(host, base_graph):
    graph = base_graph()
    graph["positive"] = ("AnyValue", {"value": {"__value__": [[torch.zeros(1, 300, 7), {}]]}})
    expected = "^positive: got embeddings of width 7, expected [0-9]+; use the text encoder of this model$"
    assert re.search(expected, error(host, graph))


def test_joined_prompts(host, base_graph):
    graph = base_graph()
    graph["joined"] = ("ConditioningConcat", {"conditioning_to": ["positive", 0], "conditioning_from": ["positive", 0]})
    graph["sample"][1]["positive"] = ["joined", 0]
    assert re.search("^positive: got a mask of shape .* SANA cannot join prompts, write one text$", error(host, graph))


def test_a_lone_surrogate_in_a_prompt(host, base_graph):
    message = error(host, base_graph(text="a \ud83d circle"))
    assert message == "text: contains half a character (a lone surrogate) at position 2; write the text again"


def test_the_models_of_others(host, base_graph):
    import comfy.model_base
    import comfy.model_patcher
    import comfy.supported_models_base

    config = comfy.supported_models_base.BASE({"disable_unet_model_creation": True})
    model = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.FLOW)
    other = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    message = "model: got BaseModel, expected a SANA model; use SANA Loader"
    for node, inputs in (("SanaNodesPAG", {"scale": 2.0}), ("SanaNodesGuidanceInterval", {"start": 0.0, "end": 1.0})):
        graph = base_graph()
        graph["other"] = ("AnyValue", {"value": other})
        graph["sample"][1]["model"] = ["other", 0]
        assert error(host, graph) == message
        assert error(host, through(graph, node, **inputs)) == message


@pytest.mark.parametrize("steps, denoise, guidance", [(1, 1.0, 1.0), (1, 0.01, 0.0), (2, 0.5, 1.0), (20, 0.999, 4.5)])
def test_numbers_at_the_ends_of_their_ranges_draw(host, base_graph, steps, denoise, guidance):
    graph = base_graph(steps=steps, denoise=denoise, guidance=guidance)
    assert host.run(graph)["image"].isfinite().all()


def test_denoise_0_gives_the_latent_back(host, base_graph):
    graph = base_graph()
    graph["again"] = ("SanaNodesSampler", {**graph["sample"][1], "latent_image": ["sample", 0], "denoise": 0.0})
    graph["catch again"] = ("Catch", {"value": ["again", 0], "name": "again"})
    got = host.run(graph)
    assert torch.equal(got["again"]["samples"], got["latent"]["samples"])


def test_a_plain_value_in_place_of_a_sampler(host, custom_graph):
    graph = custom_graph("flow_euler")
    graph["sample"][1]["sampler"] = 0
    assert error(host, graph) == "sampler: got 0, expected a SAMPLER; connect an output of that type"
