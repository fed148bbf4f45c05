"""The model: the text encoder's embeddings, the transformer's forward, and what published models are."""
