"""SANA-Video: its forward, its latents, and the memory and files of its videos."""
