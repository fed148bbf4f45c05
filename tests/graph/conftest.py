"""The host in this process, and the graph that most tests begin with."""

import pytest
from in_process import Host


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    return Host(tmp_path_factory.mktemp("base"))


@pytest.fixture
def base_graph():
    """A function of overrides: the demo graph up to the sampler's LATENT, caught as "latent", and its picture."""

    def build(**sampler):
        text = sampler.pop("text", "a red circle on a blue background")
        size = {"width": 128, "height": 128, "batch_size": sampler.pop("batch_size", 1)}
        inputs = {"seed": 3, "steps": 8, "guidance": 4.5, "sampler": "flow_dpmpp_2m", **sampler}
        return {
            "load": ("SanaLoader", {"model": "sana-tiny (bundled)"}),
            "positive": ("SanaTextEncode", {"clip": ["load", 1], "text": text, "instruction": True}),
            "negative": ("SanaTextEncode", {"clip": ["load", 1], "text": "", "instruction": False}),
            "empty": ("SanaEmptyLatent", size),
            "sample": (
                "SanaSampler",
                {
                    "model": ["load", 0],
                    "positive": ["positive", 0],
                    "negative": ["negative", 0],
                    "latent_image": ["empty", 0],
                    **inputs,
                },
            ),
            "decode": ("SanaDecode", {"samples": ["sample", 0], "vae": ["load", 2]}),
            "catch latent": ("Catch", {"value": ["sample", 0], "name": "latent"}),
            "catch image": ("Catch", {"value": ["decode", 0], "name": "image"}),
        }

    return build
