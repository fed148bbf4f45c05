"""The only code that uses ComfyUI's internals. It turns objects of sana_core into MODEL, CLIP and VAE."""
