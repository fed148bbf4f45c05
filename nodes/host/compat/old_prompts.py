"""Nodes of an absent pack in prompts that come over HTTP: ours take their place before ComfyUI replaces any.

ComfyUI's own replacing answers HTTP 500 to clients that send no `_meta` or leave an input out, and where a node that it
replaces is linked to another one by an input that has a new name.
"""

from __future__ import annotations

from collections.abc import Mapping

from server import PromptServer

import nodes

# a node's id, and {new_id} with old_id or set_value for each of its inputs
Replacement = tuple[str, list[dict[str, object]]]


def replace_in_prompts(replacements: Mapping[str, Replacement]) -> None:
    """Let the server put `replacements`, by the old node's id, into each prompt; not for nodes that are installed."""

    def is_old(node: object) -> bool:
        # clients send anything, which the server refuses afterwards
        if not isinstance(node, dict) or not isinstance(node.get("inputs"), dict):
            return False
        kind = node.get("class_type")
        return isinstance(kind, str) and kind in replacements and kind not in nodes.NODE_CLASS_MAPPINGS

    def replace(request: dict) -> dict:
        prompt = request.get("prompt")
        for node in filter(is_old, prompt.values()) if isinstance(prompt, dict) else ():
            node["class_type"], mapping = replacements[node["class_type"]]
            old = node["inputs"]
            node["inputs"] = {each["new_id"]: old[each["old_id"]] for each in mapping if each.get("old_id") in old}
            node["inputs"] |= {each["new_id"]: each["set_value"] for each in mapping if "set_value" in each}
        return request

    PromptServer.instance.add_on_prompt_handler(replace)
