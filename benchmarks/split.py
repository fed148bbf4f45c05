"""One picture over several devices: what they tell each other, how exact it is, and how fast on two cores.

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
from functools import partial

import torch
import torch.distributed as dist
from decoders import f32c32

from benchmarks.machine import write
from sana_core.decode import decode_latents
from sana_core.doctor.arithmetic import transformer
from sana_core.model.forward import prepare, shard_velocity, velocity
from sana_core.split.devices import Split
from sana_core.split.processes import ProcessSplit

RUNS = 2
BLOCKS = 6
SMALL, LARGE = 1152, 2240  # the widths of 0.6B and 1.6B
PORT = 29517


def step(model, rows: int, columns: int):
    """A guided step's arguments at so many rows and columns: latents, timesteps, constants."""
    x = torch.randn(2, 32, rows, columns, generator=torch.Generator().manual_seed(1))
    embeds = torch.randn(2, 20, model.config.caption_channels, generator=torch.Generator().manual_seed(2))
    return x, torch.full((2,), 500.0), prepare(model, embeds, torch.ones(2, 20), rows, columns)


def shared_step(model, arguments, devices: int):
    """The velocity by so many shards, and the exchanges they had."""
    split = Split([torch.device("cpu")] * devices)
    return run_split(split, model, arguments), split.exchanges


def run_split(split, model, arguments):
    """The velocity by the members of `split`."""
    x, timestep, constants = arguments
    forward = partial(velocity, model)
    return split.run(x, lambda shard: shard_velocity(forward, shard, timestep, constants, None, None, ()))


def count() -> dict:
    """Bytes and messages of a block, counted as a shard takes them, at 1.6B's width in fp32."""
    model = transformer(LARGE, 1)
    _, exchanges = shared_step(model, step(model, 5, 32), 3)
    middle = exchanges[1]
    return {
        "exchanges_in_a_block": middle.messages,
        "MB_of_sums_from_a_shard": round(middle.sum_bytes / 1e6, 3),
        "rows_from_neighbours": middle.row_bytes / (2 * 32 * LARGE * 4),
    }


def differences() -> dict:
    """The largest relative difference from the undivided forward, and whether all numbers of shards agree."""
    # the same bits need the same threads
    torch.set_num_threads(1)
    found = {}
    for variant, width, rows, columns in (("1.6B", LARGE, 11, 17), ("0.6B", SMALL, 9, 33)):
        model = transformer(width, 2)
        arguments = step(model, rows, columns)
        with torch.no_grad():
            whole = velocity(model, *arguments)
        shared = {devices: shared_step(model, arguments, devices)[0] for devices in (1, 2, 3, 5, 8)}
        found[f"{variant}, 2 blocks, {rows} x {columns}"] = {
            "from_whole": max(float((each - whole).abs().max() / whole.abs().max()) for each in shared.values()),
            "same_bits": all(torch.equal(each, shared[1]) for each in shared.values()),
        }
    return found


def timed(mode: str, rank: int) -> dict[str, float]:
    """Seconds of a step and of a decode in this process: by one thread, by two, or by one of two processes."""
    torch.set_num_threads(2 if mode == "threads" else 1)
    os.sched_setaffinity(0, {rank} if mode == "processes" else {0} if mode == "one" else {0, 1})
    model, decoder = transformer(SMALL, BLOCKS), f32c32(1)
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

    def clock(work) -> float:
        with torch.no_grad():
            work()
            times = []
            for _ in range(RUNS):
                began = time.perf_counter()
                work()
                times.append(time.perf_counter() - began)
        return min(times)

    if mode == "processes":
        store = dist.TCPStore("127.0.0.1", PORT, 2, is_master=rank == 0)
        members = ProcessSplit(store, rank, [1.0, 1.0], torch.device("cpu"))
        # processes share no decode
        return {"step": clock(sample)}
    return {"step": clock(sample), "decode": clock(decode)}


def start(mode: str, rank: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.split", "--mode", mode, "--rank", str(rank)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)


def times() -> dict:
    """Seconds of the slowest, and how many times as fast two are."""
    found: dict[str, dict[str, float]] = {"step": {}, "decode": {}}
    for name, modes in (("one_thread", ["one"]), ("two_threads", ["threads"]), ("two_processes", ["processes"] * 2)):
        started = [start(mode, rank) for rank, mode in enumerate(modes)]
        outputs = [json.loads(each.communicate()[0].splitlines()[-1]) for each in started]
        for part in outputs[0]:
            slowest = max(each[part] for each in outputs)
            found[part][f"{name}_s"] = round(slowest, 2)
            found[part][f"{name}_gain"] = round(found[part]["one_thread_s"] / slowest, 2)
    return {**found, "load_of_the_machine": round(statistics.mean(os.getloadavg()[:2]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("one", "threads", "processes"))
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.mode is not None:
        sys.stdout.write(json.dumps(timed(arguments.mode, arguments.rank)))
        return
    write(__file__, {"counted": count(), "differences": differences(), "times": times()})


if __name__ == "__main__":
    main()
