"""Replaces the nodes of ComfyUI_ExtraModels if that pack is not installed, so that its workflows open and run.

The ids and inputs come from Sana/nodes.py, Gemma/nodes.py and VAE/nodes.py of city96/ComfyUI_ExtraModels and of its
fork Efficient-Large-Model/ComfyUI_ExtraModels. Their type for Gemma 2 is GEMMA. In the replaced nodes it is CLIP.
"""

from comfy_api.latest import ComfyAPI, io

SIDES = ["width", "height", "batch_size"]


def same(*names: str) -> list[dict]:
    """Map inputs that have the same name in both nodes."""
    return [{"new_id": name, "old_id": name} for name in names]


def encode(instruction: bool) -> list[dict]:
    """Map the inputs of a text encoder. SanaTextEncode used the instruction, GemmaTextEncode did not."""
    fixed = {"new_id": "instruction", "set_value": instruction}
    return [{"new_id": "clip", "old_id": "GEMMA"}, *same("text"), fixed]


# {old node: (new node, widgets of the old node in order, inputs of the new node)}
REPLACEMENTS = {
    "SanaCheckpointLoader": (
        "SanaNodesModelLoader",
        ["ckpt_name", "model", "dtype"],
        [{"new_id": "model_name", "old_id": "ckpt_name"}],
    ),
    "GemmaLoader": (
        "SanaNodesTextEncoderLoader",
        ["model_name", "device", "dtype"],
        [{"new_id": "text_encoder_name", "old_id": "model_name"}],
    ),
    "ExtraVAELoader": ("SanaNodesVAELoader", ["vae_name", "vae_type", "dtype"], same("vae_name")),
    "EmptySanaLatentImage": ("SanaNodesEmptyLatent", SIDES, same(*SIDES)),
    "EmptyDCAELatentImage": ("SanaNodesEmptyLatent", SIDES, same(*SIDES)),
    "SanaResolutionSelect": (
        "SanaNodesResolution",
        ["model", "ratio"],
        [{"new_id": "size", "old_id": "model"}, *same("ratio")],
    ),
    "SanaTextEncode": ("SanaNodesTextEncode", ["text"], encode(True)),
    "GemmaTextEncode": ("SanaNodesTextEncode", ["text"], encode(False)),
    # It added a size to the conditioning, which no released SANA reads. The replacement does not change the
    # conditioning.
    "SanaResolutionCond": (
        "ConditioningSetTimestepRange",
        ["width", "height"],
        [
            {"new_id": "conditioning", "old_id": "cond"},
            {"new_id": "start", "set_value": 0.0},
            {"new_id": "end", "set_value": 1.0},
        ],
    ),
}

# Number of outputs of the nodes with more than one. They have the same order in both nodes.
OUTPUTS = {"SanaResolutionSelect": 2}


async def register() -> None:
    """Register the replacements. ComfyUI replaces a node only if its pack is not installed."""
    from .host.compat import replace_in_prompts

    replace_in_prompts({old: (new, inputs) for old, (new, _, inputs) in REPLACEMENTS.items()})
    api = ComfyAPI()
    for old, (new, widgets, inputs) in REPLACEMENTS.items():
        outputs = [{"old_idx": index, "new_idx": index} for index in range(OUTPUTS.get(old, 1))]
        await api.node_replacement.register(
            io.NodeReplace(
                new_node_id=new,
                old_node_id=old,
                old_widget_ids=widgets,
                input_mapping=inputs,
                # The canvas drops the links of outputs that are not listed.
                output_mapping=outputs,
            )
        )
