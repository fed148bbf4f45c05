"""Pretended CUDA GPUs that compute real numbers.

A tensor on such a GPU is a `CardTensor`: its numbers are in the CPU's memory, and the CPU computes with them. So
values, rounding and speed are the CPU's. In other respects the GPUs are distinct devices:

- Operations on tensors of different devices raise, as in CUDA.
- The bytes on each GPU are counted, and are limited to its memory.
- Each GPU has its own memory size and compute capability.
- The current device belongs to the thread. `device="cuda"` without an index means the current device.
- `Cards.fail()` makes one call on one GPU fail as CUDA, cuBLAS and cuDNN fail. With `late`, the error is reported by a
  later call on that GPU, in whichever thread.
- `empty_cache()` waits for all GPUs, as cudaFree does. A GPU that hangs blocks it in every thread of its process.
- The bytes of weights in RAM are counted in `Cards.weights_in_ram`, and their peak in `Cards.peak_in_ram`.
- The threads that were started are counted by name in `Cards.started`.
- `computed_on()` returns the GPUs that computed a tensor, also after the tensor moved to the CPU.

Triton cannot launch kernels on these tensors. `fake_accelerator` has tensors without numbers, for models of real sizes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from trees import leaves, mapped
from worker_threads import PROCESS, threads_for_processes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Functions whose arguments may be on several devices.
CROSSING = {
    "to",
    "cuda",
    "copy_",
    "__setitem__",
    "__getitem__",
    "set_",
    "index_put_",
    "type_as",
    "_has_compatible_shallow_copy_type",
}
# Attributes of the tensor object. The CPU tensor behind a CardTensor does not have them.
OWN = {"requires_grad_", "retain_grad", "register_hook", "grad", "requires_grad", "is_leaf", "grad_fn"}
LEAVING = {"cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"}
# These copy numbers. The device that computed them stays the same.
MOVING = {"to", "cuda", "cpu", "copy_", "clone", "contiguous", "__deepcopy__"}
# These launch nothing on a GPU: they read attributes or return views. They cannot fail, and are not counted as calls.
NO_LAUNCH = {
    "__get__",
    "__set__",
    "__len__",
    "__hash__",
    "__repr__",
    "_has_compatible_shallow_copy_type",
    "as_strided",
    "as_subclass",
    "broadcast_tensors",
    "broadcast_to",
    "chunk",
    "data_ptr",
    "detach",
    "detach_",
    "dim",
    "element_size",
    "expand",
    "expand_as",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_pinned",
    "is_same_size",
    "is_shared",
    "movedim",
    "narrow",
    "ndimension",
    "nelement",
    "numel",
    "permute",
    "result_type",
    "select",
    "set_",
    "size",
    "split",
    "squeeze",
    "storage_offset",
    "stride",
    "swapaxes",
    "t",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "untyped_storage",
    "view",
    "view_as",
} | OWN

# torch 2.8 introduced the class. Before, c10/cuda/CUDAException.cpp raised RuntimeError.
DRIVER_ERROR: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
# c10/cuda/CUDAException.cpp and CUDAMiscFunctions.cpp
DRIVER_HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
# TORCH_CUDABLAS_CHECK in aten/src/ATen/cuda/Exceptions.h, called in CUDABlas.cpp
GEMM = (
    "cublasGemmEx( handle, opa, opb, m, n, k, alpha_ptr, a, CUDA_R_16BF, lda, b, CUDA_R_16BF, ldb, beta_ptr, c, "
    "CUDA_R_16BF, ldc, compute_type, CUBLAS_GEMM_DEFAULT_TENSOR_OP)"
)
# What a failing call raises. All but "driver" fail once.
ERRORS: dict[str, tuple[type[BaseException], str]] = {
    # Every later call on the device fails too, as after any error of a kernel.
    "driver": (DRIVER_ERROR, f"CUDA error: an illegal memory access was encountered{DRIVER_HINTS}"),
    # c10/cuda/CUDACachingAllocator.cpp
    "memory": (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU {index} has a total capacity",
    ),
    # The driver itself runs out of memory, for example while it loads a kernel.
    "driver memory": (DRIVER_ERROR, f"CUDA error: out of memory{DRIVER_HINTS}"),
    "cublas": (RuntimeError, f"CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `{GEMM}`"),
    # aten/src/ATen/cuda/CublasHandlePool.cpp
    "cublas memory": (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas start": (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    # AT_CUDNN_CHECK in aten/src/ATen/cuda/Exceptions.h. cuDNN 9 splits the status codes of cuDNN 8.
    "cudnn": (RuntimeError, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    "cudnn internal": (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    "cudnn memory": (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn 9 memory": (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    # aten/src/ATen/native/cudnn/Conv_v8.cpp, without and with torch.backends.cudnn.benchmark. Mostly a lack of memory.
    "no engine": (RuntimeError, "GET was unable to find an engine to execute this computation"),
    "no engine found": (RuntimeError, "FIND was unable to find an engine to execute this computation"),
}
# The call waits until `Cards.release()`.
HANG = "hang"
# The floating-point results of the call are NaN.
NAN = "nan"


class CardTensor(torch.Tensor):
    """A tensor in the CPU's memory with a `card`, the device that it pretends to be on."""

    card: torch.device
    # Calling it ends the count of the tensor's bytes.
    finalizer: weakref.finalize
    __torch_function__ = torch._C._disabled_torch_function_impl


class Generator(torch.Generator):
    """The CPU's generator in place of a GPU's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


def computed_on(tensor: torch.Tensor) -> frozenset[torch.device]:
    """Return the GPUs that computed `tensor`. Rows that different GPUs computed may be in one tensor on the CPU.

    Moves and views do not count. Empty: the CPU computed it without inputs from a GPU.
    """
    return getattr(tensor, "computed_on", frozenset())


class Cards(TorchFunctionMode):
    """The mode in which there are `count` GPUs. `totals` are their bytes."""

    def __init__(self, totals: Sequence[int]) -> None:
        super().__init__()
        self.devices = [torch.device("cuda", index) for index in range(len(totals))]
        self.totals = dict(zip(self.devices, totals, strict=True))
        # Bytes that may be allocated: the total, or what `limit()` has set.
        self.limits = dict(self.totals)
        self.alive: Counter[torch.device] = Counter()
        self.peak: Counter[torch.device] = Counter()
        self.owners: Counter[tuple[torch.device, int]] = Counter()
        # Calls on each GPU. A copy between two GPUs counts for both.
        self.calls: Counter[torch.device] = Counter()
        # Calls by the name of the thread and the device, where the device was not the thread's current one.
        self.elsewhere: Counter[tuple[str, torch.device]] = Counter()
        # Kind of failure by device and number of the call.
        self.failures: dict[tuple[torch.device, int], str] = {}
        # Devices with a sticky error.
        self.broken: set[torch.device] = set()
        # How many calls later a failure is reported, by the key of `failures`.
        self.delays: dict[tuple[torch.device, int], int] = {}
        # Devices with a failed kernel that no call has reported yet, and the number of the call that will report it.
        self.unreported: dict[torch.device, int] = {}
        # The floating-point results of a failed kernel that no call has reported. Finite numbers look like a result.
        self.garbage = torch.nan
        # How many threads with this name were started.
        self.started: Counter[str] = Counter()
        # Process and device of calls that hang, or hung until `release()`. Another process does not wait for them.
        self.hung: set[tuple[str, torch.device]] = set()
        self.released = threading.Event()
        # Bytes of all storages in RAM that are or were the data of a parameter, until their memory is freed.
        self.weights_in_ram = self.peak_in_ram = 0
        # `_cdata` of these storages.
        self.storages_in_ram: set[int] = set()
        self.thread = threading.local()
        # A finalizer of a tensor takes it too, which may run while the thread holds it.
        self.lock = threading.RLock()

    def device(self, name: Any) -> torch.device | None:
        """Return the GPU that `name` means. None: `name` is the CPU or no device."""
        if isinstance(name, int) and not isinstance(name, bool):
            name = torch.device("cuda", name)
        if not isinstance(name, str | torch.device):
            return None
        try:
            device = torch.device(name)
        except RuntimeError:
            return None
        if device.type != "cuda":
            return None
        if device.index is None:
            return self.current
        if device.index >= len(self.devices):
            raise DRIVER_ERROR(f"CUDA error: invalid device ordinal{DRIVER_HINTS}")
        return self.devices[device.index]

    @property
    def current(self) -> torch.device:
        """The current device of the calling thread. New threads begin with the first GPU, as in CUDA."""
        return self.devices[getattr(self.thread, "index", 0)]

    def set_current(self, name: Any) -> None:
        device = self.device(name)
        if device is not None:
            self.thread.index = device.index

    def fail(self, device: Any, kind: str, at: int = 1, late: int = 0) -> None:
        """Make call number `at` on `device`, counted from now, fail. `kind`: a key of ERRORS, HANG or NAN.

        `late`, for "driver": CUDA runs kernels after the call that launches them. So call `at` succeeds, and all
        results from it on are `garbage`. The error is raised `late` calls on this device later, or earlier by a call
        that waits for the device, such as a copy to the CPU.
        """
        if kind not in (*ERRORS, HANG, NAN):
            raise ValueError(f"kind: got {kind!r}, expected one of {', '.join([*ERRORS, HANG, NAN])}")
        if late and kind != "driver":
            raise ValueError(f"late: got {late} for {kind!r}, expected 0; only errors of kernels are reported later")
        card = self.device(device)
        with self.lock:
            self.failures[card, self.calls[card] + at] = kind
            self.delays[card, self.calls[card] + at] = late

    def limit(self, device: Any, size: int | None = None) -> None:
        """Let allocations beyond `size` bytes on `device` raise OutOfMemoryError. None: its total."""
        card = self.device(device)
        self.limits[card] = self.totals[card] if size is None else size

    def release(self) -> None:
        """Let all calls that hang return. Later failures of the kind HANG do not wait."""
        self.released.set()

    def check(self, device: Any = None) -> None:
        """Raise the sticky error of `device`, if it has one."""
        card = self.current if device is None else self.device(device)
        if card in self.broken:
            raise_error("driver", card)

    def wait(self, device: Any = None) -> None:
        """Wait for all kernels on `device`. Raises its unreported error, and waits for `release()` if it hangs."""
        card = self.current if device is None else self.device(device)
        with self.lock:
            if self.unreported.pop(card, None):
                self.broken.add(card)
        if (PROCESS.get(), card) in self.hung:
            self.released.wait()
        self.check(card)

    def count_call(self, card: torch.device) -> float | None:
        """Count a call on `card`, and fail if `fail()` has been asked to. Returns a number to replace its results."""
        with self.lock:
            self.calls[card] += 1
            number = self.calls[card]
            kind, late = self.failures.pop((card, number), ""), self.delays.pop((card, number), 0)
            if card != self.current:
                self.elsewhere[threading.current_thread().name, card] += 1
            if kind == "driver" and late:
                self.unreported.setdefault(card, number + late)
            elif kind == "driver" or number >= self.unreported.get(card, number + 1):
                self.unreported.pop(card, None)
                self.broken.add(card)
            becomes = torch.nan if kind == NAN else self.garbage if card in self.unreported else None
            if kind == HANG:
                self.hung.add((PROCESS.get(), card))
        self.check(card)
        if kind in ERRORS and becomes is None:
            raise_error(kind, card)
        if kind == HANG:
            self.released.wait()
        return becomes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__deepcopy__":
            # Without the memo, into which `deepcopy` looks itself.
            args = (args[0], {})
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.device:
            return args[0].card if isinstance(args[0], CardTensor) else func(*args)
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return hasattr(args[0], "card")
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.is_cpu:
            return func(*args) and not hasattr(args[0], "card")
        if name == "get_device" and isinstance(args[0], CardTensor):
            return args[0].card.index
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            return self.set_data(func, *args)
        attribute = getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else name
        if attribute in OWN and isinstance(args[0], CardTensor):
            with torch._C.DisableTorchFunction():
                out = func(*args, **kwargs)
            if not isinstance(out, torch.Tensor) or out is args[0]:
                return out
            return self.put(out, args[0].card, False, computed_on(args[0]))
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        cards = {leaf.card for leaf in inputs if isinstance(leaf, CardTensor)}
        on_cpu = [leaf for leaf in inputs if not isinstance(leaf, CardTensor) and leaf.dim()]
        if name not in CROSSING and (len(cards) > 1 or (cards and on_cpu)):
            names = ", ".join(sorted(map(str, cards))) + (" and cpu" if on_cpu else "")
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} ({name})")
        if name == "numpy" and cards:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        target = self.target(name, args, kwargs, cards)
        launches = name not in NO_LAUNCH and not (name == "__getitem__" and len(inputs) == 1)
        if name == "to" and target == getattr(args[0], "card", None) and not kwargs.get("copy"):
            # A change of the dtype launches a kernel. Other calls return the tensor itself.
            launches = any(isinstance(leaf, torch.dtype) and leaf != args[0].dtype for leaf in leaves((args, kwargs)))
        becomes = None
        if launches:
            touched = cards | ({target} if target is not None else set())
            numbers = [self.count_call(card) for card in sorted(touched, key=str)]
            becomes = next((number for number in numbers if number is not None), None)
            if target is None:
                # A copy to the CPU waits for the GPU that it reads, also for the copy itself.
                for card in sorted(cards, key=str):
                    self.wait(card)
        in_place = name.endswith("_") != name.endswith("__") or name.startswith("__i") or kwargs.get("out") is not None
        same: dict[int, torch.Tensor] = {}

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, CardTensor):
                with torch._C.DisableTorchFunction():
                    bare_leaf = leaf.as_subclass(torch.Tensor)
                same[id(bare_leaf)] = leaf
                return bare_leaf
            if name in CROSSING and isinstance(leaf, str | torch.device) and self.device(leaf) is not None:
                return CPU
            return leaf

        bare, named = mapped(plain, (args, kwargs))
        # Only a driver can pin memory.
        named.pop("pin_memory", None)
        if self.device(kwargs.get("device")) is not None:
            named["device"] = CPU
        if name == "to" and len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
            bare = (bare[0], CPU, *bare[2:])
        # The CPU tensor would move to a real GPU.
        out = bare[0].to(CPU) if name == "cuda" else func(*bare, **named)
        origin = frozenset().union(*map(computed_on, inputs))
        if name in ("__setitem__", "copy_", "index_put_"):
            args[0].computed_on = origin
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves(out)):
            # `mapped` would make a torch.Size a tuple.
            return out
        if target is not None and launches and name not in MOVING:
            origin = frozenset([target])

        def back(leaf: Any) -> Any:
            if becomes is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    # A result may share the memory of an argument, which the function does not change.
                    leaf = leaf.fill_(becomes) if in_place else torch.full_like(leaf, becomes)
            if not isinstance(leaf, torch.Tensor) or id(leaf) in same:
                leaf = same.get(id(leaf), leaf)
                if isinstance(leaf, CardTensor) and launches:
                    leaf.computed_on = origin
                if getattr(leaf, "card", None) == target or not isinstance(leaf, torch.Tensor):
                    return leaf
            if name == "__deepcopy__" and isinstance(args[0], torch.nn.Parameter):
                leaf = torch.nn.Parameter(leaf, args[0].requires_grad)
            moves = name in ("to", "cpu", "cuda") and getattr(args[0], "card", None) != target
            if target is not None:
                return self.put(leaf, target, moves, origin)
            leaf = leaf.clone() if moves else leaf
            if origin:
                leaf.computed_on = origin
            return leaf

        return mapped(back, out)

    def target(self, name: str, args: Any, kwargs: Any, cards: set[torch.device]) -> torch.device | None:
        """Return the GPU of a function's results. None: the CPU."""
        if name in LEAVING:
            return None
        if name == "cuda":
            return self.current if len(args) < 2 and kwargs.get("device") is None else self.device([*args, None][1])
        if name == "to":
            options = [*args[1:], *kwargs.values()]
            devices = [getattr(option, "card", CPU) for option in options if isinstance(option, torch.Tensor)]
            devices += [torch.device(option) for option in options if isinstance(option, str | torch.device)]
            if len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
                devices = [self.devices[args[1]]]
            if devices:
                return self.device(devices[0])
        if name in CROSSING and name != "to":
            return getattr(args[0], "card", None)
        if kwargs.get("device") is not None:
            return self.device(kwargs["device"])
        return next(iter(cards), None)

    def put(
        self, tensor: torch.Tensor, card: torch.device, copied: bool, origin: frozenset[torch.device] = frozenset()
    ) -> CardTensor:
        """Return `tensor` as a tensor on `card`. Its bytes count as long as one of its views exists."""
        with torch._C.DisableTorchFunction():
            learns = tensor.is_leaf and tensor.requires_grad
            parameter, tensor = isinstance(tensor, torch.nn.Parameter), tensor.as_subclass(torch.Tensor)
            tensor = tensor.clone() if copied else tensor
            placed = (tensor.detach() if learns else tensor).as_subclass(CardTensor)
            if learns:
                placed.requires_grad_()
        placed._is_param, placed.computed_on = parameter, origin
        self.count_bytes(placed, card)
        return placed

    def set_data(self, setter: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Do `tensor.data = value`. As in CUDA, it may move `tensor` to another device."""
        if isinstance(tensor, CardTensor):
            tensor.finalizer()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        with torch._C.DisableTorchFunction():
            setter(tensor, value.as_subclass(torch.Tensor))
        tensor.computed_on = computed_on(value)
        if is_parameter and not isinstance(value, CardTensor):
            self.count_in_ram(value)
        if isinstance(value, CardTensor):
            tensor.__class__ = CardTensor
            tensor._is_param = is_parameter
            self.count_bytes(tensor, value.card)
        elif isinstance(tensor, CardTensor):
            tensor.__class__ = torch.nn.Parameter if is_parameter else torch.Tensor
            del tensor.card

    def count_bytes(self, placed: CardTensor, card: torch.device) -> None:
        """Note that `placed` is on `card`, until it is freed. Raises OutOfMemoryError."""
        with torch._C.DisableTorchFunction():
            storage = placed.untyped_storage()
            key, size = (card, storage._cdata), storage.nbytes()
        placed.card = card
        with self.lock:
            if not self.owners[key]:
                if self.alive[card] + size > self.limits[card]:
                    del self.owners[key]
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory. Tried to allocate {size} bytes. GPU {card.index} has a total capacity of "
                        f"{self.totals[card]} bytes of which {self.free(card)} bytes is free."
                    )
                self.alive[card] += size
            self.owners[key] += 1
            placed.finalizer = weakref.finalize(placed, self.forget, key, size)
            if self.alive[card] > self.peak[card]:
                self.peak[card] = self.alive[card]

    def count_in_ram(self, weight: torch.Tensor) -> None:
        """Note that `weight` is in RAM, until the memory that it shares with its views is freed."""
        with torch._C.DisableTorchFunction():
            if weight.device != CPU:
                return
            storage = weight.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
        with self.lock:
            if key not in self.storages_in_ram:
                self.storages_in_ram.add(key)
                self.weights_in_ram += size
                self.peak_in_ram = max(self.peak_in_ram, self.weights_in_ram)
                weakref.finalize(storage, self.forget_in_ram, key, size)

    def forget_in_ram(self, key: int, size: int) -> None:
        with self.lock:
            self.storages_in_ram.remove(key)
            self.weights_in_ram -= size

    def free(self, card: torch.device) -> int:
        """Return the bytes that can still be allocated on `card`."""
        return max(0, self.limits[card] - self.alive[card])

    def forget(self, key: tuple[torch.device, int], size: int) -> None:
        """Note that a tensor has been freed."""
        with self.lock:
            self.owners[key] -= 1
            if self.owners[key] <= 0:
                del self.owners[key]
                self.alive[key[0]] -= size


def raise_error(kind: str, card: torch.device) -> None:
    error, text = ERRORS[kind]
    raise error(text.format(index=card.index))


class CurrentDevice:
    """In place of torch.cuda.device: the thread's current device inside a `with` block."""

    def __init__(self, cards: Cards, device: Any) -> None:
        self.cards, self.inside = cards, device

    def __enter__(self) -> None:
        self.before = self.cards.current
        self.cards.set_current(self.inside)

    def __exit__(self, *error: object) -> None:
        self.cards.set_current(self.before)


def answers(cards: Cards, majors: Sequence[int]) -> dict[Any, dict[str, Any]]:
    """Return the functions of torch that concern devices, by module."""

    def card_of(device: Any = None) -> torch.device:
        return cards.device(device) or cards.current

    def restart(device: Any = None) -> None:
        cards.peak[card_of(device)] = cards.alive[card_of(device)]

    def alive(device: Any = None) -> int:
        return cards.alive[card_of(device)]

    def stats(device: Any = None) -> dict[str, int]:
        return dict.fromkeys((f"{kind}_bytes.all.current" for kind in ("active", "reserved")), alive(device))

    def peak(device: Any = None) -> int:
        return cards.peak[card_of(device)]

    def limit(share: float, device: Any = None) -> None:
        cards.limit(card_of(device), int(share * cards.totals[card_of(device)]))

    def memory_info(device: Any = None) -> tuple[int, int]:
        cards.check(device)
        return cards.free(card_of(device)), cards.totals[card_of(device)]

    def empty_cache() -> None:
        # torch frees the unused blocks of all devices that its process uses, and stops at the first one that fails.
        # cudaFree waits for the kernels of a device, and cudaMallocAsync's cache is emptied after a synchronize.
        for device in [cards.current] if PROCESS.get() else cards.devices:
            cards.wait(device)

    def properties(device: Any = None) -> SimpleNamespace:
        card = card_of(device)
        return SimpleNamespace(
            major=majors[card.index], minor=0, name="pretended", total_memory=cards.totals[card], gcnArchName=""
        )

    def capability(device: Any = None) -> tuple[int, int]:
        return majors[card_of(device).index], 0

    def set_device(device: Any) -> None:
        cards.check(device)
        cards.set_current(device)

    def current_index() -> int:
        return cards.current.index

    def context(device: Any) -> CurrentDevice:
        return CurrentDevice(cards, device)

    memory = {
        "memory_allocated": alive,
        "memory_reserved": alive,
        "memory_stats": stats,
        "max_memory_allocated": peak,
        "reset_peak_memory_stats": restart,
        "empty_cache": empty_cache,
        "synchronize": cards.wait,
        "is_available": lambda: True,
        "device_count": lambda: len(cards.devices),
    }
    return {
        torch.cuda: memory
        | {
            "current_device": current_index,
            "set_device": set_device,
            "device": context,
            "ipc_collect": lambda: cards.check(),
            # The CPU's generator makes the random numbers.
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "get_device_name": lambda device=None: "pretended",
            "get_device_properties": properties,
            "get_device_capability": capability,
            "is_bf16_supported": lambda including_emulation=True: capability()[0] >= 8,
            "mem_get_info": memory_info,
            "is_current_stream_capturing": lambda: False,
            # No work can be recorded, because there are no streams.
            "get_allocator_backend": lambda: "pretended",
            "set_per_process_memory_fraction": limit,
        },
        torch.accelerator: memory
        | {
            "current_accelerator": lambda check_available=False: CUDA,
            "set_device_index": set_device,
            "set_device_idx": set_device,
            "device_index": context,
            "current_device_index": current_index,
            "current_device_idx": current_index,
            "current_stream": lambda device=None: SimpleNamespace(is_capturing=lambda: False),
            "get_device_capability": capability,
            "get_memory_info": memory_info,
        },
    }


def one_each(value: int | Sequence[int], count: int) -> list[int]:
    """Return one number per GPU."""
    values = [value] * count if isinstance(value, int) else list(value)
    if len(values) != count:
        raise ValueError(f"got {len(values)} numbers, expected one for each of {count} GPUs")
    return values


@contextlib.contextmanager
def pretend_cards(
    count: int = 1, total: int | Sequence[int] = 24 * 10**9, major: int | Sequence[int] = 8
) -> Iterator[Cards]:
    """Give this thread and the threads that it starts `count` GPUs, inside the `with` block.

    A batch on several of them uses threads in place of processes, which would not have these GPUs.

    `total`: bytes of each GPU. `major`: compute capability; a GPU below 8 has no bf16. Both are one number for all
    GPUs, or a sequence with one number per GPU.
    """
    cards = Cards(one_each(total, count))
    run, new_parameter = threading.Thread.run, torch.nn.Parameter.__new__

    def parameter_in_ram(cls: type, data: Any = None, *arguments: Any, **options: Any) -> torch.nn.Parameter:
        parameter = new_parameter(cls, data, *arguments, **options)
        if not isinstance(parameter, CardTensor):
            cards.count_in_ram(parameter)
        return parameter

    def run_with_cards(thread: threading.Thread) -> None:
        with cards.lock:
            cards.started[thread.name] += 1
        with cards:
            run(thread)

    with contextlib.ExitStack() as stack:
        patches = answers(cards, one_each(major, count)) | {
            torch: {
                "Generator": Generator,
                # DeviceContext has to be the inner mode: it adds the device to the arguments.
                "set_default_device": lambda device: stack.enter_context(torch.device(device)),
            }
        }
        for module, functions in patches.items():
            # Older versions of torch have fewer.
            functions = {name: function for name, function in functions.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **functions))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_cards))
        stack.enter_context(mock.patch.object(torch.nn.Parameter, "__new__", parameter_in_ram))
        stack.enter_context(threads_for_processes())
        # No thread may wait forever after the test.
        stack.callback(cards.release)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(cards)
        yield cards
