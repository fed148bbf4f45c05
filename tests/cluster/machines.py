"""What tests do to the machines of the cluster."""

import time

import psutil


def add_node(cluster):
    return cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80_000_000)


def actors():
    """Return the processes of all actors that this process has started, and of no others."""
    names = {process.pid for process in psutil.Process().children(recursive=True)}
    named = [
        process for process in psutil.process_iter(["cmdline"]) if process.pid in names and process.info["cmdline"]
    ]
    return [process for process in named if process.info["cmdline"][0].startswith("ray::Actor")]


def send_to_an_actor(number):
    """Send a signal to the process of some actor."""
    actors()[0].send_signal(number)


def wait_for_no_actors(seconds=60):
    """Wait at most `seconds` until the last actor has ended."""
    deadline = time.monotonic() + seconds
    while actors():
        assert time.monotonic() < deadline
        time.sleep(0.1)
