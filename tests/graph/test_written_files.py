"""Files as other tools write them, without each marker, table and prefix in turn: right, or refused in one line.

The canvas and the commands give the same verdict. tests/written_by_tools.py generates the files.
"""

import copy
import itertools
import re
import sys

import layouts
import pytest
import torch
from in_process import NodeError
from loading import component
from lora_dialects import DIALECTS
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from written_by_tools import comfyui_files, foreign_files, fp8_of_others

import sana_core
from sana_core.checkpoints.lora import merge_loras
from sana_core.checkpoints.quantised import dequantised

pytestmark = pytest.mark.usefixtures("one_load")

PREFIXES = {
    "transformer": ("", "model.diffusion_model.", "module."),
    "text_encoder": ("", "model.", "text_encoders.gemma2_2b.transformer.model."),
}
LAYERS = {
    "transformer": ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.ff.conv_point"),
    "text_encoder": ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"),
}
# In NVIDIA's layout: diffusers' name of the layer, or of a part of it.
NVIDIA = {
    "blocks.1.mlp.point_conv.conv": "transformer_blocks.1.ff.conv_point",
    "blocks.0.attn.qkv": "transformer_blocks.0.attn1.to_k",
}
UNEQUAL = r"attn.qkv\.[\w.]+ has \d+ rows, expected 3 equal parts"
WRONG = re.compile("download|expected one of .safetensors|Traceback", re.IGNORECASE)
LAYER = "transformer_blocks.2.attn2.to_q"


def one_line(error):
    text = str(error)
    assert "\n" not in text and len(text) < 400 and not WRONG.search(text), text
    return text


@pytest.fixture(scope="module")
def ways(host, checkpoint, tmp_path_factory):
    """{part: a function of a file's tensors and metadata that gives the module on the canvas and by the commands}."""
    folders = {"transformer": "diffusion_models", "text_encoder": "text_encoders"}
    loaders = {"transformer": sana_core.load_transformer, "text_encoder": sana_core.load_text_encoder}

    def read(part, tensors, metadata):
        file = host.models / folders[part] / "written.safetensors"
        file.parent.mkdir(exist_ok=True)
        save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata)
        results = []
        for load in (lambda: canvas(part), lambda: loaders[part](file)):
            try:
                with torch.inference_mode():
                    results.append(load())
            except (ValueError, NodeError) as error:
                results.append(one_line(error))
        file.unlink()
        return results

    def canvas(part):
        if part == "transformer":
            return host.output_of("SanaNodesModelLoader", model_name="written.safetensors").model.diffusion_model
        clip = host.output_of("SanaNodesTextEncoderLoader", text_encoder_name="written.safetensors")
        return clip.cond_stage_model.gemma

    return read


def generated(plain, layers, prefix):
    yield from comfyui_files(plain, layers, [prefix])
    yield from fp8_of_others(plain, layers, prefix)
    yield from foreign_files(plain, layers, prefix)


def generated_in_nvidia_s_layout(checkpoint):
    plain = layouts.nvidia(sana_core.load_transformer(checkpoint))
    for name, file in generated(plain, list(NVIDIA), "model.diffusion_model."):
        if name.startswith(("mxfp8", "nvfp4")) or "blocks of scales" in name:
            # Queries, keys and values share tiles or blocks of scales.
            file = file._replace(error=UNEQUAL)
        elif file.error is not None:
            file = file._replace(error=f"{file.error}|{UNEQUAL}")
        yield f"NVIDIA's, {name}", file


# The names before a layer's name are read in one place, whatever the format.
@pytest.mark.parametrize("prefixes", [slice(1), pytest.param(slice(1, None), marks=pytest.mark.slow)], ids=["", "more"])
@pytest.mark.parametrize("part", PREFIXES)
def test_quantised_files_are_right_or_refused_with_the_reason(checkpoint, tokenizer, ways, part, prefixes):
    plain, config = component(checkpoint, part)
    plain = {name.removeprefix("model."): value for name, value in plain.items()}
    counts = {"right": 0, "refused": 0}
    files = [generated(plain, LAYERS[part], prefix) for prefix in PREFIXES[part][prefixes]]
    files += [generated_in_nvidia_s_layout(checkpoint)] if part == "transformer" and prefixes.start is None else []
    for name, file in itertools.chain(*files):
        inner = "text_encoders." if any(key.startswith("text_encoders.") for key in file.tensors) else ""
        extra = {inner + key: value for key, value in tokenizer.items()} if part == "text_encoder" else {}
        on_canvas, by_command = ways(part, {**file.tensors, **extra}, {**file.metadata, "config": config})
        if file.error is not None:
            assert re.search(file.error, str(on_canvas)), (name, on_canvas)
            assert on_canvas == by_command, name
            counts["refused"] += 1
            continue
        assert not isinstance(on_canvas, str) and not isinstance(by_command, str), (name, on_canvas, by_command)
        for layer in NVIDIA.values() if name.startswith("NVIDIA's") else LAYERS[part]:
            expected = plain[f"{layer}.weight"].float()
            for module in (on_canvas, getattr(by_command, "model", by_command)):
                weight = module.get_submodule(layer).weight
                weight = weight.dequantize() if hasattr(weight, "dequantize") else weight
                weight = weight.detach().float()[: len(expected)].reshape(expected.shape)
                error = float((weight - expected).norm() / expected.norm())
                assert error <= file.tolerance, (name, layer, error)
        counts["right"] += 1
    sys.stdout.write(f"{part}: {counts}\n")
    assert sum(counts.values()) >= 60 and min(counts.values()) > 20, counts


def test_layers_of_4_bits_are_dequantised_as_by_comfyui(host):
    """Its rows have at least 64 numbers, more than the rows of the files above."""
    import comfy.quant_ops

    form, weight = {"format": "convrot_w4a4", "convrot_groupsize": 64}, torch.randn(128, 192)
    quantised = comfy.quant_ops.QuantizedTensor.from_float(weight, "TensorCoreConvRotW4A4Layout", convrot_groupsize=64)
    got = dequantised(form, quantised.state_dict("weight"), (128, 192))
    torch.testing.assert_close(got, quantised.dequantize(), atol=1e-6, rtol=1e-6)


def numbers(*shape, seed=1):
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Parts of a layer of 160 x 160: those that ComfyUI's own loader reads, then those that must not be missing.
ADAPTERS = {
    "LoRA": ({"down": numbers(4, 160), "up": numbers(160, 4), "alpha": torch.tensor(3.0)}, ("down", "up")),
    "LoHa": (
        {
            **{f"hada_w{number}_a": numbers(160, 4, seed=number) for number in (1, 2)},
            **{f"hada_w{number}_b": numbers(4, 160, seed=number + 2) for number in (1, 2)},
            "alpha": torch.tensor(3.0),
        },
        ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    ),
    "LoKr": ({"lokr_w1": numbers(8, 16), "lokr_w2": numbers(20, 10, seed=2)}, ("lokr_w1", "lokr_w2")),
    "LoKr of factors": (
        {
            "lokr_w1": numbers(8, 16),
            "lokr_w2_a": numbers(20, 2, seed=2),
            "lokr_w2_b": numbers(2, 10, seed=3),
            "alpha": torch.tensor(3.0),
        },
        ("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
    ),
    "GLoRA": (
        {
            "a1.weight": numbers(160, 4),
            "a2.weight": numbers(4, 160, seed=2),
            "b1.weight": numbers(160, 4, seed=3),
            "b2.weight": numbers(4, 160, seed=4),
            "alpha": torch.tensor(3.0),
        },
        ("a1.weight", "a2.weight", "b1.weight", "b2.weight"),
    ),
    "Diag-OFT": ({"oft_blocks": numbers(40, 4, 4), "alpha": torch.tensor(0.0)}, ("oft_blocks", "alpha")),
    "Diag-OFT with a limit": ({"oft_blocks": numbers(40, 4, 4), "alpha": torch.tensor(0.01)}, ("oft_blocks", "alpha")),
    "BOFT": ({"oft_blocks": numbers(2, 10, 16, 16), "alpha": torch.tensor(1e-3)}, ("oft_blocks", "alpha")),
    "difference": ({"diff": numbers(160, 160), "diff_b": numbers(160)}, ()),
    "a whole weight": ({"set_weight": numbers(160, 160)}, ("set_weight",)),
}
NORM = "caption_norm"


@pytest.fixture(scope="module")
def transformer(checkpoint):
    return sana_core.load_transformer(checkpoint)


def read_both(host, transformer, tensors):
    """What SANA Load LoRA and the commands make of a file: {parameter: value}, or a line."""
    from comfy.lora import calculate_weight

    file = host.models / "loras" / "written.safetensors"
    file.parent.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    results = []

    def canvas(node="SanaNodesLoraLoader"):
        model = host.output_of("SanaNodesLoader", model="sana-tiny")
        patched = host.output_of(node, linked={"model": model}, lora_name=file.name, strength_model=1.0)
        keys = patched.get_key_patches("diffusion_model.").items()
        return {
            key.removeprefix("diffusion_model."): calculate_weight(patches, weight.float().clone(), key)
            for key, ((weight, _), *patches) in keys
        }

    def command():
        model = copy.deepcopy(transformer)
        merge_loras(model, [(str(file), 1.0)])
        return dict(model.named_parameters())

    for load in (canvas, command):
        try:
            with torch.inference_mode():
                results.append(load())
        except (ValueError, NodeError) as error:
            results.append(one_line(error))
    with torch.inference_mode():
        core = None if any(isinstance(result, str) for result in results) else canvas("LoraLoaderModelOnly")
    file.unlink()
    return *results, core


def written(dialect, parts):
    pattern, down, up = DIALECTS[dialect]
    ends = {"down": down, "up": up}
    name = pattern.format(name=LAYER, flat=LAYER.replace(".", "_"))
    return {f"{name}{ends.get(part, f'.{part}')}": value for part, value in parts.items()}


def difference(one, other):
    return max(
        float((one[name].float() - value.float()).norm() / value.float().norm()) for name, value in other.items()
    )


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_those_of_comfyui_s_loader_or_refused_with_the_reason(host, transformer, kind):
    parts, needed = ADAPTERS[kind]
    for dialect in DIALECTS:
        canvas, command, core = read_both(host, transformer, written(dialect, parts))
        assert not isinstance(canvas, str) and not isinstance(command, str), (dialect, canvas, command)
        changed = f"{LAYER}.weight"
        assert difference({changed: canvas[changed]}, {changed: transformer.get_parameter(changed)}) > 1e-4
        assert difference(canvas, command) < 1e-6
        if "'s name" not in dialect:
            assert difference(canvas, core) < 1e-6, dialect
        for left_out in needed:
            fewer = {part: value for part, value in parts.items() if part != left_out}
            canvas, command, _ = read_both(host, transformer, written(dialect, fewer))
            assert isinstance(canvas, str) and canvas == command, (dialect, left_out, canvas)
            assert re.search(r"but no \w+|not a LoRA|is not read", canvas), canvas
    # Without the prefix of its dialect and its layer's first part, no layer of the model has the name.
    tensors = {name.removeprefix("transformer_blocks."): value for name, value in written("bare", parts).items()}
    canvas, command, _ = read_both(host, transformer, tensors)
    assert canvas == command and "none of its 1 layers fit this model" in canvas


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_norm_is_changed(host, transformer, dialect):
    """LyCORIS trains norms, too. SANA's have no bias."""
    pattern = DIALECTS[dialect][0]
    name = pattern.format(name=NORM, flat=NORM)
    canvas, command, core = read_both(host, transformer, {f"{name}.w_norm": numbers(160)})
    assert difference(canvas, command) < 1e-6 and difference(canvas, core) < 1e-6
    expected = transformer.caption_norm.weight + numbers(160)
    assert torch.allclose(command[f"{NORM}.weight"], expected)
    canvas, command, _ = read_both(host, transformer, {f"{name}.w_norm": numbers(160), f"{name}.b_norm": numbers(160)})
    assert canvas == command and "but no bias" in canvas
    wrong = pattern.format(name=LAYER, flat=LAYER.replace(".", "_"))
    canvas, command, _ = read_both(host, transformer, {f"{wrong}.w_norm": numbers(160)})
    assert canvas == command and "got diff [160], expected [160, 160]" in canvas


PEFT = {
    "lora_bias": {"lora_bias": True},
    "bias of all layers": {"bias": "all"},
    "bias of its layers": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["proj_out", "caption_norm"]},
}


@pytest.mark.parametrize("prefix", ["base_model.model.", "transformer.", ""])
@pytest.mark.parametrize("kind", PEFT)
def test_biases_and_whole_modules_of_peft_are_applied(host, transformer, kind, prefix):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=[LAYER], init_lora_weights=False, **PEFT[kind])
    model = get_peft_model(copy.deepcopy(transformer), config)
    draw = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    stored = get_peft_model_state_dict(model)
    tensors = {prefix + name.removeprefix("base_model.model."): value.clone() for name, value in stored.items()}
    # The scale alpha / r is in the settings, which are not in this file.
    for name in list(tensors):
        if "lora_B" in name:
            tensors[name] = tensors[name] * 2
    merged = dict(model.merge_and_unload().named_parameters())
    canvas, command, _ = read_both(host, transformer, tensors)
    assert not isinstance(canvas, str) and not isinstance(command, str), (canvas, command)
    assert difference(command, merged) < 1e-6 and difference(canvas, merged) < 1e-6
    plain = dict(transformer.named_parameters())
    assert any(not torch.equal(plain[name], value) for name, value in command.items() if name != f"{LAYER}.weight")
