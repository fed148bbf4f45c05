"""Graphs of ComfyUI_ExtraModels and its fork, run where that pack is absent."""

import copy

import pytest
import torch
from old_graphs import node, old_graph

LATENTS = ("EmptySanaLatentImage", "EmptyDCAELatentImage")


def run(host, graph):
    graph = host.server.trigger_on_prompt({"prompt": copy.deepcopy(graph)})["prompt"]
    return host.run({key: (item["class_type"], item["inputs"]) for key, item in graph.items()})


@pytest.mark.parametrize("latent", LATENTS)
def test_their_text_to_image_draws_what_our_nodes_draw(host, single_files, latent, one_thread):
    ours = old_graph()
    for key, (kind, inputs) in {**single_files, "gemma": single_files["clip"]}.items():
        if key != "clip":
            ours[key] = node(kind, **inputs)
    ours["positive"] = node(
        "SanaNodesTextEncode", text=ours["positive"]["inputs"]["text"], clip=["gemma", 0], instruction=True
    )
    ours["negative"] = node("SanaNodesTextEncode", text="", clip=["gemma", 0], instruction=False)
    del ours["noted"]
    ours["sample"]["inputs"]["positive"] = ["positive", 0]
    ours["empty"] = node("SanaNodesEmptyLatent", width=128, height=96, batch_size=1)
    theirs = run(host, old_graph(latent))["image"]
    assert theirs.shape == (1, 96, 128, 3)
    assert torch.equal(theirs, run(host, ours)["image"])


def test_their_transformer_in_checkpoints_and_names_of_repositories_are_found(host, install, single_files, checkpoint):
    from loading import component

    transformer, config = component(checkpoint, "transformer")
    install("checkpoints", "Sana_600M_512px.safetensors", transformer, config=config)
    assert run(host, old_graph(name="Efficient-Large-Model/Sana_600M_512px"))["image"].isfinite().all()
    with pytest.raises(Exception, match=r"no file 'Sana_1600M_4Kpx_BF16.safetensors' .*3\.2 GB.*https://"):
        run(host, old_graph(name="Efficient-Large-Model/Sana_1600M_4Kpx_BF16"))
    with pytest.raises(Exception, match=r"no file 'gemma_2_2b_it_elm_bf16.safetensors' .*5\.2 GB.*https://"):
        run(host, old_graph(gemma="unsloth/gemma-2-2b-it-bnb-4bit"))


@pytest.mark.parametrize(
    "repository, stem",
    [
        ("Sana_600M_512px", "Sana_600M_512px_MultiLing"),
        ("Sana_600M_1024px", "Sana_600M_1024px_MultiLing"),
        ("Sana_1600M_512px", "Sana_1600M_512px"),
        ("Sana_1600M_1024px", "Sana_1600M_1024px"),
        ("Sana_1600M_1024px_BF16", "Sana_1600M_1024px_BF16"),
        ("Sana_1600M_512px_MultiLing", "Sana_1600M_512px_MultiLing"),
        ("Sana_1600M_1024px_MultiLing", "Sana_1600M_1024px_MultiLing"),
        ("Sana_1600M_2Kpx_BF16", "Sana_1600M_2Kpx_BF16"),
        ("Sana_1600M_4Kpx_BF16", "Sana_1600M_4Kpx_BF16"),
        ("Sana_Sprint_0.6B_1024px", "Sana_Sprint_0.6B_1024px"),
        ("Sana_Sprint_1.6B_1024px", "Sana_Sprint_1.6B_1024px"),
        ("SANA1.5_1.6B_1024px", "SANA1.5_1.6B_1024px"),
        ("SANA1.5_4.8B_1024px", "SANA1.5_4.8B_1024px"),
    ],
)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_exact_file_of_a_repository_comes_before_its_replacement(host, install, repository, stem, suffix):
    """The .pth in the repositories of SANA 0.6B are named otherwise than the repositories."""
    find = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesModelLoader"].find
    for name in ("Sana_1600M_1024px_BF16.safetensors", f"{stem}.{suffix}"):
        install("diffusion_models", name, {"x": torch.zeros(1)})
    assert find(f"Efficient-Large-Model/{repository}").name == f"{stem}.{suffix}"


def test_the_replacement_is_taken_where_the_exact_file_is_missing(host, install):
    install("diffusion_models", "Sana_1600M_1024px_BF16.safetensors", {"x": torch.zeros(1)})
    find = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesModelLoader"].find
    assert find("Efficient-Large-Model/Sana_1600M_1024px").name == "Sana_1600M_1024px_BF16.safetensors"
    with pytest.raises(FileNotFoundError, match="no file 'Sana_600M_512px_MultiLing.pth' in models/diffusion_models"):
        find("Efficient-Large-Model/Sana_600M_512px")


@pytest.mark.parametrize("size, ratio, expected", [("1024px", "1.00", (1024, 1024)), ("2K", "0.50", (2816, 1408))])
def test_their_sizes_are_read(host, size, ratio, expected):
    graph = {
        "size": node("SanaResolutionSelect", model=size, ratio=ratio),
        "width": node("Catch", value=["size", 0], name="width"),
        "height": node("Catch", value=["size", 1], name="height"),
    }
    assert run(host, graph) == dict(zip(("width", "height"), expected, strict=True))


def test_an_installed_pack_keeps_its_own_nodes(host, monkeypatch):
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "SanaTextEncode", object)
    graph = old_graph()
    host.server.trigger_on_prompt({"prompt": graph})
    assert graph["positive"]["class_type"] == "SanaTextEncode"
    assert graph["negative"]["class_type"] == "SanaNodesTextEncode"
