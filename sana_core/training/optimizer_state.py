"""An optimizer's state as tensors for a safetensors file and values for a JSON file, and back, bit for bit.

The tensors are named "<number of the parameter>.<name of the state>", and "group.<name>" for what belongs to all
parameters. One that is a subclass, as torchao's 8-bit numbers, is written as the tensors that it consists of, with
".<name>" behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InputError

REMEDY = "resume with the settings that it was saved with, or start again"
# of a group, what is no state: the schedule sets the rate anew at each step
SETTINGS = ("params", "optimizer", "lr")


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return all that steps have changed in an optimizer of `make_optimizer`: tensors by name, and values that JSON
    holds.

    The tensors are the optimizer's own where they are contiguous: write or copy them before the next step. The learning
    rate is not among the values.
    """
    (group,) = optimizer.param_groups
    tensors: dict[str, torch.Tensor] = {}
    parameters: list[dict[str, Any]] = []
    for index, parameter in enumerate(group["params"]):
        entry: dict[str, Any] = {"shape": list(parameter.shape), "values": {}, "subclasses": {}}
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                entry["values"][name] = value
            elif hasattr(value, "__tensor_flatten__"):
                parts, attributes = value.__tensor_flatten__()
                entry["subclasses"][name] = [encode(attribute) for attribute in attributes]
                for part in parts:
                    tensors[f"{index}.{name}.{part}"] = getattr(value, part).contiguous()
            else:
                tensors[f"{index}.{name}"] = value.contiguous()
        parameters.append(entry)
    values = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and name not in SETTINGS:
            tensors[f"group.{name}"] = value.contiguous()
        elif name not in SETTINGS and value != optimizer.defaults.get(name):
            values[name] = value
    layout = {name: [encode(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    return tensors, {"optimizer": group["optimizer"], "group": values, "parameters": parameters, "tensors": layout}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> None:
    """Give `optimizer`, which has taken no step, the state that `optimizer_state` returned, on the parameters' devices.

    Learning rate, betas and weight decay stay those of `optimizer`, so that a new phase of a run may have others.
    Raises InputError for the state of another optimizer or of other parameters, and for tensors that are missing or
    differ from what `values` say; `optimizer` is then as it was.
    """
    (group,) = optimizer.param_groups
    check(group, tensors, values)
    for index, (parameter, entry) in enumerate(zip(group["params"], values["parameters"], strict=True)):
        state = dict(entry["values"])
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if number == str(index) and "." not in name:
                state[name] = placed(tensor, parameter, group)
        for name, attributes in entry["subclasses"].items():
            state[name] = eight_bit(f"{index}.{name}.", tensors, attributes, parameter.device)
        if state:
            optimizer.state[parameter] = state
    group.update(values["group"])
    for key, tensor in tensors.items():
        if key.startswith("group."):
            group[key.removeprefix("group.")] = tensor.to(group["params"][0].device, copy=True)


def check(group: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    """Raise InputError unless the state is one of the optimizer with `group`, and whole."""
    if values["optimizer"] != group["optimizer"]:
        raise InputError(
            f"optimizer: got the state of {values['optimizer']!s:.40}, expected one of {group['optimizer']}; {REMEDY}"
        )
    saved = [entry["shape"] for entry in values["parameters"]]
    own = [list(parameter.shape) for parameter in group["params"]]
    if saved != own:
        number = next((i for i, pair in enumerate(zip(saved, own, strict=False)) if pair[0] != pair[1]), None)
        got, expected = (
            f"{len(shapes)} parameters" if number is None else f"parameter {number} of shape {shapes[number]}"
            for shapes in (saved, own)
        )
        raise InputError(f"optimizer: got the state of {got}, expected that of {expected}; {REMEDY}")
    found = {name: [encode(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    for name in {**values["tensors"], **found}:
        have, needed = found.get(name), values["tensors"].get(name)
        if have != needed:
            raise InputError(f"optimizer: got {have} as tensor {name:.80}, expected {needed}; {REMEDY}")


def placed(tensor: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return a copy of `tensor`, a part of the state of `parameter`, where the optimizer looks for it."""
    if tensor.shape == parameter.shape and tensor.ndim:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    # torch and torchao count steps on the CPU, for the fused kernels alone on the device
    counts = not tensor.ndim and not group.get("fused")
    return tensor.to("cpu" if counts else parameter.device, copy=True)


def eight_bit(
    prefix: str, tensors: Mapping[str, torch.Tensor], attributes: list[Any], device: torch.device
) -> torch.Tensor:
    """Return torchao's state of which the tensors with `prefix` are the parts; it is the only subclass there is."""
    from torchao.optim.subclass_8bit import OptimState8bit

    parts = {
        name.removeprefix(prefix): tensor.to(device, copy=True)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    return OptimState8bit.__tensor_unflatten__(parts, [decode(attribute) for attribute in attributes])


def encode(attribute: Any) -> Any:
    """Return an attribute of a tensor as JSON has it: a dtype by its name in torch."""
    return str(attribute) if isinstance(attribute, torch.dtype) else attribute


def decode(attribute: Any) -> Any:
    return getattr(torch, attribute.removeprefix("torch.")) if isinstance(attribute, str) else attribute
