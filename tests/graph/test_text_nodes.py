"""What the text nodes make of long, marked and empty prompts, and what they say under the node."""

import pytest
import torch
from diffusers import SanaPipeline

from sana_core.text import instruction_text

LONG = "red " * 10_000


@pytest.fixture
def notes(host, monkeypatch):
    """A dict of what each node has last shown under itself."""
    shown = {}
    send = host.server.send_progress_text

    def record(text, node_id, sid=None):
        shown[node_id] = text
        send(text, node_id, sid)

    monkeypatch.setattr(host.server, "send_progress_text", record)
    return shown


@pytest.fixture
def encode(host):
    """A function that runs one text node and returns embeddings and mask."""

    def run(text, instruction=True, node="SanaNodesTextEncode", field="text"):
        own = {} if instruction is None else {"instruction": instruction}
        graph = {
            "load": ("SanaNodesLoader", {"model": "sana-tiny (bundled)"}),
            "encode": (node, {"clip": ["load", 1], field: text, **own}),
            "catch": ("Catch", {"value": ["encode", 0], "name": "conditioning"}),
        }
        ((embeds, rest),) = host.run(graph)["conditioning"]
        return embeds, rest["attention_mask"]

    return run


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    return SanaPipeline.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.mark.parametrize(
    "text, instruction", [(text, on) for text in (LONG.strip(), "a red circle") for on in (True, False)] + [("", False)]
)
def test_the_embeddings_are_those_of_the_pipeline(encode, pipeline, text, instruction):
    lines = instruction_text().split("\n") if instruction else None
    theirs, their_mask, _, _ = pipeline.encode_prompt(text, False, complex_human_instruction=lines)
    embeds, mask = encode(text, instruction)
    torch.testing.assert_close(embeds, theirs, atol=1e-5, rtol=0)
    assert torch.equal(mask, their_mask)


def test_ten_thousand_words_are_cut_and_the_node_says_so(encode, notes):
    encode("a red circle")
    assert notes["encode"] == "4 of 300 tokens"
    encode(LONG)
    assert notes["encode"] == "9701 of 10001 tokens were cut: SANA reads 300"
    encode(LONG, instruction=False)
    # without the instruction the space at the end is a token
    assert notes["encode"] == "9702 of 10002 tokens were cut: SANA reads 300"
    encode("red " * 250_000)
    assert notes["encode"] == "more than 24702 tokens were cut: SANA reads 300"


def test_an_empty_text_stands_for_no_prompt_whatever_the_switch_says(encode, notes):
    embeds, mask = encode("")
    without, its_mask = encode("", instruction=False)
    assert torch.equal(embeds, without) and torch.equal(mask, its_mask) and mask.sum() == 1
    assert notes["encode"] == "1 of 300 tokens"
    # a blank text keeps its blanks, as any negative prompt does
    assert torch.equal(encode(" \n\t")[0], encode(" \n\t", instruction=False)[0])


def test_marks_for_the_size_are_cut_and_case_is_kept(encode, notes):
    plain, _ = encode("a Red circle")
    marked, _ = encode(" a Red circle --ar 16:9\n")
    assert torch.equal(marked, plain)
    assert notes["encode"] == "everything from '--ar 16:9\\n' on was cut: width and height set the size"
    assert not torch.equal(encode("a red circle")[0], plain)
    # a negative prompt stays as it is
    assert not torch.equal(encode("blurry --ar 16:9", False)[0], encode("blurry", False)[0])


def test_a_prompt_list_says_which_prompt_was_cut_and_how_many_more(encode, notes):
    encode("a red circle\na blue cross", node="SanaNodesPromptList", field="prompts")
    assert notes["encode"] == "2 prompts"
    embeds, _ = encode(f"a red circle\n{LONG}\na cross --hw 1:2\n{LONG}", node="SanaNodesPromptList", field="prompts")
    assert notes["encode"] == "4 prompts; prompt 2: 9701 of 10001 tokens were cut: SANA reads 300; 2 more were cut"
    assert embeds.shape == (4, 300, 64)


def test_core_s_encoder_cuts_a_long_prompt_with_a_warning(encode, caplog):
    embeds, mask = encode(LONG, None, "CLIPTextEncode")
    ours, our_mask = encode(LONG)
    assert torch.equal(embeds, ours) and torch.equal(mask, our_mask)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "9701 of 10001 tokens were cut: SANA reads 300" in warnings


def test_two_text_nodes_at_their_defaults_draw_what_a_negative_without_instruction_draws(host, base_graph, one_thread):
    graph = base_graph(steps=2)
    right = host.run(graph)["image"]
    graph["negative"][1]["instruction"] = True
    assert torch.equal(host.run(graph)["image"], right)
