"""Tokens, the instruction, and what the encoder keeps of it."""

import pytest
import torch
from tiny import library_pipeline

import sana_core
from sana_core.text import instruction_text, select_tokens, tokenize

PROMPTS = ["a red circle on a blue background", "a large white cross at the top left of a black background"]


@pytest.fixture(scope="module")
def encoder(checkpoint):
    return sana_core.load_text_encoder(checkpoint)


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    return library_pipeline(checkpoint)


def test_instruction_has_the_double_quotes_of_the_original():
    text = instruction_text()
    assert text.startswith('Given a user prompt, generate an "Enhanced prompt" that provides')
    assert text.endswith("\nUser Prompt: ")
    assert "'" not in text


@pytest.mark.parametrize("instruction", [True, False])
def test_embeddings_are_those_of_the_pipeline(encoder, pipeline, instruction):
    embeds, mask = sana_core.encode_prompts(encoder, PROMPTS, instruction)
    lines = instruction_text().split("\n") if instruction else None
    theirs, their_mask, _, _ = pipeline.encode_prompt(PROMPTS, False, complex_human_instruction=lines)
    assert embeds.shape == (2, 300, encoder.model.config.hidden_size)
    assert torch.equal(embeds, theirs)
    assert torch.equal(mask, their_mask)


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
def test_a_prompt_fits_up_to_300_tokens_and_not_one_more(encoder, instruction):
    words = ["red"] * 400
    counts = {n: len(encoder.tokenizer.encode(" ".join(words[:n]))) for n in (299, 300)}
    assert counts == {299: 300, 300: 301}
    ids, mask = tokenize(encoder.tokenizer, [" ".join(words[:298])], instruction)
    assert select_tokens(mask).sum() >= 299
    with pytest.raises(ValueError, match=r"text: got \d+ tokens, SANA reads at most 300; shorten the prompt"):
        tokenize(encoder.tokenizer, [" ".join(words[:301])], instruction)


@pytest.mark.parametrize("prompt", ["", "\u96ea\u306e\u5c71 \U0001f3d4", "\u202eabc", "a\tb\nc", "(red:1.4) [x|y]"])
def test_any_text_becomes_tokens_and_comes_back(encoder, pipeline, prompt):
    ids, mask = tokenize(encoder.tokenizer, [prompt], instruction=False)
    assert pipeline.tokenizer.decode(ids[0][mask[0].bool()], skip_special_tokens=True) == prompt
    embeds, _ = sana_core.encode_prompts(encoder, [prompt], instruction=False)
    assert embeds.isfinite().all()
