"""The only code that knows ComfyUI's internals: how a sana_core object becomes a MODEL, CLIP or VAE, and is run."""
