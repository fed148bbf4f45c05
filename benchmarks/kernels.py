"""The fused kernels built for every card, without one: registers, spills, shared memory. `make bench`.

Writes benchmarks/kernels.json. What is built is machine code of ptxas; no card has run it.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import write

# Turing, Ampere's two, Ada, Hopper, Blackwell's two
CARDS = (75, 80, 86, 89, 90, 100, 120)
# MI200, MI300, RDNA 3 and 4, by the threads of a wave
AMD_CARDS = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32, "gfx1201": 32}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


def recorded(width: int, dtype: torch.dtype) -> list[Launch]:
    """Return each kernel's launch at a transformer's width, and at the decoder's smallest and largest."""
    from sana_core.kernels import channels, gated_depthwise, linear_attention, modulation

    launches: list[Launch] = []

    def note(kernel: Any, grid: Any, like: Any, *arguments: Any, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        launches.append(Launch(kernel, {name: given.get(name) for name in kernel.arg_names}, options))

    modules = (channels, gated_depthwise, linear_attention, modulation)
    plain = [module.launch for module in modules]
    try:
        for module in modules:
            module.launch = note  # type: ignore[attr-defined]
        with torch.device("meta"):
            hidden = torch.empty(2, 1024, width, dtype=dtype)
            table = torch.empty(2, 1, width, dtype=dtype)
            modulation.add_gated(hidden, hidden, table)
            for branch in ((None, None), (hidden, None), (hidden, table)):
                modulation.add_then_norm(hidden, branch, table, table, 1e-6)
            linear_attention.relu_attention(hidden, hidden, hidden, width // 32, 1e-15)
            inner = 5 * width
            maps = torch.empty(2, 32, 32, inner, dtype=dtype)
            weight, bias = torch.empty(inner, 1, 3, 3, dtype=dtype), torch.empty(inner, dtype=dtype)
            gated_depthwise.silu_depthwise_gate(maps, weight, bias)
            for count in (128, 1024):
                rows, own = torch.empty(4096, count, dtype=dtype), torch.empty(count, dtype=dtype)
                channels.rms_norm(rows, own, own, 1e-5, rows, rows)
                channels.add_bias(rows, own, rows, "silu")
    finally:
        for module, launch in zip(modules, plain, strict=True):
            module.launch = launch  # type: ignore[attr-defined]
    return launches


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def build(launch: Launch, card: int | str) -> Any:
    """Return what Triton builds of `launch` for a compute capability or AMD's name, as for a call on that card."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = launch.kernel, {}
    signature = {}
    for parameter in kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = kind(value)
    warps = {"num_warps": launch.options.get("num_warps", 4)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    kind_of = ("cuda", card, 32) if isinstance(card, int) else ("hip", card, AMD_CARDS[card])
    return triton.compile(source, target=GPUTarget(*kind_of), options=warps)


@functools.cache
def tool() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def resources(built: Any) -> dict[str, int]:
    """Return what a thread and a block of a built kernel take."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run([tool(), "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    (line,) = re.findall(r"REG:\d+.*", text)
    found = {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", line)}
    # what is spilled lies on a thread's stack
    return {
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "shared_bytes": built.metadata.shared,
        "warps": built.metadata.num_warps,
    }


def sizes(launch: Launch) -> str:
    """Return the constants of a launch in words."""
    own = [name for name, value in launch.arguments.items() if value is None]
    constants = [f"{p.name}={launch.arguments[p.name]}" for p in launch.kernel.params if p.is_constexpr]
    return f"{launch.kernel.__name__} ({', '.join(constants)})" + (f" without {', '.join(own)}" if own else "")


def main() -> None:
    kernels = {
        f"{sizes(launch)}, {str(dtype).removeprefix('torch.')}": {
            f"sm_{card}": resources(build(launch, card)) for card in CARDS
        }
        for dtype in DTYPES
        for width in (1152, 2240)
        for launch in recorded(width, dtype)
    }
    write(__file__, {"note": "built by Triton's ptxas; none of it has run on a card", "kernels": kernels})


if __name__ == "__main__":
    main()
