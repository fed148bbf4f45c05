"""SANA Batch Sampler, on the devices of this machine or on a cluster."""
