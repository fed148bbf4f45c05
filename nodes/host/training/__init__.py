"""Training inside ComfyUI."""
