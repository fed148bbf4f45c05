"""Parameters in bf16 whose updates are computed in fp32 and rounded so that small ones are not lost.

bf16 has 8 bits of precision: an update of less than 1/512 of a weight is rounded away every time. Rounded up or down
by chance, in proportion to how near each is, it is there in expectation (Zamirai et al. 2020, arXiv 2010.06192). No
fp32 copy of the weights is kept.
"""

from __future__ import annotations

from typing import Any

import torch

# of fp32's 23 bits of fraction those that bf16 leaves out
DROPPED = 16


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return `values`, fp32, rounded in place to numbers that bf16 holds, up or down so that their expectation stays.

    `generator` lies on the device of `values`. A number that bf16 holds stays itself, infinity and NaN too.
    """
    bits = values.view(torch.int32)
    bits.add_(torch.randint(1 << DROPPED, bits.shape, generator=generator, dtype=torch.int32, device=bits.device))
    bits.bitwise_and_(-1 << DROPPED)
    return values


@torch.no_grad()
def step_rounded(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Take the step of one parameter of `group` in fp32 and round it stochastically to the parameter's bf16.

    The optimizer must treat each parameter by itself. Its state is then in fp32, and that of `parameter`.
    """
    assert parameter.grad is not None
    master = torch.nn.Parameter(parameter.detach().float())
    master.grad = parameter.grad.float()
    groups, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [master]}]
    optimizer.state[master] = optimizer.state.pop(parameter, {})
    try:
        optimizer.step()
    finally:
        optimizer.state[parameter] = optimizer.state.pop(master)
        optimizer.param_groups = groups
    # one in fp32 is its own master
    if parameter.dtype != torch.float32:
        parameter.copy_(round_stochastically(master.detach(), generator))
