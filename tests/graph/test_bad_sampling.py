"""Wrong use of sampling, guidance and SANA-Sprint gives one short error that names the field and the remedy."""

import math
import re

import pytest
import torch
from in_process import NodeError

CORE = {"seed": 3, "steps": 2, "cfg": 4.5, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}


def error(host, graph):
    with pytest.raises(NodeError) as caught:
        host.run(graph)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, message
    return message


def patched(graph, node, **inputs):
    graph["patch"] = (node, {"model": ["load", 0], **inputs})
    graph["sample"][1]["model"] = ["patch", 0]
    return graph


def ksampler(graph, **inputs):
    links = {key: graph["sample"][1][key] for key in ("model", "positive", "negative", "latent_image")}
    return {**graph, "sample": ("KSampler", {**links, **CORE, **inputs})}


def on(graph, model):
    graph["load"][1]["model"] = model
    return graph


@pytest.mark.parametrize("blocks", ["5", "-1", "1,,2", "8", "all", "1.5", "3 4", "9" * 500])
def test_blocks_that_the_model_has_not(host, base_graph, blocks):
    message = error(host, patched(base_graph(), "SanaNodesPAG", scale=2.0, blocks=blocks))
    assert re.fullmatch(r"blocks: got '.*, expected numbers from 0 to 4, like 8 or 7, 8", message), message


@pytest.mark.parametrize("scale", [-1.0, 1000.0, float("nan")])
def test_a_scale_out_of_range(host, base_graph, scale):
    graph = patched(base_graph(), "SanaNodesPAG", scale=["number", 0])
    graph["number"] = ("AnyValue", {"value": scale})
    assert error(host, graph) == f"scale: got {scale}, expected a number from 0 to 100.0"


def test_an_interval_that_ends_before_it_starts(host, base_graph):
    graph = patched(base_graph(), "SanaNodesGuidanceInterval", start=0.6, end=0.4)
    assert error(host, graph) == "end: got 0.4, expected a number from 0.6 to 1"


def test_sprint_in_other_samplers_and_other_models_in_scm(host, base_graph, custom_graph, variants):
    use = r"; use SANA Sprint(, or lcm with cfg 1)?$"
    for sampler in ("flow_dpmpp_2m", "flow_euler"):
        assert re.search(
            f"^sampler: got {sampler} for a SANA-Sprint model, expected scm{use}",
            error(host, on(base_graph(sampler=sampler), "sprint")),
        )
        assert re.search(use, error(host, on(custom_graph(sampler, guidance=1.0), "sprint")))
    for name in ("euler", "dpmpp_2m", "uni_pc"):
        message = error(host, ksampler(on(base_graph(), "sprint"), sampler_name=name, cfg=1.0))
        assert re.search(f"^sampler_name: got .* for a SANA-Sprint model, expected scm{use}", message), message
    message = error(host, ksampler(on(base_graph(), "sprint"), sampler_name="lcm", cfg=4.5))
    assert re.search(f"^cfg: got 4.5 for a SANA-Sprint model, .* expected 1{use}", message), message

    links = {"model": ["load", 0], "positive": ["positive", 0], "latent_image": ["empty", 0]}
    sprint = {**base_graph(), "sample": ("SanaNodesSprint", {**links, "seed": 0, "steps": 2, "guidance": 4.5})}
    for graph in (base_graph(sampler="scm"), custom_graph("scm"), sprint):
        message = error(host, graph)
        assert message == "sampler: got scm for a model that is not SANA-Sprint; use SANA Sampler with flow_dpmpp_2m"
    assert error(host, patched(on(base_graph(), "sprint"), "SanaNodesPAG", scale=2.0)).startswith(
        "model: got a SANA-Sprint"
    )
    assert host.run(base_graph(steps=1))["image"].isfinite().all()


OTHER_KINDS = [
    *[("ModelSamplingDiscrete", {"sampling": name, "zsnr": False}) for name in ("eps", "v_prediction", "lcm", "x0")],
    *[("ModelSamplingDiscrete", {"sampling": name, "zsnr": False}) for name in ("img_to_img", "img_to_img_flow")],
    *[
        ("ModelSamplingContinuousEDM", {"sampling": name, "sigma_max": 120.0, "sigma_min": 0.002})
        for name in ("edm", "eps", "v_prediction", "cosmos_rflow")
    ],
    ("ModelSamplingContinuousV", {"sampling": "v_prediction", "sigma_max": 500.0, "sigma_min": 0.03}),
    ("ModelSamplingStableCascade", {"shift": 2.0}),
]


@pytest.mark.parametrize(
    "node, inputs",
    OTHER_KINDS,
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_model_sampling_of_another_kind(host, base_graph, node, inputs):
    wanted = (
        r"^model: got a ModelSampling of another kind \(\w+, \w+\), expected flow matching; remove that node, or use "
    )
    for graph in (base_graph(), ksampler(base_graph())):
        assert re.search(wanted, error(host, patched(graph, node, **inputs)))


def test_model_sampling_of_the_same_kind_with_another_shift(host, base_graph):
    plain = host.run(base_graph(steps=3))["latent"]["samples"]
    expected = host.run(patched(base_graph(steps=3), "ModelSamplingSD3", shift=6.0))["latent"]["samples"]
    aura = host.run(patched(base_graph(steps=3), "ModelSamplingAuraFlow", shift=6.0))["latent"]["samples"]
    size = {"width": 1024, "height": 1024, "max_shift": math.log(6.0), "base_shift": math.log(6.0)}
    flux = host.run(patched(base_graph(steps=3), "ModelSamplingFlux", **size))["latent"]["samples"]
    assert (expected - plain).abs().max() > 0.01
    assert torch.equal(aura, expected)
    torch.testing.assert_close(flux, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pictures", [1, 2])
def test_a_batch_that_has_no_picture_for_each_prompt(host, base_graph, pictures):
    graph = base_graph(batch_size=pictures)
    graph["positive"] = ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": "a\nb\nc", "instruction": True})
    wanted = (
        f"positive: got 3 prompts for a batch of {pictures}, expected a batch_size of 3; set it so, "
        "or use SANA Batch Sampler"
    )
    assert error(host, graph) == wanted
    assert error(host, ksampler(graph)) == wanted


def test_a_batch_that_the_prompts_fill_twice(host, base_graph):
    graph = base_graph(batch_size=4, steps=1)
    graph["positive"] = ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": "a\nb", "instruction": True})
    assert len(host.run(graph)["image"]) == 4


@pytest.mark.parametrize("sigmas", ["0.0, 0.5, 1.0", "0.9, 0.9, 0.0", "14.6, 7.0, 0.0", "0.9"])
def test_sigmas_that_do_not_descend(host, custom_graph, sigmas):
    graph = custom_graph()
    graph["sigmas"] = ("ManualSigmas", {"sigmas": sigmas})
    assert re.search(r"^sigmas: got \[.*expected at least two numbers that fall", error(host, graph))


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


def test_joined_prompts(host, base_graph):
    graph = base_graph()
    graph["joined"] = ("ConditioningConcat", {"conditioning_to": ["positive", 0], "conditioning_from": ["positive", 0]})
    graph["sample"][1]["positive"] = ["joined", 0]
    assert re.search("^positive: got a mask of shape .* SANA cannot join prompts, write one text$", error(host, graph))


def test_half_a_character_in_a_prompt(host, base_graph):
    message = error(host, base_graph(text="a \ud83d circle"))
    assert message == "text: holds half a character (a lone surrogate) at position 2; write the text again"


def test_the_models_of_others(host, base_graph):
    class OtherModel:
        RETURN_TYPES, FUNCTION = ("MODEL",), "make"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {}}

        def make(self):
            import comfy.model_base
            import comfy.model_patcher
            import comfy.supported_models_base

            config = comfy.supported_models_base.BASE({"disable_unet_model_creation": True})
            model = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.FLOW)
            return (comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu")),)

    host.nodes.NODE_CLASS_MAPPINGS["OtherModel"] = OtherModel
    wanted = "model: got BaseModel, expected a SANA model; use SANA Loader"
    for node, inputs in (("SanaNodesPAG", {"scale": 2.0}), ("SanaNodesGuidanceInterval", {"start": 0.0, "end": 1.0})):
        graph = patched(base_graph(), node, **inputs)
        graph["other"] = ("OtherModel", {})
        graph["patch"][1]["model"] = ["other", 0]
        assert error(host, graph) == wanted
    graph = base_graph()
    graph["other"] = ("OtherModel", {})
    graph["sample"][1]["model"] = ["other", 0]
    assert error(host, graph) == wanted


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
