"""Long, marked and empty prompts in the text nodes, and the text under the node."""

import pytest
import torch

import sana_core

pytestmark = pytest.mark.usefixtures("one_load")

LONG = "red " * 10_000


@pytest.fixture
def note(node_texts):
    """A function that returns the last text shown under the node."""
    return lambda: dict(node_texts)["encode"]


@pytest.fixture
def encode(host):
    """A function that runs one text node and returns embeddings and mask."""

    def run(text, instruction=True, node="SanaNodesTextEncode", field="text", reference="auto"):
        options = {} if instruction is None else {"instruction": instruction}
        graph = {
            "load": ("SanaNodesLoader", {"model": "sana-tiny", "reference": reference}),
            "encode": (node, {"clip": ["load", 1], field: text, **options}),
            "catch": ("Catch", {"value": ["encode", 0], "name": "conditioning"}),
        }
        ((embeds, extra),) = host.run(graph)["conditioning"]
        return embeds, extra["attention_mask"]

    return run


@pytest.mark.parametrize("reference", ["nvidia", "diffusers"])
@pytest.mark.parametrize("instruction", [True, False])
@pytest.mark.parametrize("text", ["", " \n\t", " A Red circle --ar 1:1", LONG])
def test_a_prompt_is_read_as_the_reference_reads_it(encode, checkpoint, text, instruction, reference):
    encoder = sana_core.load_text_encoder(checkpoint, reference=reference)
    expected, expected_mask = sana_core.encode_prompts(encoder, [text], instruction)
    embeds, mask = encode(text, instruction, reference=reference)
    assert torch.equal(embeds, expected) and torch.equal(mask, expected_mask)


def test_ten_thousand_words_are_cut_and_the_node_says_so(encode, note):
    encode("a red circle")
    assert note() == "4 of 300 tokens"
    encode(LONG)
    assert note() == "9701 of 10001 tokens were cut: SANA reads 300"
    encode(LONG, instruction=False, reference="nvidia")
    # NVIDIA keeps the space at the end of a negative prompt, which is a token
    assert note() == "9702 of 10002 tokens were cut: SANA reads 300"
    encode("red " * 250_000)
    assert note() == "more than 24437 tokens were cut: SANA reads 300"


def test_core_s_encoder_leaves_the_instruction_out_of_an_empty_text_alone(encode):
    """It has no switch, and is the negative prompt's node too."""
    for text in ("", " \n\t"):
        assert torch.equal(encode(text, None, "CLIPTextEncode")[0], encode(text, instruction=False)[0])
    assert torch.equal(encode("a red circle", None, "CLIPTextEncode")[0], encode("a red circle")[0])


def test_as_nvidia_marks_for_the_size_are_cut_and_case_is_kept(encode, note):
    plain, _ = encode("a Red circle", reference="nvidia")
    marked, _ = encode(" a Red circle --ar 16:9\n", reference="nvidia")
    assert torch.equal(marked, plain)
    assert note() == "everything from '--ar 16:9\\n' on was cut: width and height set the size"
    assert not torch.equal(encode("a red circle", reference="nvidia")[0], plain)
    # a negative prompt stays as it is
    assert not torch.equal(
        encode("blurry --ar 16:9", False, reference="nvidia")[0], encode("blurry", False, reference="nvidia")[0]
    )


def test_a_prompt_list_says_which_prompt_was_cut_and_how_many_more(encode, note):
    encode("a red circle\na blue cross", node="SanaNodesPromptList", field="prompts")
    assert note() == "2 prompts"
    prompts = f"a red circle\n{LONG}\na cross --hw 1:2\n{LONG}"
    embeds, _ = encode(prompts, node="SanaNodesPromptList", field="prompts", reference="nvidia")
    assert note() == "4 prompts\nprompt 2: 9701 of 10001 tokens were cut: SANA reads 300; 2 more were cut"
    assert embeds.shape == (4, 300, 64)


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_a_prompt_list_splits_lines_only_at_line_ends(encode, note, inside):
    prompts = f"\ufeffa red{inside}circle\r\na blue cross\ra star"
    embeds, _ = encode(prompts, node="SanaNodesPromptList", field="prompts")
    assert note() == "3 prompts"
    alone, _ = encode("a blue cross")
    assert torch.equal(embeds[1:2], alone)


def test_core_s_encoder_cuts_a_long_prompt_and_says_so(encode, node_texts):
    embeds, mask = encode(LONG, None, "CLIPTextEncode")
    assert any("9701 of 10001 tokens were cut: SANA reads 300" in text for _, text in node_texts)
    ours, our_mask = encode(LONG)
    assert torch.equal(embeds, ours) and torch.equal(mask, our_mask)
