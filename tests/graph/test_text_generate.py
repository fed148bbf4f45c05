"""Core's node that lets a CLIP write, on ours."""

import pytest
import torch
from fake_cuda import pack
from in_process import NodeError
from transformers import AutoTokenizer, Gemma2ForCausalLM

pytestmark = pytest.mark.usefixtures("one_load")

SAMPLING = {
    "sampling_mode": "on",
    "sampling_mode.temperature": 0.7,
    "sampling_mode.top_k": 64,
    "sampling_mode.top_p": 0.95,
    "sampling_mode.min_p": 0.05,
    "sampling_mode.repetition_penalty": 1.05,
    "sampling_mode.presence_penalty": 0.0,
    "sampling_mode.seed": 0,
}
PROMPT = "a red circle on a blue background"


@pytest.fixture
def write(host):
    """A function that runs Generate Text, on the model that is loaded already if it may."""

    def run(prompt=PROMPT, keep_cache=False, nodes=None, **inputs):
        options = {"prompt": prompt, "max_length": 100, "sampling_mode": "off", "use_default_template": False, **inputs}
        graph = {
            "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
            "write": ("TextGenerate", {"clip": ["load", 1], **options}),
            "catch": ("Catch", {"value": ["write", 0], "name": "text"}),
            "catch clip": ("Catch", {"value": ["load", 1], "name": "clip"}),
            **(nodes or {}),
        }
        return host.run(graph, keep_cache)

    return run


@pytest.fixture(scope="module")
def library(checkpoint):
    """A function that writes with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    model = Gemma2ForCausalLM.from_pretrained(checkpoint / "text_encoder", dtype=torch.float32)

    def run(text, length):
        ids = tokenizer(text, return_tensors="pt")
        out = model.generate(**ids, do_sample=False, max_new_tokens=length)
        return tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)

    return run


@pytest.mark.parametrize("prompt, length", [(PROMPT, 100), (PROMPT, 7), ("a large", 100), ("", 20), ("\u96ea", 9)])
def test_the_likeliest_text_is_that_of_the_library(write, library, prompt, length):
    assert write(prompt, max_length=length)["text"] == library(prompt, length)


def test_the_template_is_a_turn_of_gemma_s_conversations(write, library):
    turn = f"<start_of_turn>user\n{PROMPT}<end_of_turn>\n<start_of_turn>model\n"
    expected = library(turn, 100)
    assert write(f" {PROMPT}\n", use_default_template=True)["text"] == expected != write()["text"]
    # Core's node passes a prompt that already contains a template.
    assert write(turn, use_default_template=True)["text"] == expected


def test_a_seed_writes_the_same_text_and_another_seed_another(write):
    texts = [write(**{**SAMPLING, "sampling_mode.seed": seed})["text"] for seed in (0, 0, 1, 2, 2**64 - 1)]
    assert texts[0] == texts[1] and len(set(texts)) == 4


def test_a_host_that_asks_for_several_tokens_at_once_gets_the_same_text(write):
    """CLIP.generate of comfy/sd.py in ComfyUI 0.38 hands `mtp` to every model, and its sample_token takes none."""
    got = write(**SAMPLING)
    # comfy_extras/nodes_textgen.py of that version passes these arguments.
    unset = {"images": {}, "video": None, "audio": None, "thinking": False, "system_prompt": ""}
    tokens = got["clip"].tokenize(PROMPT, skip_template=True, min_length=1, **unset)
    options = {key.partition(".")[2]: value for key, value in SAMPLING.items() if "." in key}
    with torch.inference_mode():
        ids = got["clip"].cond_stage_model.generate(tokens, do_sample=True, max_length=100, mtp=True, **options)
    assert got["clip"].decode(ids) == got["text"]


def test_every_setting_of_the_sampling_counts(write):
    base = write(**SAMPLING)["text"]
    # one token to choose from, by three ways
    greedy = write()["text"]
    for only in ({"top_k": 1}, {"min_p": 1.0, "top_k": 0}, {"top_p": 0.0}):
        settings = {**SAMPLING, "sampling_mode.repetition_penalty": 1.0}
        settings |= {f"sampling_mode.{key}": value for key, value in only.items()}
        assert write(**settings)["text"] == greedy != base
    for change in ({"temperature": 2.0}, {"repetition_penalty": 5.0}, {"presence_penalty": 5.0}):
        assert write(**SAMPLING | {f"sampling_mode.{key}": value for key, value in change.items()})["text"] != base


def test_cancel_ends_it_within_a_token_and_the_next_run_goes_on(write):
    import comfy.model_management

    gemma = write()["clip"].cond_stage_model.gemma
    calls = []

    def interrupt(module, args, output):
        calls.append(1)
        if len(calls) == 4:
            comfy.model_management.interrupt_current_processing()

    hook = gemma.register_forward_hook(interrupt)
    try:
        with pytest.raises(InterruptedError, match="write"):
            write("a small", keep_cache=True)
    finally:
        hook.remove()
    assert len(calls) == 4
    assert write()["text"]


def test_each_token_is_one_position_and_one_step_of_the_bar(write, watched):
    shown, lengths = [], []
    gemma = write()["clip"].cond_stage_model.gemma
    hook = gemma.embed_tokens.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    watched(lambda value, total, preview: shown.append((value, total)))
    write("a large", keep_cache=True, max_length=12)
    hook.remove()
    assert lengths[0] > 2 and lengths[1:] == [1] * 11
    assert shown[-1] == (12, 12)


def test_it_writes_the_same_while_weights_are_partly_loaded(write):
    """ComfyUI's lowvram: what does not fit stays off the device, and comes over layer by layer for each token."""
    got = write()
    clip = got["clip"]
    tokens = clip.tokenize(PROMPT, skip_template=True, min_length=1)
    clip.patcher.detach()
    clip.patcher.load(torch.device("cpu"), lowvram_model_memory=100_000, full_load=False)
    layers = [module for module in clip.cond_stage_model.modules() if getattr(module, "comfy_cast_weights", False)]
    assert len(layers) > 3
    with torch.inference_mode():
        ids = clip.cond_stage_model.generate(tokens, do_sample=False, max_length=100)
    clip.patcher.detach()
    assert clip.decode(ids) == got["text"]


def test_a_lora_of_the_text_encoder_changes_what_it_writes(write):
    clip = write()["clip"]
    name = "gemma2_2b.transformer.model.layers.1.mlp.down_proj.weight"
    patched = clip.clone()
    weight = clip.cond_stage_model.get_parameter(name)
    patched.add_patches({name: ("diff", (torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)),))})
    tokens = clip.tokenize(PROMPT, skip_template=True)
    texts = []
    with torch.inference_mode():
        for item in (clip, patched, clip):
            texts.append(item.decode(item.generate(tokens, do_sample=False, max_length=40)))
    assert texts[0] == texts[2] != texts[1]


def test_what_is_not_for_a_language_model_is_refused(write):
    picture = {"empty": ("EmptyImage", {"width": 64, "height": 64, "batch_size": 1, "color": 0})}
    with pytest.raises(NodeError, match="^image: Gemma 2 reads text alone; disconnect it$"):
        write(nodes=picture, image=["empty", 0])
    with pytest.raises(pack("sana_core.errors").InputError, match="^images: Gemma 2 reads text alone; disconnect it$"):
        write()["clip"].tokenize(PROMPT, skip_template=True, images=[torch.zeros(1, 64, 64, 3)])
    with pytest.raises(NodeError, match=r"^prompt: got \d+ tokens, expected fewer than 2048; shorten the prompt$"):
        write("red " * 10_000)


def test_a_system_prompt_of_newer_hosts_begins_the_request(write, library):
    clip = write()["clip"]
    tokens = clip.tokenize(PROMPT, skip_template=False, min_length=1, system_prompt="a large")
    turn = f"<start_of_turn>user\na large\n\n{PROMPT}<end_of_turn>\n<start_of_turn>model\n"
    assert clip.decode(clip.generate(tokens, do_sample=False, max_length=60)) == library(turn, 60)


def test_inputs_for_other_text_encoders_are_named(write, caplog):
    clip = write()["clip"]
    caplog.clear()
    clip.tokenize(PROMPT, skip_template=True, min_length=1, thinking=False, images=[], system_prompt="")
    assert not caplog.messages
    clip.tokenize(PROMPT, skip_template=True, min_length=1, thinking=True, new_option=torch.zeros(2))
    clip.tokenize(PROMPT, llama_template="{}", prevent_empty_text=True, system_prompt="a large")
    names = ("thinking", "new_option", "llama_template", "system_prompt")
    assert caplog.messages == [f"{name} has no effect on SANA" for name in names]
    # such as core's nodes for Qwen's and HunyuanVideo's text encoders have
    for name, value in {"images": [torch.zeros(1, 64, 64, 3)], "image_embeds": torch.zeros(1, 2, 4)}.items():
        with pytest.raises(pack("sana_core.errors").InputError, match=f"^{name}: Gemma 2 reads text alone; disconnect"):
            clip.tokenize(PROMPT, **{name: value})


def test_core_s_text_encode_still_gets_embeddings(write, host):
    encode = ("CLIPTextEncode", {"clip": ["load", 1], "text": ["write", 0]})
    got = write(nodes={"encode": encode, "catch encode": ("Catch", {"value": ["encode", 0], "name": "conditioning"})})
    ((embeds, extra),) = got["conditioning"]
    assert embeds.shape == (1, 300, 64) and extra["attention_mask"].sum() > 10
