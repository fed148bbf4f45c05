"""Pictures that are encoded for the step that learns them and kept nowhere: data sets larger than any disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .buckets import Bucket
from .cache import Batch, EncodeCaption, EncodePixels, control_sample, encode_picture, encode_tokens, join_batch
from .dataset import Sample
from .entries import Tensors


class Stream(NamedTuple):
    """Samples in their buckets, with the encoders for them, and the empty prompt as in a cache."""

    samples: Sequence[Sample]
    buckets: Sequence[Bucket]
    encode_pixels: EncodePixels
    encode_caption: EncodeCaption
    empty: Tensors  # embeds [T, C] and mask [T], without instruction, the padding included

    @torch.no_grad()
    def load(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, of one bucket, as a cache of them would to the bit.

        Reads the pictures, and raises as `build_cache` does.
        """
        chosen = [self.samples[index] for index in indices]
        buckets = [self.buckets[index] for index in indices]
        pictures = [encode_picture(self.encode_pixels, *each) for each in zip(chosen, buckets, strict=True)]
        texts = [encode_tokens(self.encode_caption, sample.caption) for sample in chosen]
        controls = [
            encode_picture(self.encode_pixels, control_sample(sample), bucket)
            for sample, bucket in zip(chosen, buckets, strict=True)
            if sample.control is not None
        ]
        return join_batch([sample.name for sample in chosen], pictures, texts, controls)
