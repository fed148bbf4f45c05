"""ComfyUI's layers lend their weights to the fused kernels: what these launch inside ComfyUI, and that the weights are
those that the layer would use itself."""

import json

import host_counts
import layouts
import pytest
import torch
import torch.nn.functional as F
from fake_cuda import fake_card, pack
from setup import ROOT
from test_memory_states import state_of

# Kernel launches of ComfyUI's guidance around the forward.
GUIDANCE = 21
BLOCK = "transformer_blocks.1"
CONVOLUTION = f"{BLOCK}.ff.conv_inverted"
NORM = f"{BLOCK}.attn1.norm_q"


def committed():
    return json.loads((ROOT / "benchmarks" / "accelerator_counts.json").read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Headers of the released files, with no numbers behind them."""
    from diffusers import SanaTransformer2DModel

    folder = tmp_path_factory.mktemp("released")
    with torch.device("meta"):
        models = {"1.6B": SanaTransformer2DModel(), "dc-ae": layouts.released_autoencoder()}
    return {name: layouts.sparse(model, folder / f"{name}.safetensors") for name, model in models.items()}


@pytest.mark.parametrize("state", ["fits", "dynamic VRAM"])
def test_a_guided_step_launches_what_the_engine_does(host, files, monkeypatch, state):
    pytest.importorskip("triton")
    with fake_card(monkeypatch, **state_of(files["1.6B"].stat().st_size, state)) as patch:
        report = host_counts.guided_step(patch, files["1.6B"]).figures()
    engine, inside = (committed()[stage]["1.6B, 1024 px"] for stage in ("guided_step", "guided_step_in_host"))
    # ComfyUI places each weight itself, so each of the 20 blocks has three products instead of one.
    assert report["launches"] == engine["launches"] + GUIDANCE + 2 * 20
    assert report["gigabytes_moved"] == pytest.approx(engine["gigabytes_moved"], rel=0.04)
    if state == "fits":
        assert report == inside
    else:
        # under it the weights are copied in the first step, into memory that counts here
        assert {**report, "peak_megabytes": inside["peak_megabytes"]} == inside


@pytest.mark.parametrize(("state", "passes"), [("half fits", 1), ("--novram", 1), ("dynamic VRAM, half fits", 2)])
def test_weights_from_the_computer_s_memory_go_to_the_kernels_too(host, files, monkeypatch, state, passes):
    """With little free memory ComfyUI runs the two prompts one after the other."""
    pytest.importorskip("triton")
    with fake_card(monkeypatch, **state_of(files["1.6B"].stat().st_size, state)) as patch:
        counter = host_counts.guided_step(patch, files["1.6B"])
    assert counter.by_name["gated_depthwise"] == 20 * passes
    # the patches of the latents and their bias, and no other
    assert counter.by_name["convolution"] == 2 * passes


def test_a_decode_launches_what_the_engine_does(host, files, monkeypatch):
    pytest.importorskip("triton")
    with fake_card(monkeypatch) as patch:
        report = host_counts.decode(patch, files["dc-ae"]).figures()
    engine = committed()["decode"]["1024 px"]
    for name in ("launches", "gigabytes_moved", "weight_copies"):
        assert report[name] == engine[name]
    assert report["weight_copies"] == 0
    assert report == committed()["decode_in_host"]["1024 px"]


@pytest.fixture
def loaded(host, checkpoint, tmp_path):
    """A function that gives a random MODEL with norms of query and key; a LoRA is on it, and none of it fits."""

    def load(partly, **options):
        from safetensors.torch import save_file

        file = tmp_path / "model.safetensors"
        save_file(layouts.transformer(layers=2, qk_norm=True).state_dict(), file)
        patcher = pack("nodes.host.loading.load_model").load_model(file, **options)
        generator = torch.Generator().manual_seed(0)
        weights = {key: value for key, value in patcher.model_state_dict().items() if key.endswith(".weight")}
        patches = {
            f"diffusion_model.{name}.weight": (torch.randn(weight.shape, generator=generator),)
            for name in (CONVOLUTION, f"{BLOCK}.ff.conv_depth", NORM)
            for weight in [weights[f"diffusion_model.{name}.weight"]]
        }
        assert len(patcher.add_patches(patches, 0.1)) == len(patches)
        patcher.load(torch.device("cpu"), lowvram_model_memory=1 if partly else 0, full_load=not partly)
        return patcher.model.diffusion_model

    return load


@pytest.mark.parametrize("options", [{}, {"weight_dtype": "fp8_e4m3fn"}], ids=["plain", "fp8"])
@pytest.mark.parametrize("partly", [False, True])
def test_the_weights_are_those_of_the_layer_s_own_call(loaded, partly, options):
    lend = pack("sana_core.model.layers").with_weights
    with torch.inference_mode():
        model = loaded(partly, **options)
        layers = [child for child in model.modules() if isinstance(child, torch.nn.Conv2d)]
        assert len(layers) == 7
        if partly:
            assert model.get_submodule(CONVOLUTION).weight_function and model.get_submodule(NORM).weight_function
        for conv in layers:
            x = torch.randn(1, conv.in_channels, 4, 4)
            strides = (conv.stride, conv.padding, conv.dilation, conv.groups)
            got = lend(conv, x, lambda weight, bias, x=x, strides=strides: F.conv2d(x, weight, bias, *strides))
            assert torch.equal(got, conv(x))
        norm, x = model.get_submodule(NORM), torch.randn(1, 3, layouts.WIDTH)
        got = lend(norm, x, lambda weight, bias: x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * weight)
        torch.testing.assert_close(got, norm(x))


def test_a_layer_with_an_adapter_in_bypass_mode_is_called_until_it_is_gone(loaded):
    from comfy.weight_adapter.bypass import BypassForwardHook
    from comfy.weight_adapter.lora import LoRAAdapter

    lend = pack("sana_core.model.layers").with_weights
    with torch.inference_mode():
        conv = loaded(False).get_submodule(CONVOLUTION)
        x = torch.randn(1, conv.in_channels, 4, 4)
        plain = conv(x)
        down, up = torch.randn(2, conv.in_channels), torch.randn(conv.out_channels, 2)
        hook = BypassForwardHook(conv, LoRAAdapter(set(), (up, down, 2.0, None, None, None)))
        hook.inject()
        assert lend(conv, x, F.conv2d) is None and not torch.equal(conv(x), plain)
        hook.eject()
        assert torch.equal(lend(conv, x, lambda weight, bias: F.conv2d(x, weight, bias)), plain)


def test_lending_is_no_break_in_a_graph(loaded):
    lend = pack("sana_core.model.layers").with_weights
    conv = loaded(False).get_submodule(CONVOLUTION)
    x = torch.randn(1, conv.in_channels, 4, 4)

    def call(x):
        return lend(conv, x, lambda weight, bias: F.conv2d(x, weight, bias))

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), call(x))


def test_lending_layers_are_to_core_what_its_own_are(loaded):
    import copy

    import comfy.ops

    conv = loaded(True).get_submodule(CONVOLUTION)
    assert type(conv).__name__ == "Conv2d" and isinstance(conv, comfy.ops.disable_weight_init.Conv2d)
    twin = copy.deepcopy(conv)
    x = torch.randn(1, conv.in_channels, 4, 4)
    with torch.inference_mode():
        assert torch.equal(twin(x), conv(x))
