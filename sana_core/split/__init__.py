"""Row parallelism: one image over several devices, each with some rows of its latents through all blocks of the model.

    rows 0..5    device 0  --+-- halo of one row of the feed-forward's input, up and down --+
    rows 6..15   device 1  --+                                                              +-- all-reduce of the sums
    rows 16..22  device 2  --+--------------------------------------------------------------+   of the linear attention

shard     the rows that one device has, from the top of the image to its bottom in the order of the devices
sums      of a linear attention over all positions [B, heads, d, d + 1]: keys times values, and the keys themselves
exchange  how shards exchange tensors: threads of one process
ops       a shard's operations in a block that need the others: the all-reduce and the halo
member    a device with weights of its own; one that fails is left out, and its rows go to the others

Every other layer sees one position at a time. Each row has sums of its own in float32, and rows are added in float64,
where so few float32 numbers lose nothing: the same bits in any order. So on a CPU, with as many threads for each, the
image of 16, 20, 24 ... positions (512, 640, 768 px ...) in a row does not depend on the number of devices either.
"""
