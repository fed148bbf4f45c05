"""Plain files quantised as they are loaded: attention and feed-forward in core's formats, patched, saved, refused."""

import json

import layouts
import pytest
import torch
from fake_cuda import fake_card, pack
from safetensors.torch import save_file

from sana_core.checkpoints.headers import read_file

FORMS = ("fp8", "int8", "int8_convrot")
ALL = (*FORMS, "mxfp8", "nvfp4")
LAYER = "transformer_blocks.2.attn2.to_q"
FORWARD = "transformer_blocks.3.ff.conv_point"
# Largest relative error of one forward of the bundled model. nvfp4 has 4 bits.
ERROR = {"fp8": 0.04, "int8": 0.02, "int8_convrot": 0.02, "mxfp8": 0.06, "nvfp4": 0.3}


@pytest.fixture
def load(host, checkpoint, monkeypatch):
    """A function that gives the bundled MODEL in a format. Those that cards alone quantise are rounded at random."""
    module = pack("nodes.host.loading.quantise")

    def run(form="off", path=checkpoint, **options):
        if form in ("mxfp8", "nvfp4"):
            name, options_of = module.FORMATS[form]
            monkeypatch.setitem(module.FORMATS, form, (name, {**options_of, "stochastic_rounding": 1}))
            monkeypatch.setattr(module, "is_offered", lambda name: True)
        with torch.inference_mode():
            return pack("nodes.host.loading.load_model").load_model(path, quantise=form, **options)

    return run


def velocity(patcher, sampled=True):
    """What the model makes of noise and a random prompt, by the sampling forward or by the library's."""
    model = patcher.model
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 32, 4, 4, generator=generator)
    context = torch.randn(1, 7, model.diffusion_model.config.caption_channels, generator=generator)
    prompts = pack("nodes.host.sampling.model")
    prompt = prompts.PromptBatch([prompts.Prompt("positive", context, torch.ones(1, 7), keep=False)])
    with torch.inference_mode():
        out = model.apply_model(x, torch.tensor([0.7]), c_crossattn=context, prompt=prompt if sampled else None)
    return x - out


def relative(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def dequantised(patcher):
    """{name: weight} of the quantised layers, dequantised by core."""
    layers = dict(patcher.model.diffusion_model.named_modules())
    return {name: layer.weight.dequantize() for name, layer in layers.items() if hasattr(layer, "quant_format")}


@pytest.mark.parametrize("form", ALL)
def test_attention_and_feed_forward_are_quantised_and_nothing_else(load, form):
    plain, patcher = load(), load(form)
    weights = dequantised(patcher)
    blocks = len(plain.model.diffusion_model.transformer_blocks)
    assert len(weights) == 10 * blocks and {"to_q", "to_k", "to_v", "0", "conv_inverted", "conv_point"} == {
        name.rpartition(".")[2] for name in weights
    }
    for name, weight in plain.model.diffusion_model.named_parameters():
        layer = name.removesuffix(".weight")
        if layer in weights:
            assert relative(weights[layer], weight.flatten(1)) < 0.2
        else:
            assert torch.equal(patcher.model.diffusion_model.get_parameter(name), weight)
    assert patcher.model_size() < 0.4 * plain.model_size()
    assert f"quantised to {form}" in patcher.model.model_config.text


@pytest.mark.parametrize("form", ALL)
def test_the_forward_is_that_of_the_dequantised_weights(load, form):
    plain, patcher = load(), load(form)
    expected = velocity(plain)
    got = velocity(patcher)
    assert 0 < relative(got, expected) < ERROR[form]
    # An input that differs in its last bit may round to the next level of int8.
    assert relative(velocity(patcher, sampled=False), got) < (1e-2 if form.startswith("int8") else 1e-4)
    for name, weight in dequantised(patcher).items():
        parameter = plain.model.diffusion_model.get_parameter(f"{name}.weight")
        with torch.inference_mode():
            parameter.copy_(weight.view(parameter.shape))
    # int8 brings the inputs of a layer to 8 bits too
    assert relative(got, velocity(plain)) < (0.02 if form.startswith("int8") else 1e-5)


def test_a_picture_in_8_bits_is_nearly_the_picture(host, base_graph):
    plain = host.run(base_graph())["image"]
    graph = base_graph()
    graph["load"][1]["quantise"] = "int8"
    got = host.run(graph)["image"]
    assert 0 < (got - plain).abs().mean() < 0.01


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("node", ["ModelSave", "CheckpointSave"])
def test_what_core_saves_of_a_quantised_model_loads_again_with_the_same_estimate(host, load, install, form, node):
    load(form)  # offers the formats of cards on this CPU
    other_links = {"clip": ["load", 1], "vae": ["load", 2]} if node == "CheckpointSave" else {}
    graph = {
        "load": ("SanaNodesLoader", {"model": "sana-tiny", "quantise": ["form", 0]}),
        "form": ("AnyValue", {"value": form}),
        "save": (node, {"model": ["load", 0], **other_links, "filename_prefix": f"checkpoints/{form}"}),
        "catch": ("Catch", {"value": ["load", 0], "name": "model"}),
    }
    patcher = host.run(graph)["model"]
    (file,) = host.output.glob(f"checkpoints/{form}*.safetensors")
    name = install("checkpoints" if other_links else "diffusion_models", f"{form}.safetensors", read_file(file))
    file.unlink()
    loader = ("SanaNodesLoader", "model") if other_links else ("SanaNodesModelLoader", "model_name")
    again = host.output_of(loader[0], **{loader[1]: name})
    assert torch.equal(velocity(again), velocity(patcher))
    assert again.model.memory_usage_factor == patcher.model.memory_usage_factor
    assert dict(again.model.diffusion_model.config) == dict(patcher.model.diffusion_model.config)


@pytest.mark.parametrize("form", ALL)
def test_a_quantised_file_without_its_configuration_has_the_same_widths(load, host, install, form, tmp_path):
    """A tool that quantised a released model writes no configuration."""
    file = layouts.save(layouts.transformer().state_dict(), tmp_path / "plain.safetensors")
    patcher = load(form, file)
    install("diffusion_models", "bare.safetensors", patcher.model.diffusion_model.state_dict())
    again = host.output_of("SanaNodesModelLoader", model_name="bare.safetensors")
    assert again.model.diffusion_model.config.mlp_ratio == 2.5
    assert again.model.memory_usage_factor == patcher.model.memory_usage_factor


@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize("state", ["fits", "offloaded"])
def test_a_lora_on_a_quantised_model_is_that_lora(load, form, state):
    cpu, strength = torch.device("cpu"), 0.05
    patchers = [load(), load(form)]
    untouched = [velocity(patcher) for patcher in patchers]
    patched = []
    for patcher in patchers:
        generator = torch.Generator().manual_seed(0)
        adapter = pack("nodes.host.loading.load_model").comfy.lora.load_lora
        tensors = {
            f"{LAYER}.lora_up.weight": torch.randn(160, 4, generator=generator),
            f"{LAYER}.lora_down.weight": torch.randn(4, 160, generator=generator),
            f"{FORWARD}.lora_up.weight": torch.randn(160, 4, 1, 1, generator=generator),
            f"{FORWARD}.lora_down.weight": torch.randn(4, 400, 1, 1, generator=generator),
        }
        result = adapter(tensors, {name: f"diffusion_model.{name}.weight" for name in (LAYER, FORWARD)})
        clone = patcher.clone()
        assert len(clone.add_patches(result, strength)) == 2
        with torch.inference_mode():
            clone.load(cpu, lowvram_model_memory=1 if state == "offloaded" else 0, full_load=state == "fits")
        patched.append(velocity(clone))
        with torch.inference_mode():
            clone.detach()
    effect, error = relative(patched[0], untouched[0]), relative(patched[1], patched[0])
    assert effect > 0.2 and error < 2 * ERROR[form]
    assert torch.equal(velocity(patchers[1]), untouched[1])


def test_a_whole_difference_fits_the_quantised_convolution(load, tmp_path):
    apply_lora = pack("nodes.host.loading.load_model").apply_lora
    difference = torch.randn(160, 400, 1, 1, generator=torch.Generator().manual_seed(1))
    name = f"diffusion_model.{FORWARD}.weight"
    weights = []
    for patcher in (load(), load("int8")):
        for tensor in (difference, difference[..., 0, 0]):
            file = layouts.save({f"{FORWARD}.diff": tensor}, tmp_path / "difference.safetensors")
            clone, _, report, warning = apply_lora(patcher, None, file, 0.1)
            assert "1 of 1 layers fit" in report and not warning
            with torch.inference_mode():
                weights.append(clone.patch_weight_to_device(name, return_weight=True).dequantize().flatten(1))
    plain, quantised = weights[0], weights[2]
    assert torch.equal(weights[1], plain) and torch.equal(weights[3], quantised)
    assert relative(quantised, plain) < 0.02


def test_an_adapter_in_bypass_mode_works_around_a_quantised_convolution(load):
    from comfy.weight_adapter.bypass import BypassForwardHook
    from comfy.weight_adapter.lora import LoRAAdapter

    layers = pack("sana_core.model.layers")
    layer = load("int8").model.diffusion_model.get_submodule(FORWARD)
    states = torch.randn(1, 6, 400)
    up, down = torch.randn(160, 2, 1, 1), torch.randn(2, 400, 1, 1)
    with torch.inference_mode():
        plain = layers.pointwise(layer, states, (2, 3))
        assert torch.equal(layer(states.unflatten(1, (2, 3)).permute(0, 3, 1, 2)).flatten(2).mT, plain)
        hook = BypassForwardHook(layer, LoRAAdapter(set(), (up, down, 2.0, None, None, None)))
        hook.inject()
        got = layers.pointwise(layer, states, (2, 3))
        hook.eject()
        expected = plain + states @ down.flatten(1).T @ up.flatten(1).T
        torch.testing.assert_close(got, expected)
        assert torch.equal(layers.pointwise(layer, states, (2, 3)), plain)


@pytest.mark.parametrize("state", ["LOW_VRAM", "NO_VRAM"])
def test_a_quantised_picture_is_the_same_in_every_state(host, base_graph, short_memory, state):
    graph = base_graph()
    graph["load"][1]["quantise"] = "int8"
    expected = host.run(graph)
    short_memory(state)
    got = host.run({**graph, "catch model": ("Catch", {"value": ["load", 0], "name": "model"})})
    assert 0 < got["model"].loaded_size() < 0.5 * got["model"].model_size()
    assert torch.equal(got["latent"]["samples"], expected["latent"]["samples"])


def with_fp8(model, name):
    """Return the tensors of `model`, whose layer `name` is in fp8, and the dequantised weight of the layer."""
    tensors = dict(model.state_dict())
    scale = tensors[f"{name}.weight"].float().abs().max() / 448
    tensors[f"{name}.weight"] = (tensors[f"{name}.weight"].float() / scale).to(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale"] = scale
    tensors[f"{name}.comfy_quant"] = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    return tensors, tensors[f"{name}.weight"].float() * scale


def test_a_quantised_feed_forward_of_a_file_is_read(host, install, load):
    """A tool that quantised the 1x1 convolutions as they are."""
    model, name = layouts.transformer(), "transformer_blocks.0.ff.conv_inverted"
    tensors, expected = with_fp8(model, name)
    install("diffusion_models", "sana_ff.safetensors", tensors)
    got = velocity(host.output_of("SanaNodesModelLoader", model_name="sana_ff.safetensors"))
    model.get_parameter(f"{name}.weight").data = expected
    install("diffusion_models", "sana_plain.safetensors", model.float().state_dict())
    plain = host.output_of("SanaNodesModelLoader", model_name="sana_plain.safetensors")
    assert relative(got, velocity(plain)) < 1e-3


def test_a_quantised_3x3_convolution_is_dequantised(host, install):
    """ComfyUI has no convolutions in quantised formats."""
    model, name = layouts.transformer(), "transformer_blocks.0.ff.conv_depth"
    tensors, expected = with_fp8(model, name)
    install("diffusion_models", "sana_3x3.safetensors", tensors)
    weight = host.output_of("SanaNodesModelLoader", model_name="sana_3x3.safetensors").model.diffusion_model
    torch.testing.assert_close(weight.get_submodule(name).weight.float(), expected, atol=0, rtol=2**-8)


def test_what_is_offered_is_what_this_computer_has(host, monkeypatch):
    import comfy.quant_ops

    module = pack("nodes.host.loading.quantise")
    assert module.choices() == ["off", *FORMS]
    with fake_card(monkeypatch, major=8):
        assert module.choices() == ["off", *FORMS]
    with fake_card(monkeypatch, major=10) as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        assert module.choices() == ["off", *ALL]
        (option,) = [
            item for item in pack("nodes.loader").SanaNodesModelLoader.define_schema().inputs if item.id == "quantise"
        ]
        assert option.options == ["off", *ALL] and option.optional and option.advanced
    monkeypatch.delitem(comfy.quant_ops.QUANT_ALGOS, "int8_tensorwise")
    assert module.choices() == ["off", "fp8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantise": "nvfp4"}, "quantise: got 'nvfp4', expected one of off, fp8, int8, int8_convrot on this computer"),
        ({"quantise": "int8", "weight_dtype": "fp8_e5m2"}, "quantise: got int8 for weight_dtype fp8_e5m2; choose"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(host, checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        pack("nodes.host.loading.load_model").load_model(checkpoint, **options)


def test_a_quantised_file_is_not_quantised_again(load, tmp_path):
    patcher = load("fp8")
    tensors = {name: tensor.contiguous() for name, tensor in patcher.model.diffusion_model.state_dict().items()}
    save_file(tensors, tmp_path / "saved.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(patcher.model.diffusion_model.config)))
    assert any(name.endswith("comfy_quant") for name in read_file(tmp_path / "saved.safetensors"))
    with pytest.raises(ValueError, match="quantise: got int8 for a file that is quantised already; choose off"):
        load("int8", tmp_path / "saved.safetensors")


def test_a_cluster_refuses_what_it_would_draw_otherwise(load):
    job = pack("nodes.host.batch.job")
    with pytest.raises(ValueError, match="choose weight_dtype default or without fast, and quantise off"):
        job.check_patches(load("int8"), job.CLUSTER_READER)


def test_other_devices_load_the_same_format(load):
    patcher = load("int8_convrot")
    with torch.inference_mode():
        twin = patcher.deepclone_multigpu(new_load_device=torch.device("cpu"))
    weights, other = patcher.model.state_dict(), twin.model.state_dict()
    assert weights.keys() == other.keys() and all(torch.equal(weights[key], other[key]) for key in weights)
