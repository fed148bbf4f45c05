"""The leaves of arguments and results of torch functions, for modes that see every function.

torch.utils._pytree does the same for any kind of tree, and takes longer than most of these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map


def leaves(value: Any) -> list[Any]:
    """Return the leaves of `value`, as `tree_leaves` does."""
    kind = type(value)
    if kind is dict:
        value, kind = value.values(), tuple
    if kind is tuple or kind is list:
        return [leaf for item in value for leaf in leaves(item)]
    return tree_leaves(value) if isinstance(value, tuple | list | dict) else [value]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to its leaves, as `tree_map` does."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(function, item) for item in value])
    if kind is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    return tree_map(function, value) if isinstance(value, tuple | list | dict) else function(value)
