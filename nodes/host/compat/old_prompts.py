"""Replaces the nodes of a missing pack in prompts that arrive over HTTP, before ComfyUI does.

ComfyUI's replacement fails with HTTP 500 if a client sends no `_meta` or leaves an input out, and if a replaced node is
linked to another replaced node by an input that has a new name.
"""

from __future__ import annotations

from collections.abc import Mapping

from server import PromptServer

import nodes

# The new node's id, and for each of its inputs a dict with new_id and either old_id or set_value.
Replacement = tuple[str, list[dict[str, object]]]


def replace_in_prompts(replacements: Mapping[str, Replacement]) -> None:
    """Replace nodes in each prompt of the server, unless they are installed. Keys are the ids of the old nodes."""

    def is_old(node: object) -> bool:
        # A client may send anything. The server refuses wrong nodes later.
        if not isinstance(node, dict) or not isinstance(node.get("inputs"), dict):
            return False
        kind = node.get("class_type")
        return isinstance(kind, str) and kind in replacements and kind not in nodes.NODE_CLASS_MAPPINGS

    def replace(request: dict) -> dict:
        prompt = request.get("prompt")
        for node in filter(is_old, prompt.values()) if isinstance(prompt, dict) else ():
            node["class_type"], mapping = replacements[node["class_type"]]
            old = node["inputs"]
            node["inputs"] = {field["new_id"]: old[field["old_id"]] for field in mapping if field.get("old_id") in old}
            node["inputs"] |= {field["new_id"]: field["set_value"] for field in mapping if "set_value" in field}
        return request

    PromptServer.instance.add_on_prompt_handler(replace)
