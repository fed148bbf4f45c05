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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(count, function):
    """Start `function(ranks)` on `count` ranks. Returns the processes and the queue of (rank, result)."""
    context, port = multiprocessing.get_context("fork"), free_port()
    results = context.SimpleQueue()
    processes = [context.Process(target=be_rank, args=(rank, count, port, function, results)) for rank in range(count)]
    for process in processes:
        process.start()
    return processes, results


def be_rank(rank, count, port, function, results):
    from sana_core.training import ranks as ranks_module

    # A rank that fails waits two beats until the others have read its error.
    ranks_module.BEAT = min(ranks_module.BEAT, 0.2)
    options = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in options.items()})
    torch.set_num_threads(1)
    try:
        with ranks_module.joined("cpu") as ranks:
            result = function(ranks)
    except BaseException as error:
        results.put((rank, (type(error).__name__, str(error), traceback.format_exc())))
        return
    # Bytes survive the end of this process. The shared memory of a tensor does not.
    packed = io.BytesIO()
    torch.save(result, packed)
    results.put((rank, ("done", packed.getvalue())))


def outcomes(count, function, deadline=DEADLINE):
    """Return ("done", result) or (class, message, traceback of the error) for each rank, in order."""
    processes, results = start_ranks(count, function)
    end, outcomes_by_rank = time.monotonic() + deadline, {}
    try:
        while len(outcomes_by_rank) < count and time.monotonic() < end:
            while not results.empty():
                rank, outcome = results.get()
                outcomes_by_rank[rank] = outcome
            time.sleep(0.01)
    finally:
        for process in processes:
            process.join(1 if len(outcomes_by_rank) == count else 0)
            process.kill()
    return [
        outcomes_by_rank.get(rank, ("nothing", f"rank {rank} said nothing in {deadline} s", ""))
        for rank in range(count)
    ]


def results_of(count, function, deadline=DEADLINE):
    """Return the results of `function`, one per rank. Raises AssertionError with the traceback of a failed rank."""
    rank_outcomes = outcomes(count, function, deadline)
    for outcome in rank_outcomes:
        assert outcome[0] == "done", outcome[-1] or outcome
    return [torch.load(io.BytesIO(outcome[1]), weights_only=False) for outcome in rank_outcomes]
