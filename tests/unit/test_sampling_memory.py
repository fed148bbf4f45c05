"""The predicted memory of a sampling step contains all tensors of the released models, and not much more."""

import pytest
import torch
import vibe_models
from diffusers import SanaTransformer2DModel
from fake_accelerator import FIRST, Counter, default_dtype, fake_accelerators
from live_bytes import LiveBytes

from benchmarks.train_memory import transformer
from sana_core.checkpoints.tokenizer import QWEN, json_tokenizer
from sana_core.memory import CONTEXT, GUIDED, MOST_PASSES, Passes, count_passes, plan_memory, transformer_bytes
from sana_core.model.instruction import EditHead, InstructionReader, encode_instruction
from sana_core.model.known_models import MAX_TOKENS, VARIANTS
from sana_core.model.layers import join_projections
from sana_core.sampling.guidance import EditImage, denoiser, perturbed_attention

pytest.importorskip("triton")
# Older versions of torch ask the driver about fake CUDA tensors.
pytest.importorskip("torch", "2.9")

SINGLE, PAG = Passes(1, 1), Passes(3, 3)


def released_model(variant, pixels, dtype):
    """A transformer with fake weights on the first accelerator. Models for 2K and more have a position embedding."""
    with torch.device("meta"):
        config = dict(transformer(VARIANTS[variant], dtype, 1024).config)
    # These keys would be replaced by their defaults.
    del config["_use_default_values"]
    if VARIANTS[variant].edits:
        config |= {"in_channels": 64, "out_channels": 32}
    config |= {"sample_size": pixels // 32, "interpolation_scale": {2048: 1.0, 4096: 2.0}.get(pixels)}
    with fake_accelerators(), torch.no_grad(), torch.device(FIRST), default_dtype(dtype):
        model = SanaTransformer2DModel.from_config(config).requires_grad_(False)
        # load_models does this too.
        join_projections(model)
    return model


def live_bytes(model, pixels, images, prompts, passes, dtype=torch.bfloat16, interval=(1.0, 0.0), image_guidance=None):
    """The largest number of bytes that is alive in a step, in addition to the weights.

    With an interval, a step outside of it follows.
    """
    # Prompts of full length with padding in some of them are the most expensive.
    counter = Counter({torch.int64: MAX_TOKENS, torch.bool: False})
    embedding = model.patch_embed.pos_embed
    with fake_accelerators(), torch.no_grad():
        positive, negative = (
            (torch.empty(rows, MAX_TOKENS, 2304, dtype=dtype, device=FIRST), torch.ones(rows, MAX_TOKENS))
            for rows in (images if prompts > 1 else 1, 1)
        )
        x = torch.empty(images, 32, pixels // 32, pixels // 32, device=FIRST)
        edit = None if image_guidance is None else EditImage(torch.empty_like(x[:1]), image_guidance)
        attention = perturbed_attention(model.config, 3.0, "") if passes.computed == 3 and edit is None else None
    with torch.no_grad(), fake_accelerators(counter):
        guidance = 1.0 if passes.computed == 1 else 4.5
        call = denoiser(model, positive, negative, guidance, perturbed=attention, interval=interval, edit=edit)
        call(x, 0.5)
        if interval != (1.0, 0.0):
            call(x, 0.9)
    # a buffer of the model, which the weights of a plan do not include
    return counter.peak[FIRST] + (0 if embedding is None else embedding.numel() * embedding.element_size())


def ratio(model, variant, pixels, images, prompts, passes, dtype=torch.bfloat16, interval=(1.0, 0.0)):
    """Predicted bytes of a step, divided by the bytes that are alive."""
    side = pixels // 32
    predicted = transformer_bytes(VARIANTS[variant], side, side, images, dtype, True, prompts, passes)
    return predicted / live_bytes(model, pixels, images, prompts, passes, dtype, interval)


# The largest model has 60 layers, and so takes as long as the two others.
QUICK = {("0.6B", 512), ("0.6B", 2048), ("1.6B", 4096), ("1.5-4.8B", 1024)}


@pytest.mark.parametrize(
    "variant, pixels",
    [
        pytest.param(variant, pixels, marks=() if (variant, pixels) in QUICK else pytest.mark.slow)
        for variant in ("0.6B", "1.6B", "1.5-4.8B")
        for pixels in (512, 1024, 2048, 4096)
    ],
)
def test_a_step_needs_at_most_what_is_predicted_and_no_less_than_87_percent(variant, pixels):
    model = released_model(variant, pixels, torch.bfloat16)
    batches = ((4, 4), (8, 2)) if pixels in (1024, 2048) else ((1, 1), (32, 1), (32, 32))
    ratios = {
        (images, prompts, passes): ratio(model, variant, pixels, images, prompts, passes)
        for images, prompts in batches
        for passes in (SINGLE, GUIDED, PAG)
    }
    assert not {case: value for case, value in ratios.items() if not 1 <= value <= 1.15}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_in_another_dtype_needs_at_most_what_is_predicted(dtype):
    model = released_model("1.6B", 1024, dtype)
    for images, prompts, passes in ((1, 1, GUIDED), (8, 8, PAG), (32, 32, GUIDED), (32, 1, SINGLE)):
        assert 1 <= ratio(model, "1.6B", 1024, images, prompts, passes, dtype) <= 1.15


@pytest.mark.parametrize("images, prompts", [(1, 1), (8, 8)])
def test_guidance_in_an_interval_keeps_the_keys_of_both_kinds_of_steps(images, prompts):
    model, interval = released_model("0.6B", 512, torch.bfloat16), (0.7, 0.0)
    for perturbed, computed in ((False, 2), (True, 3)):
        passes = count_passes(4.5, perturbed, (0.3, 1.0))
        assert passes.computed == computed
        assert 1 <= ratio(model, "0.6B", 512, images, prompts, passes, interval=interval) <= 1.15
    assert passes == MOST_PASSES


def test_a_distilled_model_has_one_pass():
    model = released_model("sprint-1.6B", 1024, torch.bfloat16)
    # The default of two passes does not count.
    predicted = transformer_bytes(VARIANTS["sprint-1.6B"], 32, 32, 8, torch.bfloat16, True, 8)
    assert 1 <= predicted / live_bytes(model, 1024, 8, 8, GUIDED) <= 1.15


@pytest.mark.parametrize("image_guidance, passes", [(1.2, 3), (0.0, 2)])
def test_an_edit_of_2048_px_needs_at_most_what_its_plan_says_and_fits_8_gb(image_guidance, passes):
    model = released_model("vibe-1.6B", 1024, torch.bfloat16)
    plan = plan_memory("vibe-1.6B", 2048, 2048, image_guidance=image_guidance)
    alive = live_bytes(model, 2048, 1, 1, Passes(passes, passes), image_guidance=image_guidance)
    assert 1 <= plan["transformer"]["activations"] / alive <= 1.15
    # The text encoder is the largest stage.
    stages = [plan[name]["weights"] + plan[name]["activations"] for name in ("text", "encode", "transformer", "decode")]
    assert stages[0] == max(stages) == plan["peak"] == pytest.approx(4.90e9, rel=0.01)
    assert stages[0] + CONTEXT <= 8 * 2**30 and plan["fits"][8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_reading_an_instruction_needs_at_most_what_is_predicted(dtype):
    """Real widths, but four layers: the tensors of a layer are freed before the next layer."""
    qwen3_vl = pytest.importorskip("transformers.models.qwen3_vl")
    text = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    text |= {
        "head_dim": 128,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    }
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
    vision["num_position_embeddings"] = 2304
    plan = plan_memory("vibe-1.6B", 2048, 2048, dtype=str(dtype).removeprefix("torch."))["text"]
    with torch.device("meta"):
        deep = {"depth": 24, "deepstack_visual_indexes": [5, 11, 17]}
        config = vibe_models.qwen_config({**text, "num_hidden_layers": 28, "vocab_size": 151936}, vision | deep)
        released = qwen3_vl.Qwen3VLModel(config), EditHead(224, 2048, 2048, 2304, 4)
    assert plan["weights"] == dtype.itemsize * sum(p.numel() for module in released for p in module.parameters())
    model = qwen3_vl.Qwen3VLModel(vibe_models.qwen_config(text, vision)).train(False).to(dtype)
    tokenizer = json_tokenizer(vibe_models.tokenizer().to_str().encode(), "tokenizer.json", 400, QWEN)
    reader = InstructionReader(tokenizer, model, EditHead(224, 2048, 2048, 2304, 4).to(dtype))
    image = torch.zeros(3, 2048, 2048, dtype=torch.uint8)
    with LiveBytes() as live:
        encode_instruction(reader, "make it winter " * 20, image)
    assert 1 <= plan["activations"] / live.peak <= 1.15


@pytest.mark.parametrize(
    "guidance, perturbed, interval, expected",
    [
        (None, False, (0.0, 1.0), (2, 2)),
        (4.5, True, (0.0, 1.0), (3, 3)),
        (1.0, False, (0.0, 1.0), (1, 1)),
        (1.0, True, (0.2, 0.8), (2, 2)),
        (4.5, False, (0.2, 0.8), (2, 3)),
        (4.5, True, (0.0, 0.8), (3, 5)),
    ],
)
def test_passes_of_a_step(guidance, perturbed, interval, expected):
    assert count_passes(guidance, perturbed, interval) == expected


def test_a_plan_grows_with_the_prompts_and_with_pag():
    def step(**options):
        return plan_memory("1.6B", 1024, 1024, 8, **options)["transformer"]["activations"]

    assert step() < step(pag=True) < step(prompts=2) == step(prompts=8) < step(prompts=8, pag=True)
    for prompts in (0, 9):
        with pytest.raises(ValueError, match="^prompts: got "):
            step(prompts=prompts)
