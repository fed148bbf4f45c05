"""The answer to "what fits my GPU": its sentence, its tables, and its seconds beside what an H100 measured."""

import json
import re

import pytest
import torch
from decoders import f32c32
from setup import ROOT
from torch.utils.flop_counter import FlopCounterMode

from sana_core import advice
from sana_core.advice import H100, REACHED, RTX_4090, position_flops, work_of
from sana_core.checkpoints.generation import DOWNLOADS
from sana_core.errors import InputError
from sana_core.memory import CONTEXT, quantised_parameters, transformer_parameters
from sana_core.model.known_models import DECODERS, GPU_SIZES, VARIANTS


@pytest.mark.parametrize(
    "gigabytes, sentence",
    [
        (6, "A GPU of 6 GB: use 1.6B at 1024 px in bf16; for 4096 px use 1.6B 4K; 4.8B needs quantise int8."),
        (8, "A GPU of 8 GB: use 1.6B at 1024 px in bf16; for 4096 px use 1.6B 4K; 4.8B needs quantise int8."),
        (12, "A GPU of 12 GB: use 1.6B at 1024 px in bf16; for 4096 px use 1.6B 4K; 4.8B fits too."),
        (
            4,
            "A GPU of 4 GB: use 1.6B at 1024 px in bf16; part of the text encoder stays in RAM, which is slower; "
            "for 4096 px use 1.6B 4K with quantise int8; 4.8B does not fit.",
        ),
    ],
)
def test_the_answer_is_one_sentence_for_each_gpu(gigabytes, sentence):
    assert advice.answer(advice.sold_gpu(gigabytes))[0] == sentence


@pytest.mark.parametrize(
    "asked, sentence",
    [
        (("1.6B", 4096, 4096), "1.6B at 4096 px in bf16 fits."),
        (("1.6B", 1024, 512, 4), "1.6B at 1024 x 512 px in bf16, 4 images at once, fits."),
        (("1.5-4.8B", 1024, 1024), "1.5-4.8B at 1024 px in bf16 fits with quantise int8."),
        (("1.6B", 8192, 8192), "1.6B at 8192 px in bf16 does not fit; it needs a GPU of 12 GB."),
        (("1.6B", 16384, 16384), "1.6B at 16384 px in bf16 does not fit; it needs a GPU of more than 24 GB."),
        ((None, 4096, 4096), "use 1.6B 4K at 4096 px in bf16."),
        ((None, 2048, 2048), "use 1.6B 2K at 2048 px in bf16; for 4096 px use 1.6B 4K."),
    ],
)
def test_the_answer_for_a_chosen_image_on_8_gb(asked, sentence):
    assert advice.answer(advice.sold_gpu(8), *asked)[0] == f"A GPU of 8 GB: {sentence}"


def test_a_gpu_without_bf16_and_a_computer_without_a_gpu_say_so():
    old = advice.answer(advice.gpu_of(8 * 2**30, bf16=False))[0]
    assert old.startswith("This GPU (8 GB): use 1.6B at 1024 px in fp32 (it has no bf16); part of the text encoder")
    none = advice.answer(advice.usual_gpu())[0]
    assert none.startswith("No GPU here; with one of 8 GB: use 1.6B at 1024 px in bf16")
    # A driver reports a few MiB less than the GPU is sold with.
    assert advice.gpu_of(24_564 * 2**20, True).name == "This GPU (24 GB)"


def test_a_gpu_that_fits_a_model_in_bf16_never_needs_a_setting_for_a_smaller_image():
    """More memory or fewer pixels never make the answer worse."""
    rank = {"": 0, advice.INT8: 1, None: 2}
    for variant in VARIANTS:
        for side in (512, 1024, 4096, 8192):
            ranks = [rank[advice.fit(advice.sold_gpu(gb), variant, side, side).setting] for gb in GPU_SIZES]
            assert ranks == sorted(ranks, reverse=True), (variant, side)
        for gb in GPU_SIZES:
            gpu = advice.sold_gpu(gb)
            ranks = [rank[advice.fit(gpu, variant, side, side).setting] for side in (512, 1024, 4096, 8192)]
            assert ranks == sorted(ranks), (variant, gb)


def test_nonsense_is_refused():
    for asked in (("2B",), ("1.6B", 1000), ("1.6B", 1024, 1024, 1, "sd")):
        with pytest.raises(InputError, match="^(variant|width|vae): got "):
            advice.answer(advice.sold_gpu(8), *asked)


def test_quantised_parameters_are_the_layers_that_the_loader_quantises():
    """LAYERS of nodes/host/loading/quantise.py on diffusers' model."""
    from diffusers import SanaTransformer2DModel

    pattern = re.search(
        r'^LAYERS = re.compile\(r"(.+)"\)$', (ROOT / "nodes/host/loading/quantise.py").read_text(), re.M
    )[1]
    heads = {"num_attention_heads": 36, "num_cross_attention_heads": 16, "cross_attention_head_dim": 72}
    with torch.device("meta"):
        model = SanaTransformer2DModel(**heads, cross_attention_dim=1152, num_layers=28)
    layers = [layer for name, layer in model.named_modules() if re.fullmatch(pattern, name)]
    assert sum(layer.weight.numel() for layer in layers) == quantised_parameters(VARIANTS["0.6B"])
    assert sum(p.numel() for p in model.parameters()) == transformer_parameters(VARIANTS["0.6B"])


def test_predicted_seconds_are_near_the_h100s():
    parts = json.loads((ROOT / "benchmarks/gpu/nvidia-h100-80gb-hbm3.json").read_text())["parts"]
    speed = H100.speeds[0]
    for pixels in (1024, 4096):
        step = work_of(VARIANTS["1.6B"], pixels // 32, pixels // 32, 2, 2).seconds(speed)
        assert step == pytest.approx(parts["step"][f"1.6B {pixels} px, pack"]["ms"] / 1e3, rel=0.05)
        # It had strips of 256 pixels.
        former = advice.decode_work(pixels, pixels)._replace(launches=177 + int(1.425 * pixels))
        decode = former.seconds(speed)
        assert decode == pytest.approx(
            parts["decode with the former depthwise kernel"][f"decode {pixels} px, auto in None"]["ms"] / 1e3, rel=0.1
        )
    share = parts["begin"]["product of bf16"]["tflops"] / 989
    assert pytest.approx(share, abs=0.005) == REACHED


def test_only_a_fast_gpu_waits_for_a_slow_cpu():
    assert advice.as_seconds(advice.image_seconds(RTX_4090, "0.6B", 1024, 1024)) == "0.51 to 0.77 s"
    assert advice.as_seconds(advice.image_seconds(advice.EXAMPLES[8], "0.6B", 1024, 1024)) == "2.6 s"


def test_the_arithmetic_of_a_step_is_that_of_the_counted_layers():
    # 2 passes x (128 x 128) positions; the 0.24 TFLOP of the text's keys and values, of 91.1, are not in every step
    assert 2 * 128 * 128 * position_flops(2240, 20) == pytest.approx(90.9e12, rel=0.01)


def test_the_work_of_a_decode_is_what_was_counted():
    counts = json.loads((ROOT / "benchmarks/accelerator_counts.json").read_text())["decode"]
    for pixels in (1024, 4096, 8192):
        work, counted = advice.decode_work(pixels, pixels), counts[f"{pixels} px"]
        assert work.launches == pytest.approx(counted["launches"], rel=0.01)
        assert work.moved / 1e9 == pytest.approx(counted["gigabytes_moved"], rel=0.05)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        f32c32(1).decoder(torch.empty(1, 32, 16, 16))
    assert counter.get_total_flops() == advice.DECODE_FLOPS * 512**2


def test_a_faster_gpu_and_a_smaller_image_take_less_time():
    slow, fast = advice.EXAMPLES[6], advice.EXAMPLES[24]
    for model in advice.MODELS:
        size = (model.variant, model.pixels, model.pixels)
        assert advice.image_seconds(fast, *size)[1] < 0.3 * advice.image_seconds(slow, *size)[0]
    sizes = [advice.image_seconds(slow, "1.6B", side, side) for side in (512, 1024, 2048, 4096)]
    assert sizes == sorted(sizes)


def test_a_download_is_the_sum_of_its_files():
    files = ("Sana_1600M_1024px_BF16.safetensors", advice.GEMMA_FILE, advice.DC_AE)
    assert advice.STANDARD.download == pytest.approx(sum(DOWNLOADS[name].gigabytes for name in files))
    # Each listed size is the size of the weights: bf16, and float32 for the VAE.
    for model in advice.MODELS:
        stored = 9.4 if model.variant == advice.LARGEST_MODEL else model.gigabytes
        assert stored == pytest.approx(2 * transformer_parameters(VARIANTS[model.variant]) / 1e9, rel=0.03)
    vae = DECODERS["dc-ae-f32c32"].parameters + 153_027_104
    assert DOWNLOADS[advice.DC_AE].gigabytes == pytest.approx(4 * vae / 1e9, rel=0.01)


def test_the_tables_agree_with_the_answers():
    header, *rows = advice.gpu_table()
    assert len(rows) == len(advice.EXAMPLES) and all(len(row) == len(header) for row in rows)
    for row in rows:
        large = advice.answer(advice.sold_gpu(int(row[0].split()[0])), "1.5-4.8B")[0]
        assert ("int8" in row[-1]) == ("int8" in large) and (row[-1] == "yes") == large.endswith(" fits.")
    header, *rows = advice.model_table()
    for row, model in zip(rows, advice.MODELS, strict=True):
        smallest = int(row[3].split()[0])
        assert advice.needed_bytes(model) <= smallest * 2**30
        assert not [gb for gb in GPU_SIZES if gb < smallest and advice.needed_bytes(model) <= gb * 2**30]
        assert row[2] == f"{advice.needed_bytes(model) / 1e9:.1f} GB" and CONTEXT == 600_000_000
    assert advice.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_numbers_in_the_text_of_a_readme_are_predicted(readme):
    text = " ".join((ROOT / readme).read_text(encoding="utf-8").split())
    fp32 = advice.fit(advice.gpu_of(8 * 2**30, bf16=False), "1.6B", 1024, 1024).plan["text"]
    strips = advice.fit(advice.sold_gpu(8), "1.6B", 4096, 4096).plan["decode"]
    encoder, decode = ((stage["weights"] + stage["activations"]) / 1e9 for stage in (fp32, strips))
    slower = advice.image_seconds(RTX_4090, "1.5-4.8B", 1024, 1024)[0]
    slower /= advice.image_seconds(RTX_4090, "1.6B", 1024, 1024)[0]
    numbers = (
        f"{advice.MODELS[-1].download:.1f} GB",
        f"{encoder:.1f} GB",
        f"{decode:.1f} GB",
        f"{8 * 2**30 / 1e9:.1f}",
    )
    assert [number for number in (*numbers, f" {slower:.0f} ") if number not in text] == []
