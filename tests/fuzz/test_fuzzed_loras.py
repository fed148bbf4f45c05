"""Broken LoRA files of all kinds of adapters: ComfyUI's arithmetic applies exactly the layers that the node reports."""

import logging
import re
from importlib import import_module

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lora_dialects import DIALECTS
from mutations import changed_json
from safetensors.torch import save_file
from verdicts import check_line

# Layers of the small checkpoint.
WEIGHTS = {
    "caption_projection.linear_1": (32, 16),
    "patch_embed.proj": (32, 32, 1, 1),
    "proj_out": (32, 32),
    "transformer_blocks.0.attn1.to_q": (32, 32),
    "transformer_blocks.0.attn2.to_out.0": (32, 32),
    "transformer_blocks.0.ff.conv_inverted": (160, 32, 1, 1),
    "transformer_blocks.1.ff.conv_depth": (160, 1, 3, 3),
    "text_encoder.layers.0.self_attn.q_proj": (16, 16),
}
RANK = 2
PATTERNS = {
    **DIALECTS,
    "old diffusers": ("diffusion_model.{name}", "_lora.down.weight", "_lora.up.weight"),
}
ADAPTERS = ("lora", "lora", "lokr", "lokr of four", "loha", "glora", "oft", "boft", "diff", "set", "norm")
DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int64", "uint8", "bool", "float8_e4m3fn")
SETTINGS = {"transformer.r": RANK, "transformer.lora_alpha": 1.0, "transformer.target_modules": ["to_q"]}
REPORT = re.compile(r"loras/it\.safetensors: (\d+) of (\d+) layers fit(, not .*)?")


@pytest.fixture(scope="module")
def models(loaded, host):
    """MODEL and CLIP. The shapes of their weights equal the table."""
    model, clip, _ = loaded
    names = {name: tuple(weight.shape) for name, weight in model.model.diffusion_model.named_parameters()}
    assert WEIGHTS.items() - {(name.removesuffix(".weight"), shape) for name, shape in names.items()} == {
        ("text_encoder.layers.0.self_attn.q_proj", (16, 16))
    }
    (host.models / "loras").mkdir(exist_ok=True)
    yield model, clip
    (host.models / "loras" / "it.safetensors").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def lora(host):
    """The pack's module that puts LoRA on models."""
    return import_module(
        "..nodes.host.loading.load_model",
        host.nodes.NODE_CLASS_MAPPINGS["SanaNodesLoraLoader"].__module__.rpartition(".")[0],
    )


def adapter(kind, shape, down, up):
    """{end of a key: shape} of one layer's tensors that fit a weight of `shape`."""
    rows, columns, *kernel = shape
    flat = columns * (kernel[0] * kernel[1] if kernel else 1)
    half = rows // 2
    match kind:
        case "lora":
            return {down: (RANK, columns, *kernel), up: (rows, RANK, *[1] * len(kernel))}
        case "lokr":
            return {".lokr_w1": (2, 2), ".lokr_w2": (half, flat // 2)}
        case "lokr of four":
            pairs = {".lokr_w1_a": (2, 1), ".lokr_w1_b": (1, 2)}
            return {**pairs, ".lokr_w2_a": (half, RANK), ".lokr_w2_b": (RANK, flat // 2)}
        case "loha":
            return {f".hada_w{n}_{x}": (rows, RANK) if x == "a" else (RANK, flat) for n in (1, 2) for x in "ab"}
        case "glora":
            return {
                f".{x}{n}.weight": {"a1": (rows, RANK), "b1": (rows, RANK)}.get(f"{x}{n}", (RANK, flat))
                for x in "ab"
                for n in (1, 2)
            }
        case "oft":
            return {".oft_blocks": (2, half, half)}
        case "boft":
            return {".oft_blocks": (1, 2, half, half), ".alpha": ()}
        case "norm":
            return {".w_norm": shape, ".b_norm": (rows,)}
        case "set":
            return {".set_weight": shape}
    return {".diff": shape, ".diff_b": (rows,)}


EXTRA = {
    ".alpha": (),
    ".dora_scale": None,
    ".rescale": None,
    ".diff_b": None,
    ".lora_mid.weight": (RANK, RANK, 1, 1),
    ".reshape_weight": (2,),
    ".lokr_t2": (RANK, RANK, 1, 1),
    ".hada_t1": (RANK, RANK, 1, 1),
    ".nonsense": (3,),
}


@st.composite
def files(draw):
    """{key: (shape, dtype, factor)} of a LoRA's file, with what may be wrong with it."""
    tensors = {}
    for _ in range(draw(st.integers(1, 3))):
        name, shape = draw(st.sampled_from(sorted(WEIGHTS.items())))
        pattern, down, up = PATTERNS[draw(st.sampled_from(sorted(PATTERNS)))]
        layer = name if name.startswith("text_encoder") else pattern.format(name=name, flat=name.replace(".", "_"))
        dtype = draw(st.sampled_from(["float32"] * 6 + list(DTYPES)))
        ends = adapter(draw(st.sampled_from(ADAPTERS)), shape, down, up)
        for end in draw(st.sets(st.sampled_from(sorted(EXTRA)), max_size=2)):
            ends.setdefault(end, EXTRA[end] if EXTRA[end] is not None else (shape[0], *[1] * (len(shape) - 1)))
        for end, shapes in ends.items():
            tensors[layer + end] = (shapes, dtype, draw(st.sampled_from([0.1, 0.1, 1.0])))
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from(sorted(tensors)))
        shape, dtype, factor = tensors[key]
        match draw(st.sampled_from(("shape", "size", "rank", "drop", "rename", "dtype", "factor"))):
            case "shape":
                shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
            case "size" if shape:
                at = draw(st.integers(0, len(shape) - 1))
                shape = (*shape[:at], draw(st.sampled_from([0, 1, shape[at] + 1, shape[at] * 2])), *shape[at + 1 :])
            case "rank":
                shape = draw(st.sampled_from([shape[1:], (1, *shape), (*shape, 1), shape[::-1]]))
            case "drop" if len(tensors) > 1:
                del tensors[key]
                continue
            case "rename":
                del tensors[key]
                key = draw(
                    st.sampled_from(["x." + key, key[:-1], key + "_", key.upper(), key.replace("0", "7")])
                    | st.text(max_size=9)
                )
            case "dtype":
                dtype = draw(st.sampled_from(DTYPES))
            case "factor":
                factor = draw(st.sampled_from([0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")]))
        tensors[key] = (shape, dtype, factor)
    return tensors


def written(file, tensors, metadata):
    """Write the file; return whether all its numbers are such that they change a weight."""
    generator = torch.Generator().manual_seed(0)
    created = {}
    for key, (shape, dtype, factor) in tensors.items():
        numbers = (torch.rand(shape, generator=generator) + 0.5) * factor
        created[key] = numbers.to(getattr(torch, dtype))
    save_file(created, file, metadata)
    return all(map(differs, created.values()))


def differs(tensor):
    """Whether applying a tensor changes a weight. Equal numbers are the identity of an orthogonal adapter."""
    numbers = tensor.float()
    return tensor.is_floating_point() and bool((numbers.abs() > 1e-3).all() and numbers.isfinite().all())


def pair(layer, down=".lora_A.weight", up=".lora_B.weight", **more):
    return {layer + down: ((2, 16), "float32", 0.1), layer + up: ((32, 2), "float32", 0.1), **more}


LAYER = "caption_projection.linear_1"


# two layers of one weight, of which ComfyUI forgets one
@example({**pair(LAYER), **pair(f"diffusion_model.{LAYER}", ".lora_down.weight", ".lora_up.weight")}, None, False)
# a weight that fits and a bias that does not: none of the layers fits, and yet the weight was another
@example({**pair(LAYER), f"{LAYER}.diff_b": ((32, 1), "float32", 0.1)}, None, False)
@example({**pair(LAYER), f"{LAYER}.reshape_weight": ((), "float32", 0.1)}, None, False)
# a part that is one number, of which there is no rank
@example({**pair(LAYER), f"{LAYER}.lora_A.weight": ((), "float32", 0.1)}, None, False)
# An adapter without blocks: ComfyUI applies it, and the weight does not change.
@example(
    {
        **pair(LAYER),
        "proj_out.oft_blocks": ((0, 2, 16, 16), "float32", 0.1),
        "proj_out.alpha": ((), "float32", 0.1),
    },
    None,
    False,
)
# a line of 600 characters
@example(
    {
        f"{prefix}{LAYER}.lokr_w1{end}": (3 * (1,), "float32", 0.1)
        for prefix in ("transformer.", "diffusion_model.", "")
        for end in ("", "_a", "_b", "_c")
    },
    None,
    False,
)
@given(files(), st.none() | changed_json(SETTINGS), st.booleans())
def test_loras(survives, models, lora, host, caplog, tensors, settings, with_clip):
    model, clip = models
    metadata = {"lora_adapter_metadata": settings} if settings is not None else None
    file = host.models / "loras" / "it.safetensors"
    lively = written(file, tensors, metadata) and metadata is None
    # blocks of one number are orthogonal whatever it is
    lively = lively and not any(
        shape[-1:] == (1,) for key, (shape, *_) in tensors.items() if key.endswith("oft_blocks")
    )

    def apply():
        with torch.inference_mode():
            return lora.apply_lora(model, clip if with_clip else None, file, 1.0, 1.0)

    result = survives(apply, "it.safetensors")
    if result is None:
        return
    patched, patched_clip, *lines = result
    (report,) = filter(None, lines)
    check_line(report)
    fitting, total, _ = REPORT.fullmatch(report).groups()
    applied = changes(patched, caplog, lively)
    applied += changes(patched_clip.patcher, caplog, lively) if with_clip else 0
    assert 0 < int(fitting) <= int(total)
    assert int(fitting) <= applied, report


def changes(patcher, caplog, lively):
    """Return how many weights of `patcher` its patches change, by ComfyUI's own arithmetic; each has to."""
    import comfy.lora
    import comfy.utils

    for key, patches in patcher.patches.items():
        weight = comfy.utils.get_attr(patcher.model, key).detach().float()
        caplog.clear()
        logging.disable(logging.NOTSET)
        after = comfy.lora.calculate_weight(patches, weight.clone(), key)
        logging.disable(logging.WARNING)
        assert not caplog.records, caplog.text
        assert after.shape == weight.shape, key
        assert not (lively and torch.equal(after, weight)), key
    return len(patcher.patches)
