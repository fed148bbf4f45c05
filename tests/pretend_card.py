"""GPUs that compute without one: tensors that say they are on cuda:0, with numbers in the CPU's memory.

`fake_accelerator` has tensors without numbers, of which nothing can be said to be right. These have them, so that what
looks at results runs whole. What torch does on a real GPU in its place is done by the CPU's kernels: roundings and
speed are the CPU's, and so is TF32's absence. Mixed devices raise as on GPUs; bytes alive are counted, and there are no
more than a card has. Triton launches on no such tensor.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# these may have tensors of several devices
CROSSING = {
    "to",
    "copy_",
    "__setitem__",
    "__getitem__",
    "set_",
    "index_put_",
    "type_as",
    "_has_compatible_shallow_copy_type",
}
# of the tensor itself rather than of its numbers
OWN = {"requires_grad_", "retain_grad", "register_hook", "grad", "requires_grad", "is_leaf", "grad_fn"}
LEAVING = {"cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"}


class CardTensor(torch.Tensor):
    """A tensor in the CPU's memory with a `card`, the device that it is said to be on."""

    card: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl


class Generator(torch.Generator):
    """The CPU's generator in the place of a card's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


def on_card(device: Any) -> torch.device | None:
    """Return the card that is meant, None for the CPU and for what is no device."""
    if isinstance(device, str | torch.device):
        with contextlib.suppress(RuntimeError):
            found = torch.device(device)
            return torch.device("cuda", found.index or 0) if found.type == "cuda" else None
    return None


class Cards(TorchFunctionMode):
    """The mode in which there are cards of `total` bytes."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.share = total, 1.0
        self.alive: Counter[torch.device] = Counter()
        self.peak: Counter[torch.device] = Counter()
        self.owners: Counter[tuple[torch.device, int]] = Counter()
        # also at the end of a tensor, which may come while it is held
        self.lock = threading.RLock()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__deepcopy__":
            # without all that is copied already, which `deepcopy` looks into itself
            args = (args[0], {})
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.device:
            return args[0].card if isinstance(args[0], CardTensor) else func(*args)
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return hasattr(args[0], "card")
        asked = getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else name
        if asked in OWN and isinstance(args[0], CardTensor):
            with torch._C.DisableTorchFunction():
                out = func(*args, **kwargs)
            return self.put(out, args[0].card, False) if isinstance(out, torch.Tensor) and out is not args[0] else out
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        cards = {leaf.card for leaf in given if isinstance(leaf, CardTensor)}
        others = [leaf for leaf in given if not isinstance(leaf, CardTensor) and leaf.dim()]
        if name not in CROSSING and (len(cards) > 1 or (cards and others)):
            names = ", ".join(sorted(map(str, cards))) + (" and cpu" if others else "")
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} ({name})")
        if name == "numpy" and cards:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        target = self.target(name, args, kwargs, cards)
        same: dict[int, torch.Tensor] = {}

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, CardTensor):
                with torch._C.DisableTorchFunction():
                    own = leaf.as_subclass(torch.Tensor)
                same[id(own)] = leaf
                return own
            if name in CROSSING and on_card(leaf) is not None:
                return CPU
            return leaf

        bare, named = tree_map(plain, (args, kwargs))
        if on_card(kwargs.get("device")) is not None:
            named["device"] = CPU
        out = func(*bare, **named)

        def back(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in same:
                leaf = same.get(id(leaf), leaf)
                if getattr(leaf, "card", None) == target or not isinstance(leaf, torch.Tensor):
                    return leaf
            if name == "__deepcopy__" and isinstance(args[0], torch.nn.Parameter):
                leaf = torch.nn.Parameter(leaf, args[0].requires_grad)
            moves = name in ("to", "cpu") and getattr(args[0], "card", None) != target
            return self.put(leaf, target, moves) if target is not None else leaf.clone() if moves else leaf

        # a torch.Size would become a tuple
        return tree_map(back, out) if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(out)) else out

    def target(self, name: str, args: Any, kwargs: Any, cards: set[torch.device]) -> torch.device | None:
        """Return the card that a function's results are on, None for the CPU."""
        if name in LEAVING:
            return None
        if name == "to":
            given = [*args[1:], *kwargs.values()]
            asked = [getattr(each, "card", CPU) for each in given if isinstance(each, torch.Tensor)]
            asked += [torch.device(each) for each in given if isinstance(each, str | torch.device)]
            if asked:
                return on_card(asked[0])
        if name in CROSSING and name != "to":
            return getattr(args[0], "card", None)
        if kwargs.get("device") is not None:
            return on_card(kwargs["device"])
        return next(iter(cards), None)

    def put(self, tensor: torch.Tensor, card: torch.device, copied: bool) -> torch.Tensor:
        """Return `tensor` as one on `card`, whose bytes are counted as long as one of its views is there."""
        with torch._C.DisableTorchFunction():
            learns = tensor.is_leaf and tensor.requires_grad
            parameter, tensor = isinstance(tensor, torch.nn.Parameter), tensor.as_subclass(torch.Tensor)
            tensor = tensor.clone() if copied else tensor
            made = (tensor.detach() if learns else tensor).as_subclass(CardTensor)
            if learns:
                made.requires_grad_()
            made.card, made._is_param = card, parameter
            storage = tensor.untyped_storage()
            key, size = (card, storage._cdata), storage.nbytes()
        with self.lock:
            if not self.owners[key]:
                if self.alive[card] + size > self.share * self.total:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
                self.alive[card] += size
            self.owners[key] += 1
            weakref.finalize(made, self.release, key, size)
            if self.alive[card] > self.peak[card]:
                self.peak[card] = self.alive[card]
        return made

    def release(self, key: tuple[torch.device, int], size: int) -> None:
        with self.lock:
            self.owners[key] -= 1
            if self.owners[key] <= 0:
                del self.owners[key]
                self.alive[key[0]] -= size


def answers(cards: Cards, count: int, total: int, major: int) -> dict[Any, dict[str, Any]]:
    """What torch says of such cards, by module."""

    def index(device: Any) -> torch.device:
        return on_card(device) or torch.device("cuda", 0)

    def restart(device: Any = None) -> None:
        cards.peak[index(device)] = cards.alive[index(device)]

    def stats(device: Any = None) -> dict[str, int]:
        return dict.fromkeys(
            (f"{kind}_bytes.all.current" for kind in ("active", "reserved")), cards.alive[index(device)]
        )

    def limit(share: float, device: Any = None) -> None:
        cards.share = share

    properties = SimpleNamespace(major=major, minor=0, name="pretended", total_memory=total, gcnArchName="")
    return {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "ipc_collect": lambda: None,
            # the CPU's generator makes their numbers
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "get_device_name": lambda device=None: "pretended",
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (major, 0),
            "is_bf16_supported": lambda including_emulation=True: major >= 8,
            "mem_get_info": lambda device=None: (total - cards.alive[index(device)], total),
            "memory_allocated": lambda device=None: cards.alive[index(device)],
            "memory_reserved": lambda device=None: cards.alive[index(device)],
            "memory_stats": stats,
            "is_current_stream_capturing": lambda: False,
            "max_memory_allocated": lambda device=None: cards.peak[index(device)],
            "reset_peak_memory_stats": restart,
            "set_per_process_memory_fraction": limit,
        },
        torch.accelerator: {
            "is_available": lambda: True,
            "current_accelerator": lambda check_available=False: CUDA,
            "device_count": lambda: count,
            "set_device_index": lambda device: None,
            "current_device_index": lambda: 0,
            "current_stream": lambda device=None: SimpleNamespace(is_capturing=lambda: False),
            "synchronize": lambda device=None: None,
        },
    }


@contextlib.contextmanager
def pretend_cards(count: int = 1, total: int = 24 * 10**9, major: int = 8) -> Iterator[Cards]:
    """Within it, this thread and those that it starts have `count` cards of compute capability `major`."""
    cards = Cards(total)
    run = threading.Thread.run

    def run_with_cards(thread: threading.Thread) -> None:
        with cards:
            run(thread)

    with contextlib.ExitStack() as stack:
        own_answers = answers(cards, count, total, major) | {
            torch: {
                "Generator": Generator,
                # within these cards, for torch would ask its own
                "set_default_device": lambda device: stack.enter_context(torch.device(device)),
            }
        }
        for module, own in own_answers.items():
            # older versions of torch have fewer
            own = {name: answer for name, answer in own.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **own))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_cards))
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(cards)
        yield cards
