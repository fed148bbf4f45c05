"""All patches of ComfyUI, and all uses of its internals that a new version may move."""
