"""One picture over several devices: what they tell each other, how exact it is, how fast on two cores, and on paper.

Counts and differences are those of SANA 0.6B's and 1.6B's widths with random weights; times are of a guided step of 6
blocks of 0.6B, and of the decode by f32c32, at 1024 px, in fp32 with one thread a device: two threads of a process, and
two processes by gloo, which share the step alone, against one. Writes benchmarks/split.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = 2
BLOCKS = 6


def transformer(variant: str, layers: int):
    from sana_core.doctor.arithmetic import transformer
    from sana_core.model.known_models import VARIANTS

    return transformer(VARIANTS[variant].width, layers)


def step(model, rows: int, columns: int):
    """A guided step's arguments at so many rows and columns: latents, timesteps, constants."""
    import torch

    from sana_core.model.forward import prepare

    x = torch.randn(2, 32, rows, columns, generator=torch.Generator().manual_seed(1))
    embeds = torch.randn(2, 20, model.config.caption_channels, generator=torch.Generator().manual_seed(2))
    return x, torch.full((2,), 500.0), prepare(model, embeds, torch.ones(2, 20), rows, columns)


def shared_step(model, arguments, devices: int):
    """The velocity by so many shards, and the exchanges they had."""
    import torch

    from sana_core.split.devices import Split

    split = Split([torch.device("cpu")] * max(2, devices))
    split.living = list(range(devices))
    return run_split(split, model, arguments), split.exchanges


def run_split(split, model, arguments):
    """The velocity by the members of `split`."""
    from sana_core.model.forward import shard_velocity

    x, timestep, constants = arguments
    return split.run(x, lambda shard: shard_velocity(model, shard, timestep, constants, None, None, ()))


def count() -> dict:
    """Bytes and messages of a block, counted as a shard takes them, at 1.6B's width in fp32."""
    model = transformer("1.6B", 1)
    _, exchanges = shared_step(model, step(model, 5, 32), 3)
    middle = exchanges[1]
    return {
        "exchanges_in_a_block": middle.messages,
        "MB_of_sums_from_a_shard": round(middle.sum_bytes / 1e6, 3),
        "rows_from_neighbours": middle.row_bytes / (2 * 32 * 2240 * 4),
    }


def differences() -> dict:
    """The largest relative difference from the undivided forward, and whether all numbers of shards agree."""
    import torch

    from sana_core.model.forward import velocity

    # the same bits need the same threads
    torch.set_num_threads(1)
    found = {}
    for variant, rows, columns in (("1.6B", 11, 17), ("0.6B", 9, 33)):
        model = transformer(variant, 2)
        arguments = step(model, rows, columns)
        with torch.no_grad():
            whole = velocity(model, *arguments)
        shared = {devices: shared_step(model, arguments, devices)[0] for devices in (1, 2, 3, 5, 8)}
        found[f"{variant}, 2 blocks, {rows} x {columns}"] = {
            "from_whole": max(float((each - whole).abs().max() / whole.abs().max()) for each in shared.values()),
            "same_bits": all(torch.equal(each, shared[1]) for each in shared.values()),
        }
    return found


def paper() -> dict:
    """Seconds of guided steps of 1.6B by published speeds, as sana_core/split/cost.py has them."""
    from sana_core.split.cost import GPU_SPEEDS, LINKS, split_cost

    machines = {"H100, NVLink": "nvlink", "RTX 4090, no peer access": "pcie"}
    figures = {}
    for name, link in machines.items():
        for pixels, devices in ((4096, 8), (4096, 4), (2048, 2), (1024, 2)):
            cost = split_cost("1.6B", (pixels, pixels), devices, GPU_SPEEDS[link], LINKS[link])
            figures[f"{devices} {name}, {pixels} px"] = {
                "card": GPU_SPEEDS[link]._asdict(),
                "link": LINKS[link]._asdict(),
                "prompts_apart": cost.groups > 1,
                "launches": [cost.launches_alone, cost.launches],
                "gigabytes_moved": [round(moved / 1e9, 2) for moved in (cost.moved_alone, cost.moved)],
                "alone_ms": round(cost.alone * 1e3, 2),
                "computing_ms": round(cost.computing * 1e3, 2),
                "exchanging_ms": round(cost.exchanging * 1e3, 2),
                "MB_of_sums_from_each": round(cost.sum_bytes / 1e6, 3),
                "MB_of_a_row": round(cost.row_bytes / 1e6, 3),
                "gain": round(cost.gain, 2),
            }
    return figures


def timed(mode: str, rank: int, port: int) -> dict[str, tuple[float, float]]:
    """Seconds of a step and of a decode in this process, by the clock and of its cores: by one thread, by two, or by
    one of two processes."""
    import torch
    import torch.distributed as dist
    from decode import autoencoder

    from sana_core.decode import decode_latents
    from sana_core.model.forward import velocity
    from sana_core.split.processes import ProcessSplit

    torch.set_num_threads(2 if mode == "threads" else 1)
    os.sched_setaffinity(0, {rank} if mode == "processes" else {0} if mode == "one" else {0, 1})
    model, decoder = transformer("0.6B", BLOCKS), autoencoder("cpu", torch.float32)
    x, timestep, constants = arguments = step(model, 32, 32)

    def sample():
        if mode == "processes":
            return run_split(members, model, arguments)
        if mode == "threads":
            return shared_step(model, arguments, 2)[0]
        return velocity(model, x, timestep, constants)

    def decode():
        if mode == "threads":
            # each device has a thread of its own
            torch.set_num_threads(1)
            return decode_latents(decoder, x[:1], devices=["cpu", "cpu"])
        return decode_latents(decoder, x[:1])

    def clock(work) -> tuple[float, float]:
        with torch.no_grad():
            work()
            times = []
            for _ in range(RUNS):
                began, worked = time.perf_counter(), time.process_time()
                work()
                times.append((time.perf_counter() - began, time.process_time() - worked))
        return min(times)

    if mode == "processes":
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        members = ProcessSplit(store, rank, [1.0, 1.0], torch.device("cpu"))
        # processes share no decode
        return {"step": clock(sample)}
    return {"step": clock(sample), "decode": clock(decode)}


def start(mode: str, rank: int = 0, port: int = 0) -> subprocess.Popen:
    command = [sys.executable, __file__, "--mode", mode, "--rank", str(rank), "--port", str(port)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)


def times() -> dict:
    """By the clock, and by the cores' seconds: what two would gain if nothing else ran on the machine."""
    measured = {}
    for name, modes in (("one", ["one"]), ("threads", ["threads"]), ("processes", ["processes"] * 2)):
        started = [start(mode, rank, 29517) for rank, mode in enumerate(modes)]
        outputs = [json.loads(each.communicate()[0].splitlines()[-1]) for each in started]
        # of the slowest by the clock, of all by the cores
        measured[name] = {
            part: (max(each[part][0] for each in outputs), sum(each[part][1] for each in outputs))
            for part in outputs[0]
        }
    return {
        **{part: gains(**{name: of[part] for name, of in measured.items() if part in of}) for part in measured["one"]},
        "load_of_the_machine": round(statistics.mean(os.getloadavg()[:2]), 1),
    }


def gains(one: tuple[float, float], **several: tuple[float, float]) -> dict:
    found: dict = {"one_thread_s": round(one[0], 2), "one_thread_core_s": round(one[1], 2)}
    for name, (clock, cores) in several.items():
        found |= {
            f"two_{name}_s": round(clock, 2),
            f"two_{name}_core_s": round(cores, 2),
            f"two_{name}_gain": round(one[0] / clock, 2),
            f"two_{name}_gain_of_free_cores": round(2 * one[1] / cores, 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("one", "threads", "processes"))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.mode is not None:
        sys.stdout.write(json.dumps(timed(arguments.mode, arguments.rank, arguments.port)))
        return
    from machine import description

    figures = {
        **description(),
        "counted": count(),
        "differences": differences(),
        "times": times(),
        "on_paper": paper(),
    }
    (ROOT / "benchmarks" / "split.json").write_text(json.dumps(figures, indent=2) + "\n")
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
