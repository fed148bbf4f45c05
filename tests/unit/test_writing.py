"""What Gemma 2 writes, token for token as transformers' own generation has it."""

import layouts
import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import AddedToken
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

import sana_core
from sana_core import VersionError
from sana_core.checkpoints.tokenizer import json_tokenizer, sentencepiece_tokenizer
from sana_core.model.text import read_request, stop_tokens, write_tokens

# Older versions cannot tell a cache which layers have a window. Generate Text reports this there.
pytestmark = pytest.mark.skipif(Version(transformers.__version__) < Version("4.56"), reason="needs transformers 4.56")
LONG = [2, *torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def reference(request):
    """Gemma 2 with its head, random weights that spread the logits, and a window shorter than the texts."""
    torch.manual_seed(7)
    config = Gemma2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=16,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = Gemma2ForCausalLM(config).train(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    # The head has to be small beside the layers. Otherwise the likeliest token is always the previous one.
    torch.nn.init.normal_(model.lm_head.weight, std=0.05)
    return model.to(request.param)


def theirs(model, ids, length, ends):
    """What transformers' generation writes behind `ids`."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=length,
        eos_token_id=ends, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("ids", [[2], [2, 17, 42], LONG], ids=len)
def test_the_likeliest_tokens_are_those_of_the_library(reference, ids):
    expected = theirs(reference, ids, 60, [299])
    assert len(set(expected)) > 4
    assert write_tokens(reference.model, ids, 60, {299}) == expected


def test_a_text_ends_before_any_token_that_stops_it(reference):
    full_text = write_tokens(reference.model, LONG, 60, ())
    end = full_text[9]
    expected = theirs(reference, LONG, 60, [1, end])
    assert expected[-1] == end and len(expected) < 60
    assert write_tokens(reference.model, LONG, 60, {1, end}) == expected[:-1]


def test_it_writes_up_to_the_last_position_and_refuses_a_request_without_room(reference):
    assert len(write_tokens(reference.model, LONG, 1000, ())) == 128 - len(LONG)
    with pytest.raises(ValueError, match="^prompt: got 128 tokens, expected fewer than 128; shorten the prompt$"):
        write_tokens(reference.model, [2] * 128, 10, ())


@pytest.mark.filterwarnings("error:.*past_key_values.*")
def test_the_cache_has_the_name_that_this_transformers_reads(reference):
    """transformers 5.24 warns of the old name, and older versions silently ignore the new one."""
    lengths = []
    hook = reference.model.embed_tokens.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    expected = theirs(reference, LONG, 4, ())
    lengths.clear()
    assert write_tokens(reference.model, LONG, 4, ()) == expected
    hook.remove()
    assert lengths == [len(LONG), 1, 1, 1]


def test_a_report_that_raises_ends_it(reference):
    calls = []

    def report():
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_tokens(reference.model, LONG, 60, (), report=report)
    assert len(calls) == 3


def test_the_choice_sees_the_logits_of_the_library_and_what_is_written(reference):
    """Always the second likeliest token, from the library's logits of the whole text each time."""
    seen = []

    def choose(logits, written):
        seen.append((logits.clone(), list(written)))
        return int(logits.topk(2).indices[1])

    written = write_tokens(reference.model, LONG, 12, (), choose)
    for step, (logits, before) in enumerate(seen):
        assert before == written[:step]
        with torch.no_grad():
            expected = reference(torch.tensor([LONG + before])).logits[0, -1].float()
        tolerance = 1e-4 if reference.dtype == torch.float32 else 0.5
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    assert max(logits.abs().max() for logits, _ in seen) < 30


def test_the_bundled_encoder_writes_sentences_of_its_training_and_ends(checkpoint):
    encoder = sana_core.load_text_encoder(checkpoint)
    ids = read_request(encoder.tokenizer, "a red circle on a blue background", template=False)
    assert ids == encoder.tokenizer.encode("a red circle on a blue background")
    written = write_tokens(encoder.model, ids, 100, stop_tokens(encoder.tokenizer, encoder.model))
    full = Gemma2ForCausalLM.from_pretrained(checkpoint / "text_encoder", dtype=torch.float32)
    assert [*written, 1] == theirs(full, ids, 100, [1])
    assert "the circle is" in encoder.tokenizer.decode(written)


@pytest.fixture(scope="module")
def gemma_tokenizer(checkpoint):
    """The bundled tokenizer with the two tokens that mark turns, as Gemma's own has."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint / "tokenizer")
    marks = [AddedToken(mark, special=True, normalized=False) for mark in ("<start_of_turn>", "<end_of_turn>")]
    tokenizer.add_tokens(marks, special_tokens=True)
    return tokenizer


CHAT = "<bos><start_of_turn>user\nA cat, please<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize(
    "text, template, expected",
    [
        (" A cat, please\n", True, CHAT),
        ("<start_of_turn>user\nhi<end_of_turn>\n", True, "<bos><start_of_turn>user\nhi<end_of_turn>\n"),
        (" A cat, please\n", False, "<bos> A cat, please\n"),
        ("", False, "<bos>"),
    ],
)
def test_a_request_is_the_turn_of_a_conversation(gemma_tokenizer, text, template, expected):
    ours = json_tokenizer(gemma_tokenizer.backend_tokenizer.to_str().encode(), "tokenizer", 10**6)
    theirs = gemma_tokenizer(expected, add_special_tokens=False).input_ids
    assert read_request(ours, text, template) == theirs
    assert ours.decode(theirs[1:]) == gemma_tokenizer.decode(theirs, skip_special_tokens=True)


@pytest.mark.parametrize("system", ["Answer in one word.", " Answer in one word.\n"])
def test_a_system_prompt_begins_the_user_s_turn(gemma_tokenizer, system):
    ours = json_tokenizer(gemma_tokenizer.backend_tokenizer.to_str().encode(), "tokenizer", 10**6)
    expected = CHAT.replace("A cat", "Answer in one word.\n\nA cat")
    theirs = gemma_tokenizer(expected, add_special_tokens=False).input_ids
    assert read_request(ours, " A cat, please\n", system=system) == theirs


@pytest.mark.parametrize("text, template", [("A cat, please", False), ("<start_of_turn>user\nhi<end_of_turn>\n", True)])
def test_a_system_prompt_without_the_template_is_refused(gemma_tokenizer, text, template):
    ours = json_tokenizer(gemma_tokenizer.backend_tokenizer.to_str().encode(), "tokenizer", 10**6)
    with pytest.raises(ValueError, match="^system_prompt: got a text for a prompt without Gemma 2's template, "):
        read_request(ours, text, template, "Answer in one word.")


def test_a_request_of_a_megabyte_is_refused(gemma_tokenizer):
    ours = json_tokenizer(gemma_tokenizer.backend_tokenizer.to_str().encode(), "tokenizer", 10**6)
    with pytest.raises(ValueError, match=r"^text: got 10000\d\d characters, expected at most 100000; shorten it$"):
        read_request(ours, "a" * 10**6)


def test_a_text_ends_at_the_end_of_a_turn_and_at_every_eos_of_the_model(gemma_tokenizer, checkpoint):
    ours = json_tokenizer(gemma_tokenizer.backend_tokenizer.to_str().encode(), "tokenizer", 10**6)
    model = layouts.gemma()
    assert stop_tokens(ours, model) == {1, gemma_tokenizer.convert_tokens_to_ids("<end_of_turn>")}
    model.config.eos_token_id = [1, 107]
    plain = sana_core.load_text_encoder(checkpoint).tokenizer
    assert stop_tokens(plain, model) == {1, 107}


def test_a_sentencepiece_request_without_the_tokens_spells_the_marks(spiece):
    ours = sentencepiece_tokenizer(spiece, "tokenizer", 10**6)
    ids = read_request(ours, "a red circle")
    assert ids[0] == 2 and ids.count(2) == 1 and 3 not in ids
    assert ours.decode(ids[1:]) == CHAT.removeprefix("<bos>").replace("A cat, please", "a red circle")


def test_an_older_transformers_is_named(reference, monkeypatch):
    monkeypatch.setattr(transformers, "DynamicCache", type("DynamicCache", (), {}))
    with pytest.raises(VersionError, match=r"^transformers: got .*, expected 4.56 or newer"):
        write_tokens(reference.model, LONG, 5, ())
