"""How several GPUs divide a training: the values of `parallel.kind`."""

DDP, FSDP, OFFLOADED = KINDS = ("ddp", "fsdp", "fsdp_offload")
