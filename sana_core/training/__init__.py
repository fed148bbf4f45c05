"""Training: what is learnt from (data sets, shapes, the cache), and how.

A run is a pure function of its settings, its seed and its global step, so that one that goes on is the one that was
never broken off.

    folder, jsonl or tars -> samples -> a bucket each -> cache of latents and embeddings -> batches of one bucket
"""
