"""Tokens, the instruction, and the positions that the encoder keeps."""

import hashlib
import inspect
import re
import time

import pytest
import torch
from diffusers import SanaControlNetPipeline, SanaPAGPipeline, SanaPipeline, SanaSprintPipeline
from tiny import library_pipeline

import sana_core
from sana_core.model.reference import DIFFUSERS, NVIDIA
from sana_core.model.text import instruction_text, read_prompt, select_tokens, tokenize

PROMPTS = ["a red circle on a blue background", "a large white cross at the top left of a black background"]


@pytest.fixture(scope="module")
def encoder(checkpoint):
    return sana_core.load_text_encoder(checkpoint)


@pytest.fixture(scope="module")
def nvidias(checkpoint):
    return sana_core.load_text_encoder(checkpoint, reference=NVIDIA)


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    return library_pipeline(checkpoint)


def test_the_instruction_is_the_library_s_and_has_double_quotes_in_the_original():
    pipelines = SanaPipeline, SanaPAGPipeline, SanaControlNetPipeline, SanaSprintPipeline
    for pipeline in pipelines:
        theirs = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
        assert instruction_text(DIFFUSERS) == "\n".join(theirs)
    assert instruction_text(NVIDIA) == "\n".join(theirs).replace("'", '"')
    # The digest of NVIDIA's chi_prompt in configs/sana_app_config/Sana_1600M_app.yaml.
    digest = "62b9ab89eebb0ac5ee4d264bf96bf19d2b81f504bc3852500efeaf5a34d638b1"
    assert hashlib.sha256(instruction_text(NVIDIA).encode()).hexdigest() == digest


def test_a_prompt_is_the_same_alone_and_in_a_batch(encoder):
    together, mask = sana_core.encode_prompts(encoder, PROMPTS)
    alone, alone_mask = sana_core.encode_prompts(encoder, PROMPTS[1:])
    assert torch.equal(mask[1:], alone_mask)
    torch.testing.assert_close(together[1:], alone, atol=1e-5, rtol=0)


def test_the_instruction_changes_the_embeddings_of_the_prompt(encoder):
    with_it, _ = sana_core.encode_prompts(encoder, PROMPTS[:1], True)
    without, _ = sana_core.encode_prompts(encoder, PROMPTS[:1], False)
    assert (with_it[:, 1:8] - without[:, 1:8]).abs().max() > 0.1


def test_select_keeps_bos_and_the_last_positions():
    assert select_tokens(torch.arange(500)[None])[0].tolist() == [0, *range(201, 500)]


@pytest.mark.parametrize("instruction", [True, False])
@pytest.mark.parametrize(
    "prompts",
    [
        PROMPTS,
        *([one] for one in ("", " \n", "red " * 297 + "red", "red " * 298 + "red", "a blue cross " * 400)),
        [" A \u00c9toile --ar 16:9 \n"],
    ],
)
def test_every_prompt_is_that_of_the_pipeline(encoder, pipeline, instruction, prompts):
    """The pipeline cuts long prompts, adds the instruction to an empty positive prompt too, and reads lower case."""
    default = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    lines = default if instruction else None
    theirs, their_mask = pipeline.encode_prompt(prompts, False, complex_human_instruction=lines)[:2]
    embeds, mask = sana_core.encode_prompts(encoder, prompts, instruction)
    assert torch.equal(embeds, theirs) and torch.equal(mask, their_mask)


def nvidia_ids(tokenizer, prompt):
    """The 300 ids that NVIDIA's SanaPipeline.forward selects of a positive prompt, and their mask."""
    for mark in ("--aspect_ratio", "--ar", "--hw"):
        prompt = prompt.split(mark)[0]
    chi = instruction_text(NVIDIA)
    length = len(tokenizer(chi).input_ids) + 300 - 2
    calls = tokenizer(chi + prompt.strip(), max_length=length, padding="max_length", truncation=True)
    return [[ids[0], *ids[-299:]] for ids in (calls.input_ids, calls.attention_mask)]


@pytest.mark.parametrize(
    "prompt, note",
    [
        ("  A Red Circle\n", ""),
        ("a red circle --ar 16:9", "everything from '--ar 16:9' on was cut: width and height set the size"),
        ("a circle --hw 512:768 on --ar 1:1 blue", "everything from '--hw 512:768 on --ar' on was cut: width and"),
        ("a circle --aspect_ratio 4:3", "everything from '--aspect_ratio 4:3' on was cut: width and height set"),
        ("a circle--arched", "everything from '--arched' on was cut: width and height set the size"),
        ("--ar 1:1", "everything from '--ar 1:1' on was cut: width and height set the size"),
        ("", ""),
        ("red " * 500, "201 of 501 tokens were cut: SANA reads 300"),
        ("red " * 500 + "--ar 1:1", "width and height set the size; 201 of 501 tokens were cut: SANA reads 300"),
    ],
)
def test_a_positive_prompt_is_read_as_nvidia_reads_it(nvidias, pipeline, prompt, note):
    reading = read_prompt(nvidias.tokenizer.encode, prompt)
    assert note in reading.note and bool(note) == bool(reading.note)
    ids, mask = (select_tokens(part)[0].tolist() for part in tokenize(nvidias.tokenizer, [prompt]))
    assert [ids, mask] == nvidia_ids(pipeline.tokenizer, prompt)
    calls = tokenize(nvidias.tokenizer, [prompt])
    with torch.no_grad():
        states = nvidias.model(calls[0], attention_mask=calls[1]).last_hidden_state
    assert torch.equal(sana_core.encode_prompts(nvidias, [prompt])[0], select_tokens(states))


@pytest.mark.parametrize("prompt", ["  A Red Circle\n", "a circle --ar 16:9", "", "red " * 500])
def test_a_negative_prompt_is_read_as_nvidia_reads_it(encoder, pipeline, prompt):
    theirs = pipeline.tokenizer(prompt, max_length=300, padding="max_length", truncation=True)
    ids, mask = tokenize(encoder.tokenizer, [prompt], instruction=False)
    assert ids[0].tolist() == theirs.input_ids and mask[0].tolist() == theirs.attention_mask


@pytest.mark.parametrize("instruction", [True, False])
def test_a_prompt_fits_up_to_300_tokens_and_of_one_more_one_is_cut(encoder, instruction, caplog):
    counts = {n: len(encoder.tokenizer.encode(" ".join(["red"] * n))) for n in (299, 300)}
    assert counts == {299: 300, 300: 301}
    # After the instruction the first word follows a space, which may change its number of tokens by one.
    readings = [read_prompt(encoder.tokenizer.encode, " ".join(["red"] * n), instruction) for n in range(297, 303)]
    assert [bool(reading.note) for reading in readings] == [reading.tokens > 300 for reading in readings]
    assert {reading.tokens for reading in readings} >= {299, 300, 301}
    assert all(len(reading.ids) == reading.length - max(0, 300 - reading.tokens) for reading in readings)
    over = next(reading for reading in readings if reading.tokens == 301)
    assert over.note == "1 of 301 tokens were cut: SANA reads 300"
    assert not caplog.records
    tokenize(encoder.tokenizer, ["red " * 600, "red"], instruction)
    assert "tokens were cut: SANA reads 300 (the prompt that begins 'red red red" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("words, least", [(10_000, None), (200_000, 15_000)])
@pytest.mark.parametrize("instruction", [True, False])
def test_ten_thousand_words_and_a_million_characters_are_cut_in_less_than_a_second(encoder, instruction, words, least):
    prompt = " ".join(instruction_text(NVIDIA).split()[i % 150] for i in range(words))
    started = time.process_time()
    reading = read_prompt(encoder.tokenizer.encode, prompt, instruction)
    assert time.process_time() - started < 1
    if least is None:
        count = len(encoder.tokenizer.encode(prompt))
        assert abs(reading.tokens - count) <= 2
        assert reading.note == f"{reading.tokens - 300} of {reading.tokens} tokens were cut: SANA reads 300"
    else:
        assert len(prompt) > 1_000_000
        count = re.fullmatch(r"more than (\d+) tokens were cut: SANA reads 300", reading.note)
        assert least < int(count[1]) < len(encoder.tokenizer.encode(prompt))


@pytest.mark.parametrize("prompt", ["", "\u96ea\u306e\u5c71 \U0001f3d4", "\u202eabc", "a\tb\nc", "(red:1.4) [x|y]"])
def test_any_text_becomes_tokens_and_comes_back(encoder, pipeline, prompt):
    ids, mask = tokenize(encoder.tokenizer, [prompt], instruction=False)
    assert pipeline.tokenizer.decode(ids[0][mask[0].bool()], skip_special_tokens=True) == prompt
    embeds, _ = sana_core.encode_prompts(encoder, [prompt], instruction=False)
    assert embeds.isfinite().all()
