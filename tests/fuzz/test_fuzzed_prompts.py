"""Any text and any bytes as prompts: read, encoded, written into a picture and read again; or one line of ours."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sana_core
from sana_core.batch.png import encode_png, is_damaged, read_entry
from sana_core.batch.prompts import read_prompts
from sana_core.model.text import MAX_TOKENS, read_prompt

PIECES = st.sampled_from(
    ["a red circle", "--ar 16:9", "--hw", "\0", "\r", "\u2028", "\x1b[31m", "\ufeff", "\u202e", "e\u0301", "\U0010ffff"]
    + [
        "\ud800",
        "\udfff",
        "<bos>",
        "<eos>",
        "<pad>",
        "<start_of_turn>",
        "<0x00>",
        "\u2581",
        "%s",
        "{}",
        "(a:1.5)",
        "\x85",
    ]
)
# categories=None: half characters too
ANY = st.text(st.characters(exclude_categories=()), max_size=60)
LONG = st.builds(lambda text, times: text * times, ANY | PIECES, st.sampled_from([1, 100, 5_000, 200_000])).map(
    lambda text: text[:1_000_000]
)
TEXTS = ANY | st.lists(PIECES | ANY, max_size=8).map("".join) | LONG


@pytest.fixture(scope="module")
def encoder(small):
    """A function that gives the text encoder, whose own words for itself fill pages."""
    encoder = sana_core.load_text_encoder(small)
    return lambda: encoder


@given(text=TEXTS, instruction=st.booleans(), tokens=st.sampled_from([MAX_TOKENS, 2, 77]))
@example(text="\ud800", instruction=True, tokens=300)
def test_readings(survives, encoder, text, instruction, tokens):
    reading = survives(lambda: read_prompt(encoder().tokenizer.encode, text, instruction, tokens))
    if reading is not None:
        assert len(reading.ids) <= reading.length and "\n" not in reading.note and len(reading.note) < 200


# Each example runs a forward of the text encoder, so there are fewer.
@settings(max_examples=max(1, settings().max_examples // 10))
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), instruction=st.booleans())
def test_embeddings(survives, encoder, texts, instruction):
    encoded = survives(lambda: sana_core.encode_prompts(encoder(), texts, instruction))
    if encoded is not None:
        embeds, mask = encoded
        assert embeds.shape[:2] == mask.shape == (len(texts), MAX_TOKENS) and embeds.isfinite().all()


@given(content=st.binary(max_size=300) | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(content=b"\xff\xfea\0")
@example(content="\ufeff \u2028\x85\n".encode())
def test_files_of_prompts(survives, tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "prompts.txt"
    file.write_bytes(content)
    prompts = survives(lambda: read_prompts(file))
    if prompts is not None:
        assert prompts and all(prompt.text == prompt.text.strip() != "" for prompt in prompts)


# half characters are refused before anything is drawn
WHOLE = TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())


@given(text=WHOLE, settings=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))
def test_pictures_carry_them(survives, text, settings):
    png = survives(lambda: encode_png(torch.zeros(3, 8, 8), text, 7, settings))
    assert read_entry(png)["prompt"] == text and not is_damaged(png)
