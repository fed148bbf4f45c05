"""MODEL, CLIP and VAE in every state in which ComfyUI keeps a model's memory.

Those of the released sizes run on a card that is not there, without numbers, where devices that mix raise. The bundled
ones run on the CPU, with numbers.
"""

import shutil

import layouts
import pytest
import torch
from fake_cuda import CARD, TOKENS, PagedMemory, Streams, fake_card, load, no_numbers, pack, read_numbers
from safetensors.torch import load_file, save_file
from setup import ROOT

LARGE = 200 * 10**9
# Start options of ComfyUI: where the text encoder computes, and the least and the largest share of a model that
# a step leaves on a GPU with room for half of it. docs/memory.md names these modes.
MODES = {
    "": ("cuda", 0.3, 0.55),
    "--lowvram": ("cuda", 0.3, 0.55),
    "--novram": ("cpu", 0, 0.02),
    "--lowvram --disable-dynamic-vram": ("cpu", 0.3, 0.55),
    "--disable-dynamic-vram": ("cuda", 0.3, 0.55),
}
# how much of a model fits, ComfyUI's state of memory, and whether it has dynamic VRAM
STATES = {
    "fits": (2.0, "NORMAL_VRAM", False),
    "half fits": (0.5, "NORMAL_VRAM", False),
    "--lowvram": (0.5, "LOW_VRAM", False),
    "--novram": (2.0, "NO_VRAM", False),
    "dynamic VRAM": (2.0, "NORMAL_VRAM", True),
    "dynamic VRAM, half fits": (0.5, "NORMAL_VRAM", True),
}
# Models other than the transformer take the same ways in the other states.
FEW_STATES = [
    pytest.param(state, marks=() if state in ("half fits", "dynamic VRAM") else pytest.mark.slow) for state in STATES
]


@pytest.fixture(scope="module")
def files(tmp_path_factory, checkpoint):
    """Headers of the released files, with no numbers behind them."""
    from diffusers import SanaControlNetModel, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    folder = tmp_path_factory.mktemp("released")
    with torch.device("meta"):
        models = {
            "1.6B": SanaTransformer2DModel(),
            "two blocks": SanaTransformer2DModel(num_layers=2),
            "1.5-4.8B": SanaTransformer2DModel(num_layers=60, qk_norm="rms_norm_across_heads"),
            "controlnet": SanaControlNetModel(),
            "gemma": Gemma2Model(Gemma2Config()),
            "dc-ae": layouts.released_autoencoder(),
        }
    shutil.copy(checkpoint / "tokenizer" / "tokenizer.json", folder)
    return {name: layouts.sparse(model, folder / f"{name}.safetensors") for name, model in models.items()}


def state_of(size, name):
    """The options of `fake_card` for the state of that name and a model of `size` bytes."""
    import comfy.model_management as management

    share, state, dynamic = STATES[name]
    return {
        "free": int(share * size + management.minimum_inference_memory()),
        "total": LARGE,
        "state": state,
        "dynamic": dynamic,
    }


def guided_velocity(patcher, side=32):
    """What the MODEL makes of two prompts and a latent of `side` cells."""
    model = patcher.model
    prompts = pack("nodes.host.sampling.model")
    dtype = model.get_dtype_inference()
    embeds = torch.empty(1, 300, 2304, device=CARD)
    mask = torch.ones(1, 300, device=CARD)
    both = prompts.PromptBatch([prompts.Prompt("positive", embeds, mask, keep=False) for _ in range(2)])
    x, sigma = torch.empty(2, 32, side, side, device=CARD), torch.empty(2, device=CARD)
    context = torch.empty(2, 300, 2304, device=CARD, dtype=dtype)
    return model.apply_model(x, sigma, c_crossattn=context, prompt=both)


def load_model(patch, file, **options):
    """The MODEL of a file, loaded as ComfyUI's samplers load it."""
    import comfy.model_management

    patcher = load(patch, pack("nodes.host.loading.load_model").load_model, file, **options)
    comfy.model_management.load_models_gpu([patcher], 10**6)
    return patcher


@pytest.mark.parametrize("state", STATES)
def test_a_model_draws(host, files, monkeypatch, state):
    with fake_card(monkeypatch, **state_of(files["1.6B"].stat().st_size, state)) as patch, no_numbers(patch):
        out = guided_velocity(load_model(patch, files["1.6B"]))
        assert out.device == CARD and out.shape == (2, 32, 32, 32)


@pytest.mark.parametrize("options", MODES)
def test_each_mode_of_comfyui_s_memory_keeps_what_the_page_says(host, files, monkeypatch, options):
    import comfy.cli_args as cli
    import comfy.model_management as management

    place, least, most = MODES[options]
    parsed = cli.parser.parse_args(options.split())
    with monkeypatch.context() as patch:
        patch.setattr(cli, "args", parsed)
        dynamic = cli.enables_dynamic_vram()
    # ComfyUI reads these options when it is imported.
    vram = "LOW_VRAM" if parsed.lowvram else "NO_VRAM" if parsed.novram else "NORMAL_VRAM"
    size = files["1.6B"].stat().st_size
    card = state_of(size, "half fits") | {"state": vram, "dynamic": dynamic}
    with fake_card(monkeypatch, **card) as patch, no_numbers(patch):
        assert management.text_encoder_device().type == place
        patch.setattr(PagedMemory, "room", size // 2)
        patcher = load_model(patch, files["1.6B"])
        guided_velocity(patcher)
        held = patcher.model.dynamic_vbars[CARD].loaded_size() if dynamic else patcher.loaded_size()
        assert least * size <= held <= most * size, held / size
    assert f"`{options}`" in (ROOT / "docs" / "memory.md").read_text() or not options


@pytest.mark.parametrize("state", ["half fits", pytest.param("dynamic VRAM", marks=pytest.mark.slow)])
def test_a_large_model_in_fp8_draws(host, files, monkeypatch, state):
    with fake_card(monkeypatch, **state_of(files["1.5-4.8B"].stat().st_size / 2, state)) as patch, no_numbers(patch):
        patcher = load_model(patch, files["1.5-4.8B"], weight_dtype="fp8_e4m3fn")
        assert guided_velocity(patcher).device == CARD


@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize("state", ["fits", "half fits", "dynamic VRAM"])
def test_a_model_that_was_quantised_draws(host, files, monkeypatch, state, form):
    from comfy.quant_ops import QuantizedTensor

    file = files["two blocks"]
    with fake_card(monkeypatch, **state_of(file.stat().st_size / 2, state)) as patch, no_numbers(patch):
        patcher = load_model(patch, file, read=read_numbers, quantise=form)
        layer = patcher.model.diffusion_model.transformer_blocks[0].ff.conv_inverted
        assert isinstance(layer.weight, QuantizedTensor)
        assert guided_velocity(patcher).device == CARD


@pytest.fixture
def streamed(host, files, monkeypatch):
    """A function (share, work) that calls `work(streams, step)` for the model of two blocks in dynamic VRAM.

    There are pages for this share of its weights. `step` has run once, without a prompt's cached keys.
    """

    def run(share, work):
        file = files["two blocks"]
        state = state_of(file.stat().st_size, "dynamic VRAM, half fits")
        with fake_card(monkeypatch, **state) as patch, no_numbers(patch):
            patcher = load_model(patch, file)
            patch.setattr(PagedMemory, "room", int(share * file.stat().st_size))
            patcher.pre_run()
            streams = Streams(patch)
            guided_velocity(patcher)
            streams.reset()
            work(streams, lambda: guided_velocity(patcher))
            assert not any(hasattr(layer, "_prefetch") for layer in patcher.model.modules())
            return streams

    return run


@pytest.mark.parametrize(("share", "alone_waits", "waits"), [(0.0, 29, 13), (0.5, 10, 2)])
def test_the_layers_of_a_block_are_copied_together(streamed, monkeypatch, share, alone_waits, waits):
    """With dynamic VRAM, the computing stream waits once for a block instead of once for each of its copied layers."""
    import comfy.model_prefetch

    together = streamed(share, lambda streams, step: step())
    monkeypatch.setattr(comfy.model_prefetch, "make_prefetch_queue", lambda *arguments: None)
    alone = streamed(share, lambda streams, step: step())
    assert (together.copies, together.moved) == (alone.copies, alone.moved)
    # With no pages, 11 layers outside of the two blocks are copied too.
    assert (alone.waits["compute"], together.waits["compute"]) == (alone_waits, waits)


@pytest.mark.parametrize("where", ["attention", "copy"])
def test_a_step_that_fails_keeps_no_copies_of_weights(streamed, monkeypatch, where):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError

    def work(streams, step):
        with monkeypatch.context() as patch:
            if where == "attention":
                patch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
            else:
                # The layers before the blocks are copied alone. The first block has nine layers.
                streams.fail_at = 15
            with pytest.raises(torch.OutOfMemoryError):
                step()

    streamed(0.0, work)


def test_a_model_draws_after_a_part_of_it_was_unloaded(host, files, monkeypatch):
    """ComfyUI takes memory back from a model between two samplings, and does not load the model again."""
    size = files["1.6B"].stat().st_size
    with fake_card(monkeypatch, **state_of(size, "fits")) as patch, no_numbers(patch):
        patcher = load_model(patch, files["1.6B"])
        assert patcher.loaded_size() == patcher.model_size()
        patcher.partially_load(CARD, -0.7 * size)
        assert patcher.loaded_size() < 0.4 * size
        guided_velocity(patcher)
        patcher.detach()
        assert {weight.device.type for weight in patcher.model.parameters()} == {"cpu"}


@pytest.fixture
def clip_in(host, files, monkeypatch):
    """A function (state, work) that loads Gemma 2 in the named memory state and calls `work` with it."""

    def run(state, work, **card):
        import comfy.model_management as management

        with fake_card(monkeypatch, **state_of(files["gemma"].stat().st_size, state) | card) as patch:
            # In the last states ComfyUI would leave the text encoder on the CPU.
            patch.setattr(management, "text_encoder_device", lambda: CARD)
            with no_numbers(patch):
                clip = load(patch, pack("nodes.host.loading.clip").load_clip, files["gemma"])
                work(clip)
                return clip

    return run


def encode(clip):
    ((embeds, extra),), _ = pack("nodes.host.loading.clip").encode(clip, "a red circle", True)
    assert embeds.shape == (1, 300, 2304) and extra["attention_mask"].shape == (1, 300)


@pytest.mark.parametrize("state", FEW_STATES)
def test_the_text_encoder_encodes_and_writes(clip_in, state):
    def work(clip):
        encode(clip)
        tokens = clip.tokenize("a red circle", skip_template=True, min_length=1)
        assert clip.generate(tokens, do_sample=False, max_length=1) == [TOKENS]

    clip_in(state, work)


@pytest.mark.parametrize("state", ["fits", "half fits"])
def test_a_card_without_bf16_keeps_gemma_in_16_bits(clip_in, files, state):
    clip = clip_in(state, encode, major=7)
    assert clip.cond_stage_model.dtypes == {torch.bfloat16}
    assert clip.patcher.model_size() < 1.01 * files["gemma"].stat().st_size
    norm = clip.cond_stage_model.gemma.layers[0].input_layernorm
    assert norm.weight.dtype == torch.float32


@pytest.mark.parametrize("major", [8, 7])
def test_half_of_gemma_is_loaded_without_its_embedding(clip_in, files, major):
    """Of the embedding, only rows are read. So the GPU's memory is for the layers, and little of it is a buffer."""
    clip = clip_in("half fits", encode, major=major)
    gemma, size = clip.cond_stage_model.gemma, files["gemma"].stat().st_size
    assert gemma.embed_tokens.weight.device.type == "cpu"
    # The buffer of ComfyUI, 3.5 GB, left 0 bytes of 2.6 GB to the layers.
    assert clip.patcher.model.model_offload_buffer_memory < 0.1 * size
    assert 0.4 * size < clip.patcher.loaded_size() < 0.5 * size


def test_a_patched_embedding_counts_as_a_whole(clip_in):
    name = "gemma2_2b.transformer.model.embed_tokens"

    def bytes_to_run(patcher):
        (cost,) = (row[0] for row in patcher._load_list() if row[-3] == name)
        return cost

    def work(clip):
        patched = clip.patcher.clone()
        weight = patched.model.gemma.embed_tokens.weight
        patched.add_patches({f"{name}.weight": (torch.zeros_like(weight),)})
        assert bytes_to_run(patched) > weight.nbytes
        # 1024 rows, as stored and as computed.
        assert bytes_to_run(clip.patcher) == 1024 * 2304 * (2 + 2)

    clip_in("half fits", work)


def test_dynamic_vram_brings_no_embedding_to_the_card(clip_in):
    """Its 1.2 GB were on the card for good, and copied again for each prompt."""
    clip = clip_in("dynamic VRAM", encode)
    assert clip.cond_stage_model.gemma.embed_tokens.weight.device.type == "cpu"
    assert clip.patcher.model.model_loaded_weight_memory < 2**21
    pages = clip.patcher.model.dynamic_vbars[CARD]
    assert 3.9e9 < pages.loaded_size() < 4.1e9


@pytest.mark.parametrize("state", FEW_STATES)
def test_a_vae_decodes_and_encodes(host, files, monkeypatch, state):
    with fake_card(monkeypatch, **state_of(files["dc-ae"].stat().st_size, state)) as patch, no_numbers(patch):
        vae = load(patch, pack("nodes.host.loading.vae").load_vae, files["dc-ae"])
        assert vae.decode(torch.empty(1, 32, 8, 8)).shape == (1, 256, 256, 3)
        assert vae.encode(torch.empty(1, 256, 256, 3)).shape == (1, 32, 8, 8)
        assert {weight.device for weight in vae.first_stage_model.parameters()} == {CARD}
        assert vae.patcher.loaded_size() == vae.patcher.model_size()
        # the next picture finds them there
        weights = list(map(id, vae.first_stage_model.parameters()))
        vae.decode(torch.empty(1, 32, 1, 1))
        assert list(map(id, vae.first_stage_model.parameters())) == weights
        # A GPU has the weights in the maps' memory format. The CPU has them as in the file.
        conv = vae.first_stage_model.decoder.conv_out
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
        vae.patcher.detach()
        vae.patcher.load(torch.device("cpu"), full_load=True)
        assert conv.weight.device.type == "cpu" and conv.weight.is_contiguous()


def test_a_decode_may_take_what_dynamic_vram_would_evict(host, files, monkeypatch):
    """A card of 8 GB that holds Gemma and the transformer: strips of 32 px where the pages would not count."""
    with fake_card(monkeypatch, free=10**9, total=8 * 10**9, dynamic=True, evictable=5 * 10**9) as patch:
        module = pack("nodes.host.loading.vae")
        vae = load(patch, module.load_vae, files["dc-ae"])
        planner = module.planner_of(vae.first_stage_model, (1, 32, 128, 128), torch.bfloat16, CARD)
        assert planner.floor().peak_bytes < 10**9
        assert module.budget(planner, CARD) == int(0.9 * 6 * 10**9)


@pytest.mark.parametrize("state", ["fits", "half fits", "--novram", "dynamic VRAM"])
def test_a_controlnet_runs(host, files, monkeypatch, state):
    size = files["controlnet"].stat().st_size
    with fake_card(monkeypatch, **state_of(size, state)) as patch, no_numbers(patch):
        import comfy.model_management

        module = pack("nodes.host.loading.controlnet")
        patcher = load(patch, lambda path: module.load_controlnet(path)[0].control_model_wrapped, files["controlnet"])
        comfy.model_management.load_models_gpu([patcher], 10**6)
        hint = torch.empty(2, 32, 32, 32, device=CARD, dtype=torch.bfloat16)
        context, sigma = torch.empty(2, 300, 2304, device=CARD, dtype=torch.bfloat16), torch.empty(2, device=CARD)
        residuals = patcher.model(hint, sigma, context, hint, sampled_timesteps=sigma)["input"]
        assert {residual.device for residual in residuals if residual is not None} == {CARD}


@pytest.mark.parametrize("state", ["NORMAL_VRAM", "LOW_VRAM", "NO_VRAM"])
def test_a_picture_is_the_same_in_every_state(host, base_graph, monkeypatch, short_memory, state):
    expected = host.run(base_graph())
    casts = []
    monkeypatch.setattr(
        pack("nodes.host.loading.weights").CastLayer,
        "is_ready",
        lambda layer, device: casts.append(type(layer).__name__),
    )
    short_memory(state)
    got = host.run({**base_graph(), "catch model": ("Catch", {"value": ["load", 0], "name": "model"})})
    assert 0 < got["model"].loaded_size() < 0.5 * got["model"].model_size()
    assert {"CastRMSNorm", "CastGemma2RMSNorm"} < set(casts) and any("Embedding" in name for name in casts)
    assert torch.equal(got["latent"]["samples"], expected["latent"]["samples"])
    assert torch.equal(got["image"], expected["image"])


def test_weights_in_16_bits_that_compute_in_fp32_are_those_weights_in_fp32(host, checkpoint, monkeypatch):
    module = pack("nodes.host.loading.clip")
    with torch.inference_mode():
        plain = module.load_clip(checkpoint)
        for name, weight in plain.cond_stage_model.named_parameters():
            if "norm" not in name:
                weight.data = weight.bfloat16().float()
        monkeypatch.setattr(module, "text_dtypes", lambda device: (torch.bfloat16, torch.float32))
        stored = module.load_clip(checkpoint)
        assert stored.cond_stage_model.gemma.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        got, expected = (module.encode(clip, "a red circle", True)[0][0][0] for clip in (stored, plain))
    assert got.dtype == torch.float32 and torch.equal(got, expected)


def gemma_in_float32(checkpoint, folder, added=0.0):
    """The bundled model, its text encoder saved in float32 with `added` on each number of one weight."""
    shutil.copytree(checkpoint, folder)
    file = folder / "text_encoder" / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    tensors["layers.0.mlp.up_proj.weight"] += added
    save_file(tensors, file)
    return folder


def test_gemma_on_a_cpu_is_stored_in_16_bits_that_hold_the_numbers_of_its_file(host, checkpoint, tmp_path):
    module = pack("nodes.host.loading.clip")
    with torch.inference_mode():
        stored = module.load_clip(gemma_in_float32(checkpoint, tmp_path / "model"))
        weights = dict(stored.cond_stage_model.gemma.named_parameters())
        assert {weight.dtype for name, weight in weights.items() if "norm" not in name} == {torch.bfloat16}
        got = module.encode(stored, "a red circle", True)[0][0][0]
        for weight in weights.values():
            weight.data = weight.float()
        assert torch.equal(got, module.encode(stored, "a red circle", True)[0][0][0])


def test_gemma_on_a_cpu_keeps_numbers_that_16_bits_do_not_have(host, checkpoint, tmp_path):
    folder = gemma_in_float32(checkpoint, tmp_path / "model", added=1e-6)
    with torch.inference_mode():
        clip = pack("nodes.host.loading.clip").load_clip(folder)
    weight = clip.cond_stage_model.gemma.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, load_file(folder / "text_encoder" / "model.safetensors")["layers.0.mlp.up_proj.weight"])


def test_the_memory_of_a_step_does_not_depend_on_flash_attention(host, checkpoint, monkeypatch):
    import comfy.model_management

    model = host.output_of("SanaNodesLoader", model="sana-tiny").model
    estimates = []
    for has_flash in (True, False):
        monkeypatch.setattr(comfy.model_management, "xformers_enabled", lambda: False)
        monkeypatch.setattr(comfy.model_management, "pytorch_attention_flash_attention", lambda has=has_flash: has)
        estimates.append(
            (model.memory_required([2, 32, 128, 128]), type(model).__base__.memory_required(model, [2, 32, 128, 128]))
        )
    assert estimates[0][0] == estimates[1][0] == estimates[0][1]
    assert estimates[1][1] > 3 * estimates[1][0]
