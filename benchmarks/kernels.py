"""Compile the fused kernels for every card, without a card: registers, spills, shared memory. `make bench`.

For sm_90 the instructions of the longest loop are counted, too. Writes benchmarks/kernels.json.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import write

# Compute capabilities: Turing, two of Ampere, Ada, Hopper, two of Blackwell.
CARDS = (75, 80, 86, 89, 90, 100, 120)
# {architecture: threads of a wave} of MI200, MI300, RDNA 3 and RDNA 4.
AMD_CARDS = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32, "gfx1201": 32}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


class Launch(NamedTuple):
    kernel: Any
    dtype: torch.dtype
    arguments: dict[str, Any]
    options: dict[str, Any]


def recorded(width: int, dtype: torch.dtype) -> list[Launch]:
    """Return each kernel's launch at a transformer's width, and at the decoder's smallest and largest."""
    from sana_core.kernels import channels, gated_depthwise, linear_attention

    launches: list[Launch] = []

    def note(kernel: Any, grid: Any, like: Any, *arguments: Any, **options: Any) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        launches.append(Launch(kernel, dtype, {name: values.get(name) for name in kernel.arg_names}, options))

    modules = (channels, gated_depthwise, linear_attention, channels)
    plain = [module.launch for module in modules]
    try:
        for module in modules:
            module.launch = note  # type: ignore[attr-defined]
        with torch.device("meta"):
            hidden = torch.empty(2, 1024, width, dtype=dtype)
            table = torch.empty(2, 1, width, dtype=dtype)
            channels.add_gated(hidden, hidden, table)
            for branch in ((None, None), (hidden, None), (hidden, table)):
                channels.add_then_norm(hidden, branch, table, table, 1e-6)
            linear_attention.relu_attention(hidden, hidden, hidden, width // 32, 1e-15)
            inner = 5 * width
            maps = torch.empty(2, 32, 32, inner, dtype=dtype)
            weight, bias = torch.empty(inner, 1, 3, 3, dtype=dtype), torch.empty(inner, dtype=dtype)
            gated_depthwise.silu_depthwise_gate(maps, weight, bias)
            for count in (128, 1024):
                rows, vector = torch.empty(4096, count, dtype=dtype), torch.empty(count, dtype=dtype)
                channels.rms_norm(rows, vector, vector, 1e-5, rows, rows)
                channels.add_bias(rows, vector, rows, "silu")
    finally:
        for module, launch in zip(modules, plain, strict=True):
            module.launch = launch  # type: ignore[attr-defined]
    return launches


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def build(launch: Launch, card: int | str) -> Any:
    """Compile `launch` for a compute capability or an AMD name, specialised as Triton specialises the real launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = isinstance(card, int)
    signature, constants, divisible = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.name == "fast":
            # The meta tensors of `recorded` are on no card, so their launches never ask for it.
            value = nvidia and launch.dtype != torch.float32
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = kind(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                divisible[(i,)] = [["tt.divisibility", 16]]
    warps = {"num_warps": launch.options.get("num_warps", 4)}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=divisible)
    target = GPUTarget("cuda", card, 32) if nvidia else GPUTarget("hip", card, AMD_CARDS[card])
    return triton.compile(source, target=target, options=warps)


@functools.cache
def tool() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def disassemble(built: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        return subprocess.run([tool(), option, file.name], check=True, capture_output=True, text=True).stdout


def resources(built: Any) -> dict[str, int]:
    """Registers and spills of a thread, shared memory and warps of a block."""
    (line,) = re.findall(r"REG:\d+.*", disassemble(built, "-res-usage"))
    usage = {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", line)}
    return {
        "registers": usage["REG"],
        # Spilled registers are on the thread's stack.
        "spilled_bytes": usage["STACK"] + usage["LOCAL"],
        "shared_bytes": built.metadata.shared,
        "warps": built.metadata.num_warps,
    }


def instructions(built: Any) -> dict[str, Any]:
    """Count the machine instructions of a kernel's longest loop, or of the whole kernel if it has no loop.

    "accesses" maps the bytes that a thread loads or stores at once to the number of such instructions in global memory.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);", disassemble(built, "-sass"))
    code = [(int(address, 16), name, operands) for address, name, operands in lines]
    loops = [
        (int(target[1], 16), address)
        for address, name, operands in code
        if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", operands)) and int(target[1], 16) < address
    ]
    first, last = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, code[-1][0]))
    names = [name for address, name, _ in code if first <= address <= last]
    accesses = Counter(
        int(width[1]) // 8 if (width := re.search(r"\.[US]?(8|16|64|128)(?![0-9])", name)) else 4
        for name in names
        if name.startswith(("LDG", "STG"))
    )
    return {
        "instructions": len(names),
        "special_functions": sum(name.startswith("MUFU") for name in names),
        "accesses": dict(sorted(accesses.items())),
    }


def sizes(launch: Launch) -> str:
    """Return the constants of a launch in words."""
    missing = [name for name, value in launch.arguments.items() if value is None]
    constants = [
        f"{p.name}={launch.arguments[p.name]}" for p in launch.kernel.params if p.is_constexpr and p.name != "fast"
    ]
    return f"{launch.kernel.__name__} ({', '.join(constants)})" + (f" without {', '.join(missing)}" if missing else "")


def main() -> None:
    kernels = {}
    for dtype in DTYPES:
        for width in (1152, 2240):
            for launch in recorded(width, dtype):
                figures = {}
                for card in CARDS:
                    built = build(launch, card)
                    figures[f"sm_{card}"] = resources(built) | (instructions(built) if card == 90 else {})
                kernels[f"{sizes(launch)}, {str(dtype).removeprefix('torch.')}"] = figures
    write(__file__, {"note": "compiled by Triton and ptxas, without a card", "kernels": kernels})


if __name__ == "__main__":
    main()
