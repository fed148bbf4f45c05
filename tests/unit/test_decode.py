"""Strips give the pixels of the undivided decode, whatever the size, the strips, the budget and the devices."""

import itertools
import random
from copy import deepcopy

import pytest
import torch
from decoders import decode_in_strips, f32c32, f32c32_layout, lite, noise, relative
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sana_core import decode_latents, encode_images
from sana_core.decode import (
    DecodeOptions,
    Tiles,
    attention,
    decode_into,
    decode_rows,
    devices,
    encode,
    plan,
    row_partition,
)
from sana_core.decode.plan import Planner
from sana_core.decode.row_partition import RowPartition
from sana_core.decode.stages import decoder_stages, encoder_stages
from sana_core.decode.strips import StripSize, local_layers
from sana_core.decode.workspace import Workspace, WorkspaceSize
from sana_core.runtime.cancellation import no_poll

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
pytestmark = pytest.mark.usefixtures("one_thread")


CASES = random.Random(5)
SIZES = [(1, 1), (1, 9), (9, 1), (4, 8), (3, 11), *[(CASES.randint(1, 9), CASES.randint(1, 9)) for _ in range(8)]]


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_strips_equal_the_library_bit_for_bit_where_the_attention_runs_whole(bundled, height, width):
    latents = noise(1, 32, height, width, seed=height * 10 + width)
    expected = bundled.decode(latents).sample
    for strip in (1, CASES.randint(2, 7), 40):
        columns = CASES.choice([None, 8, 12])
        got = decode_in_strips(bundled, latents, strip, columns)
        # the convolutions of Intel's processors round otherwise where a strip is one row
        one_row = 1 in (height, strip, height % strip)
        assert torch.equal(got, expected) or (one_row and relative(got, expected) <= 1e-6), (strip, columns)


@pytest.mark.parametrize("height, width", [(2, 3), (5, 3), (3, 8)])
@torch.no_grad()
def test_the_real_depth_with_fewer_channels_is_equal_too(height, width):
    model = f32c32(4)
    latents = noise(1, 32, height, width)
    assert torch.equal(decode_in_strips(model, latents, 3, 16), model.decode(latents).sample)


@torch.no_grad()
def test_the_real_configuration_is_equal():
    model = f32c32(1)
    even, odd = noise(1, 32, 4, 2), noise(1, 32, 3, 2)
    assert torch.equal(decode_in_strips(model, even, 2), model.decode(even).sample)
    # the last strip is one row, which the convolutions of Intel's processors round otherwise
    assert relative(decode_in_strips(model, odd, 2), model.decode(odd).sample) <= 2e-6


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_attention_in_strips_is_close_to_the_library(bundled, height, width):
    latents = noise(1, 32, height, width, seed=height * 10 + width)
    expected = bundled.decode(latents).sample
    for attention_rows in (2, 4, 8):
        assert relative(decode_in_strips(bundled, latents, 3, None, attention_rows), expected) <= 1e-5


@torch.no_grad()
def test_the_height_of_the_strips_and_the_number_of_bands_do_not_change_a_bit_of_the_attention():
    block = f32c32(4).decoder.up_blocks[3][1]
    x = RowPartition([noise(1, 128, 48, 32)])
    workspace = Workspace(x.parts[0], WorkspaceSize(128 * 8 * 60 * 32, 128 * 8 * 60 * 32, 0))

    def attend(strip, edges):
        workspace.used = 0
        spans = [range(start, stop) for start, stop in itertools.pairwise(edges)]
        pieces = [
            one for span in spans for one in attention.score_pieces(block.attn, x, span, strip, 8, workspace, no_poll)
        ]
        scores = sum(pieces[1:], pieces[0])
        rows = [attention.attend_rows(block, x, scores, span, strip, workspace, no_poll) for span in spans]
        return torch.cat(list(itertools.chain(*rows)), dim=2)

    expected = attend(8, [0, 48])
    torch.testing.assert_close(expected, block(x.parts[0]), **CLOSE)
    for strip, edges in ((16, [0, 48]), (48, [0, 48]), (8, [0, 16, 48]), (24, [0, 24, 40, 48])):
        assert torch.equal(attend(strip, edges), expected)


@torch.no_grad()
def test_at_most_32_positions_take_the_quadratic_branch_and_33_do_not():
    model = f32c32(4)
    for height, width in ((4, 8), (3, 11)):
        latents = noise(1, 32, height, width)
        assert relative(decode_in_strips(model, latents, 4, None, 2), model.decode(latents).sample) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_bf16_is_as_near_to_the_fp32_whole_as_the_bf16_whole_is(bundled, dtype):
    latents = noise(1, 32, 9, 7)
    exact = bundled.decode(latents).sample
    model = f32c32(8) if dtype == torch.float32 else deepcopy(bundled).to(dtype)
    if dtype == torch.float32:
        exact = model.decode(latents).sample
    whole_error = relative(model.decode(latents.to(dtype)).sample.float(), exact)
    for attention_rows in (None, 2):
        strips = relative(decode_in_strips(model, latents.to(dtype), 4, None, attention_rows).float(), exact)
        assert strips <= 1.05 * whole_error + 1e-6


@torch.no_grad()
def test_other_ways_of_changing_the_resolution_and_other_norms_are_exact():
    model = f32c32(
        8,
        attention_head_dim=16,
        upsample_block_type="pixel_shuffle",
        downsample_block_type="pixel_unshuffle",
        decoder_norm_types=("batch_norm",) * 3 + ("rms_norm",) * 3,
        decoder_act_fns=("relu",) * 3 + ("silu",) * 3,
    ).eval()
    latents = noise(1, 32, 5, 4)
    expected = model.decode(latents).sample
    torch.testing.assert_close(decode_in_strips(model, latents, 6), expected, **CLOSE)
    pictures = expected.clamp(-1, 1).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(encode_images(model, pictures), model.encode(pictures).latent, **CLOSE)


def test_a_picture_does_not_depend_on_its_batch(bundled):
    latents = noise(3, 32, 5, 4)
    batch = decode_latents(bundled, latents)
    for index in range(3):
        assert torch.equal(batch[index : index + 1], decode_latents(bundled, latents[index : index + 1]))


@pytest.mark.parametrize("height, width, whole", [(16, 32, True), (16, 33, False), (64, 8, True), (32, 32, False)])
def test_the_method_strips_prefers_the_librarys_bits_and_auto_what_is_faster_on_a_cpu(bundled, height, width, whole):
    latents, reports = noise(1, 32, height, width), {"auto": {}, "strips": {}}
    got = {name: decode_latents(bundled, latents, name, 2**40, report=report) for name, report in reports.items()}
    expected = bundled.decode(latents).sample
    assert torch.equal(got["strips"], expected) and "attention over the whole image" in reports["strips"]["plan"]
    assert torch.equal(got["auto"], expected) == ("attention over the whole image" in reports["auto"]["plan"]) == whole
    assert relative(got["auto"], expected) <= 1e-5
    for device in (False, True):
        by_speed, by_bits = (
            Planner(decoder_stages(bundled), height, width, torch.float32, device, bits) for bits in (False, True)
        )
        assert by_speed.floor() == by_bits.floor()
        assert (by_speed.fitting(2**40) == by_bits.fitting(2**40)) == (whole or device)


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0, 4.0])
def test_every_budget_from_the_floor_up_gives_the_pixels(bundled, share):
    latents = noise(1, 32, 9, 7)
    planner = Planner(decoder_stages(bundled), 9, 7, torch.float32, False)
    budget = int(planner.floor().peak_bytes * share)
    report = {}
    got = decode_latents(bundled, latents, max_bytes=budget, report=report)
    assert relative(got, bundled.decode(latents).sample) <= 1e-5
    assert report["predicted_bytes"] <= budget and report["method"] == "strips" and report["strips"] >= 1


def test_convolutions_between_attention_stages_are_exact_in_the_smallest_strips():
    """In the coarsest stage two rows of latents are two rows of the map, and a residual block looks at three."""
    attention_at = (3, 4)
    model = f32c32(
        8,
        decoder_block_types=tuple("EfficientViTBlock" if i in attention_at else "ResBlock" for i in range(6)),
        decoder_qkv_multiscales=tuple((5,) if i in attention_at else () for i in range(6)),
    )
    latents, report = noise(1, 32, 9, 7), {}
    floor = Planner(decoder_stages(model), 9, 7, torch.float32, False).floor().peak_bytes
    got = decode_latents(model, latents, max_bytes=floor, report=report)
    assert "2 latent rows at once" in report["plan"]
    assert relative(got, model.decode(latents).sample) <= 1e-5


def test_a_budget_below_the_floor_says_the_smallest_that_works(bundled):
    floor = Planner(decoder_stages(bundled), 4, 16, torch.float32, False).floor().peak_bytes
    with pytest.raises(ValueError, match=f"^max_bytes: got 1000, expected at least {floor} for an image of 512 x 128"):
        decode_latents(bundled, noise(1, 32, 4, 16), max_bytes=1000)
    assert decode_latents(bundled, noise(1, 32, 4, 16), max_bytes=floor).isfinite().all()


@pytest.mark.parametrize("kind", [f32c32, lite])
@pytest.mark.parametrize("changes", [{}, {"decoder_layers_per_block": (0, 1, 2, 1, 1, 1)}])
def test_what_is_planned_for_is_what_the_layers_say_of_themselves(kind, changes):
    """But for the last norm, which takes no memory."""
    with torch.device("meta"):
        model = kind(1, **changes, **{name.replace("de", "en", 1): layers for name, layers in changes.items()})
    for stages, layers in (
        (decoder_stages(model), local_layers(model.decoder, decoder_stages(model), 4, 4)),
        (encoder_stages(model), encode.local_layers(model.encoder, encoder_stages(model), (32, 32))),
    ):
        assert [layer.shape for layer in layers if layer.shape.conv_channels] == plan.layer_shapes(stages)


def test_nothing_is_kept_for_gradients():
    model = f32c32(1).requires_grad_(True)
    assert not encode_images(model, noise(1, 3, 64, 64)).requires_grad
    assert not decode_latents(model, noise(1, 32, 2, 2)).requires_grad


def test_a_panel_is_planned_with_a_halo_on_both_sides():
    stages = decoder_stages(f32c32_layout())
    panel = plan.local_demand(stages, 64, 64, StripSize(8, 32), True)
    demand = plan.local_demand(stages, 64, 32 + 2 * 7, StripSize(8), True)
    assert panel.buffer == demand.buffer
    # each of the two carries rows of its own
    assert panel.carried == 2 * demand.carried and panel.beside > demand.beside


@pytest.mark.parametrize("height, width", [(2**a, 2**b) for a in (4, 7, 8) for b in (4, 7, 8)] + [(128, 512)])
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("kind", [f32c32, lite])
def test_no_plan_makes_a_tensor_of_two_to_the_31_elements(kind, height, width, accelerator):
    with torch.device("meta"):
        stages = decoder_stages(kind(1))
    planner = Planner(stages, height, width, torch.bfloat16, accelerator)
    for budget in (planner.floor().peak_bytes, 1e9, 4e9, 1e11, 1e15):
        result = planner.fitting(budget)
        if result is None:
            continue
        size = stages, planner.height, planner.width
        tail = plan.local_demand(*size, result.strip, accelerator, result.workspace.buffer)
        head = plan.global_demand(*size, result.attention_rows, 2, accelerator)
        assert max(tail.largest, head.largest, 2 * result.workspace.buffer) < 2**31


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation of this thread returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)), 0)
        return result


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_a_boundary_map_that_is_too_large_for_one_tensor_is_kept_in_bands(monkeypatch, workers):
    model, latents = f32c32(16), noise(1, 32, 160, 2)
    expected, got, parts = decode_latents(model, latents, method="strips"), torch.zeros(3, 5120, 64), []
    limit = 32 * 640 * 8  # the boundary map's
    for module in (row_partition, devices, plan):
        monkeypatch.setattr(module, "LARGEST_TENSOR", limit)
    make = RowPartition.__init__
    monkeypatch.setattr(RowPartition, "__init__", lambda self, maps, *of: make(self, maps, *of) or parts.extend(maps))
    with Largest() as largest:
        for _, top, pixels in decode_rows(model, latents, DecodeOptions(devices=workers and ["cpu"] * workers)):
            got.narrow(1, top, pixels.shape[1]).copy_(pixels)
    assert largest.elements < limit and limit / 3 < max(part.numel() for part in parts) < limit
    assert relative(got[None], expected) <= 1e-5


@torch.no_grad()
def test_a_picture_whose_map_is_too_large_is_encoded_in_bands(monkeypatch):
    model, pictures = f32c32(16), noise(1, 3, 5120, 64).clamp(-1, 1)
    expected = encode_images(model, pictures, method="strips")
    for module in (row_partition, plan):
        monkeypatch.setattr(module, "LARGEST_TENSOR", 32 * 640 * 8)
    assert relative(encode_images(model, pictures), expected) <= 1e-5


def test_whole_is_refused_where_a_tensor_would_be_too_large():
    planner = Planner(decoder_stages(f32c32_layout()), 128, 128, torch.bfloat16, True)
    with pytest.raises(ValueError, match=r"^method: got whole, which makes a tensor of 4294967296 el.* use strips"):
        planner.whole()


def test_4k_in_bf16_fits_2_and_a_half_gigabytes_and_8k_an_8_gb_card():
    stages = decoder_stages(f32c32_layout())
    assert Planner(stages, 128, 128, torch.bfloat16, True).fitting(2.5e9).columns is None
    assert Planner(stages, 256, 256, torch.bfloat16, True).fitting(8e9 - 1.3e9).columns is None


@pytest.mark.parametrize("tile, overlap", [(32, 0), (64, 32), (96, 32), (128, 64), (1024, 128)])
@pytest.mark.parametrize("height, width", [(1, 1), (2, 7), (8, 8), (9, 5)])
def test_tiles_have_the_right_size_everywhere(bundled, tile, overlap, height, width):
    latents = noise(1, 32, height, width)
    got = decode_latents(bundled, latents, method="tiles", tiles=Tiles(tile, overlap))
    assert got.shape == (1, 3, 32 * height, 32 * width) and got.isfinite().all()
    if tile >= 32 * max(height, width):
        torch.testing.assert_close(got, bundled.decode(latents).sample, **CLOSE)


def test_no_tile_is_smaller_than_the_others():
    from sana_core.decode.run import ramps, tile_starts

    for length in range(1, 60):
        for tile, overlap in ((16, 2), (7, 3), (4, 0)):
            starts = tile_starts(length, tile, overlap)
            assert starts[0] == 0 and (starts[-1] + tile == length or tile >= length)
            assert all(0 < b - a <= tile - overlap for a, b in zip(starts, starts[1:], strict=False))
            torch.testing.assert_close(ramps(length, min(tile, length), starts).sum(0), torch.ones(length))


@pytest.mark.parametrize("height, width", [(1, 1), (3, 7), (9, 4), (8, 8)])
def test_encoding_in_strips_equals_the_library(bundled, height, width):
    pictures = noise(2, 3, 32 * height, 32 * width).clamp(-1, 1).contiguous(memory_format=torch.channels_last)
    expected = torch.cat([bundled.encode(one[None]).latent for one in pictures])
    floor = Planner(encoder_stages(bundled), height, width, torch.float32, False).floor().peak_bytes
    for options in ({}, {"method": "strips"}, {"method": "whole"}, {"max_bytes": floor}):
        assert relative(encode_images(bundled, pictures, **options), expected) <= 1e-5, options


@pytest.mark.parametrize("up, down", [("interpolate", "Conv"), ("pixel_shuffle", "pixel_unshuffle")])
@torch.no_grad()
def test_where_nothing_runs_at_the_size_of_the_picture(up, down):
    """mit-han-lab's dc-ae-f32c32-in-1.0: its first stage is empty, and what halves the picture comes first."""
    layers = {f"{side}_layers_per_block": (0, 1, 2, 1, 1, 1) for side in ("encoder", "decoder")}
    model = f32c32(8, attention_head_dim=16, upsample_block_type=up, downsample_block_type=down, **layers)
    latents = noise(1, 32, 9, 4)
    expected = model.decode(latents).sample
    for columns in (None, 6):
        assert relative(decode_in_strips(model, latents, 6, columns), expected) <= 1e-5
    pictures = expected.clamp(-1, 1).contiguous(memory_format=torch.channels_last)
    expected = model.encode(pictures).latent
    floor = Planner(encoder_stages(model), 9, 4, torch.float32, False).floor().peak_bytes
    for options in ({}, {"method": "strips"}, {"method": "whole"}, {"max_bytes": floor}):
        assert relative(encode_images(model, pictures, **options), expected) <= 1e-5, options


@pytest.mark.parametrize("shape", [(0, 3, 32, 32), (1, 4, 32, 32), (1, 3, 33, 32), (1, 3, 0, 32), (3, 32, 32)])
def test_pictures_that_cannot_be_encoded_are_named(bundled, shape):
    with pytest.raises(ValueError, match=r"^pixels: got images of shape .*multiples of 32; crop or scale them$"):
        encode_images(bundled, torch.zeros(shape))


def test_an_unknown_method_is_named(bundled):
    with pytest.raises(ValueError, match="^method: got 'fast', expected one of auto, strips, tiles, whole$"):
        decode_latents(bundled, noise(1, 32, 1, 1), method="fast")
    with pytest.raises(ValueError, match="^method: got 'tiles', expected one of auto, strips, whole$"):
        encode_images(bundled, torch.zeros(1, 3, 32, 32), method="tiles")
    with pytest.raises(ValueError, match="^overlap: got 64, expected a number from 0 to 32$"):
        decode_latents(bundled, noise(1, 32, 4, 4), method="tiles", tiles=Tiles(64, 64))


def test_nan_says_how_many_and_where(bundled):
    latents = noise(2, 32, 4, 5)
    latents[1, 7, 2, 3], latents[1, 8, 0, 0] = float("nan"), float("inf")
    message = "^samples: 2 of 1280 values are NaN or infinite, the first in image 1, channel 7, row 2, column 3;"
    with pytest.raises(ValueError, match=message):
        decode_latents(bundled, latents)


def test_inputs_stay_as_they_were_and_out_is_filled_in_place(bundled):
    latents, pictures = noise(1, 32, 3, 4), noise(1, 3, 96, 128)
    before = latents.clone(), pictures.clone()
    out = torch.zeros(1, 3, 96, 128, dtype=torch.float64)
    assert decode_into(out, bundled, latents, DecodeOptions()) is out
    assert torch.equal(out.float(), decode_latents(bundled, latents))
    encode_images(bundled, pictures)
    assert torch.equal(latents, before[0]) and torch.equal(pictures, before[1])


def test_the_report_counts_the_strips_that_came(bundled):
    for method, counted in (("strips", True), ("whole", False)):
        report = {}
        parts = list(decode_rows(bundled, noise(2, 32, 4, 3), DecodeOptions(method), report))
        assert report["strips"] == (len(parts) if counted else 0) and len(parts) >= 2


def test_progress_counts_rows_of_all_pictures(bundled):
    seen = []
    options = DecodeOptions(progress=lambda finished, total: seen.append((finished, total)))
    decode_into(torch.empty(2, 3, 128, 96), bundled, noise(2, 32, 4, 3), options)
    assert seen[-1] == (256, 256) and [finished for finished, _ in seen] == sorted({finished for finished, _ in seen})
