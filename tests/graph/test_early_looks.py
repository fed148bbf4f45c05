"""SANA Batch Sampler with a scorer: half of the drafts go at each look, the others end at the same bits."""

import shutil

import pytest
import torch
from clips import PROMPT, save_clip

from demo.verifier import save
from sana_core.batch.verifier import Shape, Verifier

SAMPLING = {"steps": 4, "guidance": 4.5, "sampler": "flow_dpmpp_2m"}
OPTIONS = {**SAMPLING, "count": 6, "seed": 7, "devices": "cpu x 2", "chunk": 0}


@pytest.fixture
def drawing(host, base_graph):
    """A function that runs the node, with a scorer in a folder or without, and returns what the outputs caught."""
    folders = [host.models / "clip_vision" / name for name in ("clip", "verifier")]
    save_clip(folders[0])
    save(Verifier(Shape(1, 160, 64, 96, 4, 2, 3, 100)), folders[1])

    def run(scorer=None, vae=True, **options):
        graph = base_graph()
        sampler = graph["sample"][1]
        links = {name: sampler[name] for name in ("model", "positive", "negative", "latent_image")}
        links |= {"vae": ["load", 2]} if vae else {}
        if scorer:
            graph["scorer"] = ("SanaNodesScorerLoader", {"scorer_name": scorer})
            links["scorer"] = ["scorer", 0]
        graph["batch"] = ("SanaNodesBatchSampler", {**OPTIONS, **links, **options})
        for number, name in enumerate(["drafts", "images"][: 1 + vae]):
            graph[f"catch {name}"] = ("Catch", {"value": ["batch", number], "name": name})
        return host.run(graph)

    yield run
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.parametrize("scorer, finish", [("clip", 2), ("verifier", 1)])
def test_those_that_are_left_are_what_they_are_without_a_scorer(drawing, scorer, finish):
    whole, some = drawing(), drawing(scorer, prompt=PROMPT, after=1, finish=finish)
    places = some["drafts"]["batch_index"]
    assert len(places) == finish and places == sorted(places)
    assert torch.equal(some["drafts"]["samples"], whole["drafts"]["samples"][places])
    assert torch.equal(some["images"], whole["images"][places])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scorer": "clip", "prompt": PROMPT, "vae": False}, "vae: got none with a scorer"),
        ({"scorer": "clip", "prompt": "a \ud83d"}, "prompt: holds half a character .* at position 2; write the text"),
        ({"scorer": "clip"}, "prompt: got 0 lines of text for 1 prompts"),
        ({"scorer": "clip", "prompt": PROMPT, "after": 5}, "after: got 5, expected a whole number from 1 to 3"),
    ],
)
def test_what_a_scorer_lacks_is_named(drawing, options, message):
    with pytest.raises(Exception, match=message):
        drawing(**options)
