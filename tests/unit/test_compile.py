"""torch.compile of the forward: one graph without a break, and one compilation per size."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoders import noise
from tiny import random_prompt, tiny_transformer

from sana_core.model.block import Perturbation
from sana_core.model.forward import prepare, velocity
from sana_core.sampling.guidance import ControlledModel, compile_mode, denoiser


class Graphs:
    """A backend that runs graphs unchanged and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs(monkeypatch):
    """What counts the graphs of torch.compile, which breaks none."""
    torch._dynamo.reset()
    result, plain = Graphs(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: plain(function, fullgraph=True, backend=result))
    yield result
    torch._dynamo.reset()


def check_denoiser(transformer, size, kept, seed, sigma):
    """Check that the compiled model and `transformer` agree. `kept` are the lengths of two prompts."""
    prompts = [random_prompt(1, kept=tokens, seed=seed + 9 * i) for i, tokens in enumerate(kept)]
    x, sigma = noise(1, 32, *size, seed=seed), torch.tensor(sigma)
    got, expected = (
        denoiser(ControlledModel(transformer, compiled=item), *prompts, 4.5)(x, sigma) for item in (True, False)
    )
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("variant", ["sana", "sana-1.5", "sana-4k"])
@pytest.mark.parametrize("kept", [None, 6])
def test_it_is_one_graph_over_twenty_steps_with_the_same_result(variant, kept, graphs):
    transformer = tiny_transformer(variant)
    embeds, mask = random_prompt(2)
    mask[0, kept:] = 0
    constants = prepare(transformer, embeds, mask, 4, 4)
    compiled = torch.compile(velocity)
    for step in range(20):
        x, timestep = noise(2, 32, 4, 4, seed=step), torch.full((2,), 1000.0 - 50 * step)
        torch.testing.assert_close(
            compiled(transformer, x, timestep, constants), velocity(transformer, x, timestep, constants), atol=0, rtol=0
        )
    assert graphs.count == 1


def test_perturbed_attention_is_one_graph_too(graphs):
    transformer = tiny_transformer()
    embeds, mask = random_prompt(1)
    constants = prepare(transformer, embeds, mask, 4, 4)
    perturbation = Perturbation(torch.tensor([False, True])[:, None, None], frozenset({1}))
    compiled = torch.compile(velocity)
    for step in range(3):
        x, timestep = noise(2, 32, 4, 4, seed=step), torch.full((2,), 500.0 - step)
        expected = velocity(transformer, x, timestep, constants, None, perturbation)
        got = compiled(transformer, x, timestep, constants, None, perturbation)
        torch.testing.assert_close(got, expected, atol=0, rtol=0)
    assert graphs.count == 1


def test_two_sizes_are_at_most_two_compilations(graphs):
    transformer = tiny_transformer()
    embeds, mask = random_prompt(1)
    compiled = torch.compile(velocity)
    for size in ((4, 4), (6, 5), (4, 4), (6, 5)):
        constants = prepare(transformer, embeds, mask, *size)
        for step in range(5):
            compiled(transformer, noise(1, 32, *size), torch.full((1,), 900.0 - step), constants)
    assert graphs.count <= 2


def test_a_guided_sampling_compiles_once(graphs):
    transformer = tiny_transformer()
    prompts = random_prompt(1), random_prompt(1, kept=3, seed=1)
    model = denoiser(ControlledModel(transformer, compiled=True), *prompts, 4.5)
    for step in range(20):
        model(noise(1, 32, 4, 4, seed=step), torch.tensor(1 - step / 20))
    assert graphs.count == 1


def test_prompts_of_all_lengths_and_seeds_are_one_compilation_and_the_same_latents(graphs):
    transformer = tiny_transformer()
    for seed, lengths in enumerate(((10, 3), (7, 2), (None, 10), (1, 1))):
        check_denoiser(transformer, (4, 4), lengths, seed, 0.7)
    assert graphs.count == 1


# Sizes of one bucket, which has at most 2048 positions.
BUCKET = ((4, 6), (6, 4), (3, 8), (8, 3), (5, 5), (2, 12))


@pytest.mark.parametrize("variant", [pytest.param("sana", marks=pytest.mark.slow), "sana-1.5"])
def test_sizes_prompts_and_seeds_of_a_bucket_are_compiled_twice_at_most(variant, graphs):
    """Once for the first size, and once for all others: Dynamo then leaves rows and columns open."""
    transformer = tiny_transformer(variant)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for seed, size in enumerate((*BUCKET, *BUCKET[:2])):
        check_denoiser(transformer, size, (1 + seed % 9, 3), seed, 0.9 - 0.05 * seed)
    assert graphs.count == counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"] and not counters["unimplemented"]


@pytest.mark.parametrize(
    "version, modes",
    [("2.6.0+cu124", ["default", "reduce-overhead"]), ("2.14.1", ["reduce-overhead"] * 2)],
)
def test_cuda_graphs_are_asked_for_in_threads_that_have_them(version, modes, monkeypatch):
    """Until torch 2.13 get_obj in torch/_inductor/cudagraph_trees.py fails where the module was not imported."""
    monkeypatch.setattr(torch, "__version__", version)
    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(compile_mode).result(), compile_mode()] == modes
