"""Ranks of a run as forks of the test's own process, which has torch and its parts loaded already, over gloo."""

import io
import multiprocessing
import os
import socket
import time
import traceback

import diffusers  # noqa: F401
import peft  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

OLD = not hasattr(getattr(torch.distributed.fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms")
# seconds
DEADLINE = 120


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def start_ranks(count, function):
    """Start `function(ranks)` on `count` ranks; return the processes and the queue of (rank, what it returned)."""
    context, port = multiprocessing.get_context("fork"), free_port()
    results = context.SimpleQueue()
    processes = [context.Process(target=be_rank, args=(rank, count, port, function, results)) for rank in range(count)]
    for process in processes:
        process.start()
    return processes, results


def be_rank(rank, count, port, function, results):
    from sana_core.training.ranks import joined

    own = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    torch.set_num_threads(1)
    try:
        with joined("cpu") as ranks:
            found = function(ranks)
    except BaseException as error:
        results.put((rank, (type(error).__name__, str(error), traceback.format_exc())))
        return
    # as bytes, for a tensor's memory would go with this process
    packed = io.BytesIO()
    torch.save(found, packed)
    results.put((rank, ("done", packed.getvalue())))


def outcomes(count, function, deadline=DEADLINE):
    """Return ("done", what it returned) or (error's class, its message, its traceback) of each rank, in their order."""
    processes, results = start_ranks(count, function)
    end, found = time.monotonic() + deadline, {}
    try:
        while len(found) < count and time.monotonic() < end:
            while not results.empty():
                rank, outcome = results.get()
                found[rank] = outcome
            time.sleep(0.01)
    finally:
        for process in processes:
            process.join(1 if len(found) == count else 0)
            process.kill()
    return [found.get(rank, ("nothing", f"rank {rank} said nothing in {deadline} s", "")) for rank in range(count)]


def results_of(count, function, deadline=DEADLINE):
    """Return what `function` returns on each rank. Raises AssertionError with the traceback of one that failed."""
    found = outcomes(count, function, deadline)
    for outcome in found:
        assert outcome[0] == "done", outcome[-1] or outcome
    return [torch.load(io.BytesIO(outcome[1]), weights_only=False) for outcome in found]
