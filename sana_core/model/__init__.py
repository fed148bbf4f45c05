"""The model: the text encoder's embeddings, the transformer's forward, and a table of published models."""
