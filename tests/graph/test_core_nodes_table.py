"""Every row of docs/core-nodes.md on the bundled model."""

import re

import pytest
from in_process import NodeError
from setup import ROOT

PAGE = (ROOT / "docs/core-nodes.md").read_text()
# (node, outcome, remark); a row of the table can have several nodes
ROWS = [
    (name, outcome, remark)
    for names, outcome, remark in re.findall(r"^\| (\w[\w ,]*) \| (works|no effect|refused) \| (.*)\|$", PAGE, re.M)
    for name in names.split(", ")
]
BLOCKS = {"double_layers": "1, 2", "single_layers": "", "start_percent": 0.0, "end_percent": 1.0}
CACHE = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0}
MODEL = ["load", 0]
# inputs of each node beside its MODEL or CLIP; all others have their defaults
INPUTS = {
    "CFGOverride": {"cfg": 2.0},
    "CLIPMergeSimple": {"clip1": ["load", 1], "clip2": ["load", 1]},
    "CLIPSetLastLayer": {"stop_at_clip_layer": -2},
    "ConditioningAverage": {
        "conditioning_to": ["positive", 0],
        "conditioning_from": ["other", 0],
        "conditioning_to_strength": 0.3,
    },
    "ConditioningCombine": {"conditioning_1": ["positive", 0], "conditioning_2": ["other", 0]},
    "ConditioningConcat": {"conditioning_to": ["positive", 0], "conditioning_from": ["other", 0]},
    "ConditioningMultiply": {"multiplier": 1.3},
    "ConditioningSetArea": {"width": 64, "height": 64, "x": 64, "y": 32},
    "ConditioningSetAreaPercentage": {"width": 0.5, "height": 0.5, "x": 0.5, "y": 0.25},
    "ConditioningSetAreaStrength": {"strength": 0.5},
    "ConditioningSetDefaultCombine": {"cond": ["masked", 0], "cond_DEFAULT": ["other", 0]},
    "ConditioningSetMask": {"mask": ["mask", 0]},
    "ConditioningSetProperties": {"cond_NEW": ["positive", 0], "mask": ["mask", 0]},
    "ConditioningSetPropertiesAndCombine": {"cond": ["other", 0], "cond_NEW": ["positive", 0], "mask": ["mask", 0]},
    "ConditioningSetTimestepRange": {"end": 0.5},
    "ContextWindowsManual": {"context_length": 2, "context_overlap": 1, "dim": 2},
    "EasyCache": CACHE,
    "Epsilon Scaling": {"scaling_factor": 1.05},
    "FluxGuidance": {"guidance": 9.0},
    "FreSca": {"scale_low": 1.5},
    "InpaintModelConditioning": {
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "vae": ["load", 2],
        "pixels": ["pixels", 0],
        "mask": ["mask", 0],
    },
    "InstructPixToPixConditioning": {
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "vae": ["load", 2],
        "pixels": ["pixels", 0],
    },
    "LatentApplyOperationCFG": {"operation": ["sharpen", 0]},
    "LazyCache": CACHE,
    "ModelComputeDtype": {"dtype": "bf16"},
    "ModelMergeAdd": {"model1": MODEL, "model2": MODEL},
    "ModelMergeSimple": {"model1": MODEL, "model2": ["scaled", 0], "ratio": 0.5},
    "ModelMergeSubtract": {"model1": MODEL, "model2": MODEL, "multiplier": 0.1},
    "ModelNoiseScale": {"noise_scale": 1.1},
    "ModelSamplingSD3": {"shift": 6.0},
    "PerpNeg": {"empty_conditioning": ["other", 0]},
    "ReferenceLatent": {"latent": ["empty", 0]},
    "ScaleROPE": {"scale_x": 2.0},
    "SkipLayerGuidanceDiT": BLOCKS,
    "SkipLayerGuidanceDiTSimple": BLOCKS,
    "SkipLayerGuidanceSD3": {"layers": "1, 2", "start_percent": 0.0, "end_percent": 1.0},
    "UNetCrossAttentionMultiply": {"v": 1.5},
    "UNetSelfAttentionMultiply": {"v": 1.5},
    "UNetTemporalAttentionMultiply": {"self_structural": 1.5},
}
# Nodes without an effect on SANA that the table lists under another name.
NAMED = {"SkipLayerGuidanceSD3": "SkipLayerGuidanceDiT"}
CHANGED = ("ConditioningAverage", "ConditioningMultiply", "ConditioningZeroOut")
LINKS = {"MODEL": MODEL, "CLIP": ["load", 1], "CONDITIONING": ["positive", 0]}
# With these nodes the image is the same as without them.
EQUAL = {"CLIPMergeSimple"}
# These nodes change the image only together with a second prompt.
BESIDES = ("ConditioningSetAreaStrength", "ConditioningSetMask", "ConditioningSetProperties")
# The images of the graphs without the node of a row.
EXPECTED = {}


def default(kind, options):
    choices = kind if isinstance(kind, list) else options.get("options")
    return options.get("default", choices[0] if choices else None)


def without(base_graph, name):
    """The graph that the node is put into, with all that it may want."""
    # a cache keeps the first steps and the last
    graph = base_graph(steps=4 if name.endswith("Cache") else 2)
    graph["other"] = ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "a green square", "instruction": True})
    graph["full"] = ("SolidMask", {"value": 0.3, "width": 128, "height": 128})
    graph["half"] = ("SolidMask", {"value": 1.0, "width": 64, "height": 128})
    compose = {"destination": ["full", 0], "source": ["half", 0], "x": 0, "y": 0, "operation": "add"}
    graph["mask"] = ("MaskComposite", compose)
    graph["masked"] = (
        "ConditioningSetMask",
        {"conditioning": ["positive", 0], "mask": ["mask", 0], "strength": 1.0, "set_cond_area": "default"},
    )
    graph["pixels"] = ("EmptyImage", {"width": 128, "height": 128, "batch_size": 1, "color": 255})
    graph["sharpen"] = ("LatentOperationSharpen", {"sharpen_radius": 3, "sigma": 1.0, "alpha": 0.5})
    graph["scaled"] = ("UNetSelfAttentionMultiply", {"model": MODEL, "q": 1.0, "k": 1.0, "v": 1.5, "out": 1.0})
    if name == "DifferentialDiffusion":
        graph["soft"] = ("SetLatentNoiseMask", {"samples": ["empty", 0], "mask": ["mask", 0]})
        graph["sample"][1]["latent_image"] = ["soft", 0]
    if name in BESIDES:
        graph["both"] = ("ConditioningCombine", {"conditioning_1": ["positive", 0], "conditioning_2": ["other", 0]})
        graph["sample"][1]["positive"] = ["both", 0]
    return graph


def with_node(host, base_graph, name):
    node = host.nodes.NODE_CLASS_MAPPINGS[name]
    groups = node.INPUT_TYPES()
    inputs = {}
    for key, (kind, *options) in groups["required"].items():
        inputs[key] = LINKS.get(kind) if isinstance(kind, str) and kind in LINKS else default(kind, *options or [{}])
    arguments = {**inputs, **INPUTS.get(name, {})}
    graph = without(base_graph, name)
    graph["node"] = (name, {key: value for key, value in arguments.items() if value is not None})
    (output,) = {*node.RETURN_TYPES} & {"MODEL", "CLIP", "CONDITIONING"}
    if output == "MODEL":
        graph["sample"][1]["model"] = ["node", 0]
    elif output == "CLIP":
        graph["positive"][1]["clip"] = ["node", 0]
    elif name in BESIDES:
        graph["both"][1]["conditioning_1"] = ["node", 0]
    else:
        graph["sample"][1]["positive"] = ["node", 0]
    if name == "InpaintModelConditioning":
        graph["sample"][1]["latent_image"] = ["node", 2]
    return graph


@pytest.mark.parametrize("name, outcome, remark", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_true(host, base_graph, node_texts, caplog, name, outcome, remark):
    if name not in host.nodes.NODE_CLASS_MAPPINGS:
        pytest.skip("this ComfyUI does not have it")
    graph = with_node(host, base_graph, name)
    if outcome == "refused":
        with pytest.raises(NodeError, match=r"^(model|positive): got [^\n]*; [^\n]*$"):
            host.run(graph, keep_cache=True)
        return
    # Few rows need another graph than the others. As on the canvas, nodes before a changed one do not run again.
    plain = without(base_graph, name)
    if repr(plain) not in EXPECTED:
        EXPECTED[repr(plain)] = host.run(plain, keep_cache=True)["image"]
    expected = EXPECTED[repr(plain)]
    node_texts.clear()
    caplog.set_level("INFO")
    got = host.run(graph, keep_cache=True)["image"]
    assert got.isfinite().all()
    difference = 255 * (got - expected).abs().mean()
    said = [text for node, text in node_texts if node in ("sample", "positive")]
    lines = [line for line in said if "SANA" in line or "averaged" in line]
    if outcome == "no effect":
        line = f"{NAMED.get(name, name)} has no effect on SANA"
        assert difference < 0.01
        assert [text for text in said if text.endswith(line)] == [line]
        assert [record.message for record in caplog.records].count(line) == 1
    else:
        assert (difference > 0.05) != (name in EQUAL)
        assert bool(lines) == (name in CHANGED), lines


def test_there_are_rows():
    assert len(ROWS) > 60 and {name for name, _, _ in ROWS} >= INPUTS.keys()
