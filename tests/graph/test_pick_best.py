"""SANA Pick Best in ComfyUI: the images with the highest scores, and a sheet of all images."""

import shutil

import pytest
import torch
from clips import PROMPT, save_clip
from safetensors.torch import load_file, save_file

from sana_core.batch.best import load_scorer

pytestmark = pytest.mark.usefixtures("one_load")


@pytest.fixture
def picking(host, base_graph, tmp_path):
    """A function that runs the nodes after a sampler of six images, and returns the caught outputs."""
    folder = host.models / "clip_vision" / "clip"
    save_clip(folder)

    def run(best=2, sampler="sample", **options):
        graph = base_graph(batch_size=6, seed=7, steps=3)
        samples = graph["decode"][1]["samples"]
        graph["scorer"] = ("SanaNodesScorerLoader", {"scorer_name": "clip"})
        links = {"samples": samples, "vae": ["load", 2], "scorer": ["scorer", 0]}
        graph["pick"] = ("SanaNodesPickBest", {**links, "prompt": PROMPT, "best": best, **options})
        for number, name in enumerate(("best latent", "best image", "sheet", "seeds")):
            graph[f"catch {name}"] = ("Catch", {"value": ["pick", number], "name": name})
        return host.run(graph), folder

    yield run
    shutil.rmtree(folder)


def test_the_best_have_the_highest_scores_and_each_can_be_generated_again(host, base_graph, picking):
    result, folder = picking()
    images = result["image"].movedim(-1, 1) * 2 - 1
    order = load_scorer(folder).score(images, PROMPT).argsort(descending=True)[:2].tolist()
    assert torch.equal(result["best image"], result["image"][order])
    assert result["best latent"]["batch_index"] == order
    torch.testing.assert_close(result["best latent"]["samples"], result["latent"]["samples"][order], atol=0, rtol=0)
    height, width = result["sheet"].shape[1:3]
    assert (width, height) == (3 * 256, 2 * 286)
    alone = host.run(base_graph(seed=7 + order[0], steps=3))["image"]
    torch.testing.assert_close(result["best image"][:1], alone, atol=1e-4, rtol=0)


def test_the_bar_counts_images_alone(picking, watched):
    import comfy.utils
    from comfy_execution.utils import get_executing_context

    values = []
    watched(lambda value, total, preview: values.append((get_executing_context().node_id, value, total)))
    assert comfy.utils.PROGRESS_BAR_HOOK is not None
    picking()
    assert [item[1:] for item in values if item[0] == "pick"] == [(number, 6) for number in range(1, 7)]


def test_a_lone_surrogate_in_the_prompt_is_named(picking):
    with pytest.raises(Exception, match="^prompt: contains half a character .* at position 2; write the text again$"):
        picking(prompt="a \ud83d circle")


def test_a_scorer_without_a_number_chooses_nothing(picking, host):
    file = host.models / "clip_vision" / "clip" / "model.safetensors"
    # its exponential is infinite
    save_file({**load_file(file), "logit_scale": torch.tensor(200.0)}, file)
    with pytest.raises(Exception, match="scorer: clip gave no number for any of the 6 images from seed 7"):
        picking()


def test_more_than_there_are_is_named(picking):
    with pytest.raises(Exception, match="best: got 7, expected at most the 6 images"):
        picking(best=7)
