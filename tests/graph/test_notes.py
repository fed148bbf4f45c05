"""Lines under samplers name the settings without an effect on SANA, and nothing else."""

import copy

import pytest
import torch
from loading import through

pytestmark = pytest.mark.usefixtures("one_load")

AVERAGED = "positive: its embeddings were averaged or scaled"


class ChangedPrompt:
    """A CONDITIONING after a function, which a pack's node could be."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "give"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"conditioning": ("CONDITIONING",), "change": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def give(self, conditioning, change):
        return (change["function"](conditioning),)


@pytest.fixture
def lines(host, base_graph, node_texts):
    """A function of a change to the positive CONDITIONING: the text that is left under the sampler."""
    host.nodes.NODE_CLASS_MAPPINGS.setdefault("ChangedPrompt", ChangedPrompt)

    def run(function, node="SanaNodesSampler", count=1):
        graph = base_graph(steps=1)
        graph["change"] = ("AnyValue", {"value": {"function": function}})
        graph["changed"] = ("ChangedPrompt", {"conditioning": ["positive", 0], "change": ["change", 0]})
        inputs = {**graph["sample"][1], "positive": ["changed", 0]}
        if node == "SanaNodesBatchSampler":
            inputs |= {"count": count, "devices": "default", "chunk": 1}
        graph["sample"] = (node, inputs)
        node_texts.clear()
        host.run(graph)
        return dict(node_texts).get("sample", "")

    return run


def each(new):
    """A function that applies `new` to each tensor of floating-point numbers of a CONDITIONING."""

    def change(value):
        return new(value) if torch.is_tensor(value) and value.is_floating_point() else value

    return lambda conditioning: [
        [change(embeds), {key: change(value) for key, value in options.items()}] for embeds, options in conditioning
    ]


def embeds(new):
    """A function that applies `new` to the embeddings of a CONDITIONING alone."""
    return lambda conditioning: [[new(one), dict(options)] for one, options in conditioning]


COPIES = {
    "clone": each(torch.clone),
    "deepcopy": copy.deepcopy,
    "embeddings alone": embeds(torch.clone),
    "contiguous": embeds(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "to fp64": embeds(torch.Tensor.double),
    "to fp64 and back": each(lambda x: x.double().float()),
    "to bf16 and back": embeds(lambda x: x.bfloat16().float()),
    "to fp16 and back": embeds(lambda x: x.half().float()),
    "plus zero": embeds(lambda x: x + 0),
    "times one": embeds(lambda x: x * 1.0),
    "averaged with itself": embeds(lambda x: 0.3 * x + 0.7 * x),
    "through numpy": embeds(lambda x: torch.from_numpy(x.numpy().copy())),
    "concatenated from halves": embeds(lambda x: torch.cat(x.chunk(2, 1), 1)),
}
CHANGES = {
    "scaled": embeds(lambda x: x * 1.5),
    "scaled a little": embeds(lambda x: x * 1.05),
    "negated": embeds(torch.neg),
    "zeroed": embeds(torch.zeros_like),
    "averaged": embeds(lambda x: 0.5 * x + 0.5 * x.roll(1, 1)),
    "one token": embeds(lambda x: torch.cat([2 * x[:, :1], x[:, 1:]], 1)),
    "noise": embeds(lambda x: x + 0.1 * torch.randn_like(x)),
    "normalised": embeds(lambda x: x / x.norm(dim=-1, keepdim=True)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copied_prompts_are_not_said_to_be_averaged(lines, name):
    assert AVERAGED not in lines(COPIES[name])


@pytest.mark.parametrize("name", CHANGES)
def test_changed_prompts_are(lines, name):
    assert AVERAGED in lines(CHANGES[name])


def hooked(options):
    """A function that hangs a TransformerOptionsHook with `options` on a CONDITIONING."""

    def hang(conditioning):
        import comfy.hooks

        scope = comfy.hooks.EnumHookScope.HookedOnly
        group = comfy.hooks.HookGroup()
        group.add(comfy.hooks.TransformerOptionsHook(transformers_dict=options, hook_scope=scope))
        return comfy.hooks.set_hooks_for_conditioning(conditioning, group)

    return hang


def couple(*args):
    """A patch of attention."""
    return args[:3]


PLACES = ["attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch", "input_block_patch", "middle_patch"]
HOOKS = {place: {"patches": {place: [couple]}} for place in PLACES}
HOOKS |= {kind: {"patches_replace": {kind: {("block", 0): couple}}} for kind in ("attn1", "attn2", "dit", "double")}


@pytest.mark.parametrize("name", HOOKS)
def test_patches_on_the_hooks_of_a_prompt_are_named(lines, name):
    assert "couple has no effect on SANA" in lines(hooked(HOOKS[name]))


def test_the_batch_sampler_names_what_has_no_effect_once(host, lines, caplog):
    scaled = embeds(lambda x: x * 1.5)

    def both(conditioning):
        return hooked(HOOKS["attn2_patch"])(scaled(conditioning))

    text = lines(both, "SanaNodesBatchSampler", count=4)
    assert "4 images in " in text and text.count(AVERAGED) == 1 and text.count("couple has no effect on SANA") == 1
    assert sum("couple has no effect" in record.message for record in caplog.records) == 1


def test_the_batch_sampler_names_freeu(host, base_graph, node_texts):
    graph = through(base_graph(steps=1), "FreeU_V2", b1=1.3, b2=1.4, s1=0.9, s2=0.2)
    settings = {"count": 3, "devices": "default", "chunk": 1}
    graph["sample"] = ("SanaNodesBatchSampler", {**graph["sample"][1], **settings})
    host.run(graph)
    assert "FreeU_V2 has no effect on SANA" in dict(node_texts)["sample"]


@pytest.mark.parametrize("node", ["CLIPTextEncode", "SanaNodesTextEncode"])
def test_a_prompt_that_is_cut_is_said_under_the_node_that_reads_it(host, base_graph, node_texts, node):
    graph = base_graph(steps=1)
    graph["positive"] = (node, {"clip": ["load", 1], "text": "red circle " * 400})
    if node == "SanaNodesTextEncode":
        graph["positive"][1]["instruction"] = True
    host.run(graph)
    assert "300" in dict(node_texts)["positive"] and "tokens" in dict(node_texts)["positive"]
