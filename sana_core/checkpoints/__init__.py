"""From files to modules."""

from .folder import load_autoencoder, load_text_encoder, load_transformer, scaling_factor, stored_dtype

__all__ = ["load_autoencoder", "load_text_encoder", "load_transformer", "scaling_factor", "stored_dtype"]
