"""The templates: one for each task, with a note and a card of its own."""

import json
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from setup import ROOT
from workflow import BYPASSED, MUTED

from sana_core.checkpoints.generation import DOWNLOADS

WORKFLOWS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob("workflows/*.json")}
SAMPLERS = {"SanaNodesSampler", "SanaNodesSprint", "SanaNodesBatchSampler"}
TEMPLATES = pytest.mark.parametrize("name", WORKFLOWS)
# Levels of 0 to 255. Four cards that looked alike, of a lighthouse by the sea, differed by 10 to 26.
LEAST_DIFFERENCE = 30


def nodes_of(name, kind):
    return [node for node in WORKFLOWS[name]["nodes"] if node["type"] == kind]


def note_of(name):
    (note,) = nodes_of(name, "MarkdownNote")
    return note["widgets_values"][0]


def small(name):
    """The card at 16 x 16 pixels, without the line of words at its foot."""
    card = Image.open(ROOT / "workflows" / f"{name}.jpg").convert("RGB")
    return np.asarray(card.crop((0, 0, 512, 472)).resize((16, 16), Image.Resampling.BOX), dtype=float)


def test_there_are_at_most_12_templates_and_4k_is_named():
    assert 0 < len(WORKFLOWS) <= 12
    assert any("4K" in name for name in WORKFLOWS)
    assert {path.stem for path in ROOT.glob("workflows/*.jpg")} == set(WORKFLOWS)


def test_no_two_cards_look_alike():
    cards = {name: small(name) for name in WORKFLOWS}
    differences = {pair: np.abs(cards[pair[0]] - cards[pair[1]]).mean() for pair in combinations(cards, 2)}
    assert {pair: value for pair, value in differences.items() if value < LEAST_DIFFERENCE} == {}


@TEMPLATES
def test_no_card_is_of_one_colour(name):
    assert small(name).std() > 20


@TEMPLATES
def test_a_sampler_is_outside_of_subgraphs_where_both_renderers_show_its_preview(name):
    samplers = {node["type"] for node in WORKFLOWS[name]["nodes"]} & SAMPLERS
    assert bool(samplers) == (name != "SANA check this computer")


@TEMPLATES
def test_no_template_has_a_node_that_only_one_renderer_shows(name):
    assert not nodes_of(name, "ImageCompare")


@TEMPLATES
def test_the_negative_prompt_has_a_smaller_box_than_the_prompt(name):
    heights = {node.get("title"): node["size"][1] for node in nodes_of(name, "SanaNodesTextEncode")}
    # Both are the same class, so only their boxes differ in height. The negative prompt of a video is long.
    if {"Prompt", "Negative prompt"} <= heights.keys() and "video" not in name:
        assert heights["Negative prompt"] < heights["Prompt"]


def test_the_switch_to_the_demo_model_is_the_first_node_after_the_files():
    for name in ("SANA 1K and 2K", "SANA 4K and 8K"):
        (switch,) = nodes_of(name, "SanaNodesModelSwitch")
        assert switch["pos"][1] == min(node["pos"][1] for node in WORKFLOWS[name]["nodes"])
        assert "in **SANA Model Switch**" in note_of(name)


def test_the_note_of_the_video_template_downloads_the_folder_that_its_loader_names():
    (loader,) = nodes_of("SANA video from text or image", "SanaNodesLoader")
    note = note_of("SANA video from text or image")
    for folder in [name for name in DOWNLOADS if name.startswith("SANA-Video")]:
        repository = DOWNLOADS[folder].url.removeprefix("https://huggingface.co/")
        assert (
            f"> python -m huggingface_hub.cli.hf download {repository} --local-dir models/diffusers/{folder}\n" in note
        )
    assert loader["widgets_values"][0] in DOWNLOADS


def test_what_a_note_asks_the_user_to_switch_on_is_off():
    modes = {node.get("title", node["type"]): node["mode"] for node in WORKFLOWS["SANA 4K and 8K"]["nodes"]}
    assert modes["SanaNodesSplitPicture"] == BYPASSED and modes["SANA second pass"] == MUTED
    (image,) = nodes_of("SANA video from text or image", "LoadImage")
    assert image["mode"] == BYPASSED


def test_the_video_template_has_sana_video_2_0_muted_with_its_settings():
    workflow = WORKFLOWS["SANA video from text or image"]
    nodes = {node.get("title"): node for node in workflow["nodes"]}
    for name in ("SANA-Video 2.0", "Save SANA-Video 2.0"):
        assert nodes[name]["mode"] == MUTED and f"**{name}**" in note_of("SANA video from text or image")
    names = [field["name"] for field in nodes["SANA-Video 2.0"]["inputs"] if "widget" in field]
    values = dict(zip(names, nodes["SANA-Video 2.0"]["widgets_values"], strict=True))
    # 0 means the length of the model, whose rate reaches Create Video by a link.
    assert values["frames"] == 0 and "fps" not in values
