"""Memory that runs out at any allocation of a graph: the image is right or a node reports it. The next run is right."""

import pytest
import torch
from allocations import RunsOut, large_tensors, numbers
from in_process import Catch, NodeError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_memory_that_runs_out_anywhere_in_a_graph_harms_nothing_after_it(host, base_graph):
    loaded = host.run({**base_graph(), "catch load": ("Catch", {"value": ["load", 0], "name": "model"})})
    assert loaded["model"]
    graph = base_graph(steps=2)
    with RunsOut() as memory:
        expected = host.run(graph)["image"]
    Catch.caught = {}
    host.executor.reset()
    before, failed, tried = len(large_tensors()), 0, numbers(memory.count, 7)
    for number in tried:
        try:
            with RunsOut(number):
                got = host.run(graph)["image"]
            # smaller strips sum in another order
            assert (got - expected).abs().max() < 1e-5, number
            del got
        except NodeError as error:
            failed += 1
            assert str(error).startswith("no memory"), (number, error)
        Catch.caught = {}
        host.executor.reset()
        assert len(large_tensors()) <= before, number
    assert failed and memory.count > 500
    assert torch.equal(host.run(graph)["image"], expected)


def test_a_decode_that_comfyui_repeats_when_memory_runs_out_says_so(host, base_graph):
    sampled = host.run(base_graph(steps=1))["latent"]
    graph = {key: node for key, node in base_graph().items() if key in ("load", "decode")}
    graph["decode"][1].update(samples=["sample", 0], method="whole")
    graph |= {"sample": ("AnyValue", {"value": sampled})}
    graph |= {f"catch {i}": ("Catch", {"value": ["decode", i], "name": str(i)}) for i in range(2)}
    with RunsOut() as memory:
        expected = host.run(graph)
    assert expected["1"].endswith("\nwhole image at once")
    # This allocation is in the whole decode, which has no strips to make smaller.
    with RunsOut(memory.count - 20):
        got = host.run(graph)
    assert got["1"].startswith("ran out of memory; decoded again in smaller strips")
    assert (got["0"] - expected["0"]).abs().max() < 1e-5
