"""Training: what is trained on (data sets, buckets, the cache), and how.

A run is a pure function of its settings, its seed and its global step, so that one that resumes is the one that was
never interrupted.

    folder, jsonl or tars -> samples -> a bucket each -> cache of latents and embeddings -> batches of one bucket
"""
