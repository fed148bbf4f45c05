"""Ranks of a run with a pretended GPU each: FSDP, DDP and states on devices that count their bytes and mix with none.

`pretend_card` sees the calls of torch's functions. Autograd and DTensor run below these, so this adds them.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pretend_card
import torch
from pretend_card import Cards, CardTensor, pretend_cards
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from trees import leaves


class RankCards(Cards):
    """Cards whose tensors may be the local parts of a DTensor, and whose backward computes on them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0]
        if name == "record_stream":
            return None
        if not any(isinstance(leaf, DTensor) for leaf in leaves((args, kwargs))):
            return super().__torch_function__(func, types, args, kwargs)
        local = args[0]._local_tensor if isinstance(args[0], DTensor) else args[0]
        if name == "__get__" and getattr(func, "__self__", None) in (torch.Tensor.device, torch.Tensor.is_cuda):
            return super().__torch_function__(func, types, (local,), kwargs)
        card = getattr(local, "card", None)
        moves = [leaf for leaf in leaves((args[1:], kwargs)) if isinstance(leaf, str | torch.device)]
        if name in ("to", "cpu") and (moves or name == "cpu"):
            card = self.device(moves[0]) if moves else None
            args, kwargs = tree_map_only((str, torch.device), lambda leaf: pretend_card.CPU, (args, kwargs))
        out = func(*args, **kwargs)

        def put_local(leaf):
            if card is not None and not isinstance(leaf._local_tensor, CardTensor):
                leaf._local_tensor = self.put(leaf._local_tensor, card, False)
            return leaf

        return tree_map_only(DTensor, put_local, out)

    def put(self, tensor, card, copied, origin=frozenset()):
        if isinstance(tensor, AsyncCollectiveTensor):
            with torch._C.DisableTorchFunction():
                tensor = tensor.wait()
        return super().put(tensor, card, copied, origin)


def backward(loss):
    """Tensor.backward, which would leave the mode of the Cards."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


class Event:
    """In place of torch.cuda.Event: everything is done at once."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    wait = synchronize = record


class Stream(torch.cpu.Stream):
    """In place of torch.cuda.Stream."""

    def __init__(self, *args, **kwargs):
        super().__init__()

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or Event()


@contextmanager
def card_of(ranks, count):
    """Give `ranks` with a pretended GPU of this rank, and the Cards that count its bytes."""
    streams = {
        "Stream": Stream,
        "stream": torch.cpu.stream,
        "current_stream": lambda *args: Stream(),
        "Event": Event,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(pretend_card, "Cards", RankCards))
        cards = stack.enter_context(pretend_cards(count))
        stack.enter_context(mock.patch.multiple(torch.cuda, **streams))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", backward))
        device = torch.device("cuda", ranks.rank)
        torch.cuda.set_device(device)
        yield ranks._replace(device=device), cards


def misplaced(models, device, offloaded=False):
    """Return the names of parameters and buffers that are not where they should be."""
    names = []
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            expected = "cpu" if offloaded and isinstance(tensor, DTensor) else device.type
            if tensor.device.type != expected:
                names.append(f"{type(model).__name__}.{name} on {tensor.device}")
    return names
