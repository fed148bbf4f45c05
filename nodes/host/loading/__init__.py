"""Checkpoints as ComfyUI's MODEL, CLIP, VAE, CONTROL_NET and LoRA patches."""
