"""Fused Triton kernels, each for several of torch's launches; where Triton is not, plain torch does the same."""
