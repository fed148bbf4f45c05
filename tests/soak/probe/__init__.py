"""A custom node of the soak only: /soak returns the resources that the idle server holds."""

import ctypes
import gc
import threading
from collections import Counter

import torch
from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS: dict = {}


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns; malloc(3)."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo


def tensor_bytes(objects):
    """Bytes of all tensors, those that share their memory once."""
    sizes = {}
    for item in objects:
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu" and item.layout == torch.strided:
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@PromptServer.instance.routes.get("/soak")
async def soak(request):
    gc.collect()
    objects = gc.get_objects()
    kinds = Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in objects)
    results = {"objects": len(objects), "tensor_bytes": tensor_bytes(objects)}
    del objects
    # pages that are free in the middle of the heap go back, and what stays is in use
    libc.malloc_trim(0)
    heap = libc.mallinfo2()
    results |= {"heap_bytes": heap.uordblks + heap.hblkhd, "kinds": dict(kinds.most_common(400))}
    results["threads"] = sorted(thread.name for thread in threading.enumerate())
    return web.json_response(results)
