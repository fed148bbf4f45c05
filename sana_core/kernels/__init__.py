"""Fused kernels in Triton for what torch launches apart; plain torch stands beside each, where Triton is not."""
