"""What takes the place of ComfyUI_ExtraModels' nodes where that pack is absent, so that its workflows open and run.

Their ids and inputs: Sana/nodes.py, Gemma/nodes.py and VAE/nodes.py of city96/ComfyUI_ExtraModels and of its fork
Efficient-Large-Model/ComfyUI_ExtraModels. Both call Gemma 2 a GEMMA; its replacement is a CLIP at both ends.
"""

from comfy_api.latest import ComfyAPI, io

SIDES = ["width", "height", "batch_size"]


def same(*names: str) -> list[dict]:
    """Inputs that are called alike in both nodes."""
    return [{"new_id": name, "old_id": name} for name in names]


def encode(instruction: bool) -> list[dict]:
    """SanaTextEncode wrote the instruction before the text, GemmaTextEncode did not."""
    own = {"new_id": "instruction", "set_value": instruction}
    return [{"new_id": "clip", "old_id": "GEMMA"}, *same("text"), own]


# old node: (new node, the old one's widgets in their order, the new one's inputs)
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
    # a note to the model that no released SANA reads: the conditioning goes on as it is
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

# of the nodes that have more than one, all in the places of the old ones
OUTPUTS = {"SanaResolutionSelect": 2}


async def register() -> None:
    """Tell ComfyUI, which replaces a node only where its own pack is not installed."""
    from .host.compat.old_prompts import replace_in_prompts

    replace_in_prompts({old: (new, inputs) for old, (new, _, inputs) in REPLACEMENTS.items()})
    api = ComfyAPI()
    for old, (new, widgets, inputs) in REPLACEMENTS.items():
        outputs = [{"old_idx": place, "new_idx": place} for place in range(OUTPUTS.get(old, 1))]
        await api.node_replacement.register(
            io.NodeReplace(
                new_node_id=new,
                old_node_id=old,
                old_widget_ids=widgets,
                input_mapping=inputs,
                # the canvas does not keep the links of others
                output_mapping=outputs,
            )
        )
