"""A MODEL during sampling: the forward, guidance, prompts, latents, previews and split images."""
