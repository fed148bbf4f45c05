"""What SANA computes: the text encoder's embeddings, the transformer's forward, and the facts of published models."""
