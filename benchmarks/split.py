"""One image on several devices: the data that they exchange, the differences, and the speed on two cores.

Counts and differences use the widths of SANA 0.6B and 1.6B with random weights. Times are of a guided step with 6
blocks of 0.6B, and of the decode with f32c32, at 1024 px in fp32. Two devices with one thread each are compared with
one device. Writes benchmarks/split.json.
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
from decoders import f32c32

from benchmarks.machine import random_transformer, write
from sana_core.decode import decode_latents
from sana_core.model.forward import prepare, shard_velocity, velocity
from sana_core.split.generate import Split

RUNS = 2
BLOCKS = 6
SMALL, LARGE = 1152, 2240  # the widths of 0.6B and 1.6B


def step(model, rows: int, columns: int):
    """Return the arguments of a guided step for latents of `rows` x `columns`: latents, timesteps, constants."""
    x = torch.randn(2, 32, rows, columns, generator=torch.Generator().manual_seed(1))
    embeds = torch.randn(2, 20, model.config.caption_channels, generator=torch.Generator().manual_seed(2))
    return x, torch.full((2,), 500.0), prepare(model, embeds, torch.ones(2, 20), rows, columns)


def shared_step(model, arguments, devices: int):
    """Return the velocity, computed by `devices` shards, and their exchanges."""
    split = Split([torch.device("cpu")] * devices)
    x, timestep, constants = arguments
    forward = partial(velocity, model)
    result = split.run(x, lambda shard: shard_velocity(forward, shard, timestep, constants, None, None, ()))
    return result, split.exchanges


def count() -> dict:
    """Return the bytes and messages of a block that the middle one of three shards counts, at 1.6B's width in fp32."""
    model = random_transformer(LARGE, 1)
    _, exchanges = shared_step(model, step(model, 5, 32), 3)
    middle = exchanges[1]
    return {
        "exchanges_in_a_block": middle.messages,
        "MB_of_sums_from_a_shard": round(middle.sum_bytes / 1e6, 3),
        "rows_from_neighbours": middle.row_bytes / (2 * 32 * LARGE * 4),
    }


def differences() -> dict:
    """Return the largest relative difference from the undivided forward, and whether all numbers of shards agree."""
    # Results are bit-identical only with the same number of threads.
    torch.set_num_threads(1)
    figures = {}
    for variant, width, rows, columns in (("1.6B", LARGE, 11, 17), ("0.6B", SMALL, 9, 33)):
        model = random_transformer(width, 2)
        arguments = step(model, rows, columns)
        with torch.no_grad():
            undivided = velocity(model, *arguments)
        shared = {devices: shared_step(model, arguments, devices)[0] for devices in (1, 2, 3, 5, 8)}
        scale = undivided.abs().max()
        figures[f"{variant}, 2 blocks, {rows} x {columns}"] = {
            "from_whole": max(float((result - undivided).abs().max() / scale) for result in shared.values()),
            "same_bits": all(torch.equal(result, shared[1]) for result in shared.values()),
        }
    return figures


def timed(mode: str) -> dict[str, float]:
    """Return the seconds of a step and of a decode in this process, with one thread or with two."""
    torch.set_num_threads(2 if mode == "threads" else 1)
    os.sched_setaffinity(0, {0} if mode == "one" else {0, 1})
    model, decoder = random_transformer(SMALL, BLOCKS), f32c32(1)
    x, timestep, constants = arguments = step(model, 32, 32)

    def sample():
        if mode == "threads":
            return shared_step(model, arguments, 2)[0]
        return velocity(model, x, timestep, constants)

    def decode():
        if mode == "threads":
            # Each device has a thread.
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

    return {"step": clock(sample), "decode": clock(decode)}


def times() -> dict:
    """Return the seconds, and the speedup with two threads."""
    figures: dict[str, dict[str, float]] = {"step": {}, "decode": {}}
    for name, mode in (("one_thread", "one"), ("two_threads", "threads")):
        command = [sys.executable, "-m", "benchmarks.split", "--mode", mode]
        output = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
        for part, seconds in json.loads(output.stdout.splitlines()[-1]).items():
            figures[part][f"{name}_s"] = round(seconds, 2)
            figures[part][f"{name}_gain"] = round(figures[part]["one_thread_s"] / seconds, 2)
    return {**figures, "load_of_the_machine": round(statistics.mean(os.getloadavg()[:2]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("one", "threads"))
    arguments = parser.parse_args()
    if arguments.mode is not None:
        sys.stdout.write(json.dumps(timed(arguments.mode)))
        return
    write(__file__, {"counted": count(), "differences": differences(), "times": times()})


if __name__ == "__main__":
    main()
