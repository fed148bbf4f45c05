"""Training: data sets, buckets, the cache, and the trainer.

A run is a pure function of its settings, its seed and its global step. A resumed run therefore equals an uninterrupted
one.

    folder, jsonl or tars -> samples -> a bucket each -> cache of latents and embeddings -> batches of one bucket
"""
