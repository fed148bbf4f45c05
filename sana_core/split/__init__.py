"""Row parallelism: one image over several devices, each with some rows of its latents through all blocks of the model.

    rows 0..5    device 0  --+-- halo of one row of the feed-forward's input, up and down --+
    rows 6..15   device 1  --+                                                              +-- all-reduce of the sums
    rows 16..22  device 2  --+--------------------------------------------------------------+   of the linear attention

shard     the rows that one device has, from the top of the image to its bottom in the order of the devices
sums      of a linear attention over all positions [B, heads, d, d + 1]: keys times values, and the keys themselves
exchange  how shards exchange tensors: threads of one process
ops       the operations in a block that need other shards: the all-reduce and the halo
member    a device with its own copy of the weights; if it fails, the others compute its rows

All other layers compute each position separately. The sums are computed per row in float32, and the rows are added in
float64, which is exact for this number of float32 values. So the sums have the same bits in any order. On a CPU, if all
devices have the same number of threads, the bits of the image do not depend on the number of devices either. This holds
for rows of 16, 20, 24 ... positions (512, 640, 768 px ...).
"""
