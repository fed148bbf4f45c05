"""DC-AE-Lite's decoder, which is local from the latents on: any strips, panels, devices and budgets give its pixels.

The library's own decode of the same latents in channels-last memory is the reference: bit for bit of the undivided
decode, to rounding of the strips, whose kernels may be others for a few rows. In contiguous memory the library rounds
otherwise, too.
"""

import json
import random

import pytest
import torch
from decoders import lite, noise, relative
from setup import ROOT
from test_decode_faults import Fails

from sana_core import decode_latents
from sana_core.decode import DecodeOptions, decode_rows, plan, streaming
from sana_core.decode.plan import Planner
from sana_core.decode.stages import decoder_stages, encoder_stages
from sana_core.decode.strips import StripSize, pixel_rows, project_latents
from sana_core.decode.workspace import Workspace
from sana_core.runtime.cancellation import no_poll

CLOSE = 2e-6
pytestmark = pytest.mark.usefixtures("one_thread")
CASES = random.Random(7)
SIZES = [
    (1, 1),
    (1, 9),
    (9, 1),
    (3, 11),
    (25, 2),
    (2, 45),
    *[(CASES.randint(1, 9), CASES.randint(1, 9)) for _ in "abc"],
]


@pytest.fixture(scope="module")
def model():
    """Random weights, and none of them zero."""
    model = lite(16)
    for index, parameter in enumerate(model.decoder.parameters()):
        if parameter.dim() == 1:
            parameter += 0.3 * noise(*parameter.shape, seed=index)
    return model


@torch.no_grad()
def undivided(model, latents):
    one = [model.decode(latent[None].contiguous(memory_format=torch.channels_last)).sample for latent in latents]
    return torch.cat(one)


def pixel_parts(model, latents, strip, columns=None):
    projected, stages = project_latents(model.decoder, latents).channels_last(), decoder_stages(model)
    partition = Planner(stages, *latents.shape[2:], latents.dtype, False).of(StripSize(strip, columns), None)
    workspace = Workspace(latents, partition.workspace)
    return list(
        pixel_rows(model.decoder, stages, projected, range(projected.height), partition.strip, workspace, no_poll)
    )


def decode_in_strips(model, latents, strip, columns=None):
    return torch.cat(pixel_parts(model, latents, strip, columns), dim=2)


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_strips_and_panels_give_the_library_s_pixels(model, height, width):
    latents = noise(1, 32, height, width, seed=height * 10 + width)
    whole_decode = decode_latents(model, latents, method="whole")
    assert torch.equal(whole_decode, undivided(model, latents))
    assert relative(whole_decode, model.decode(latents).sample) <= CLOSE
    few = CASES.randint(2, 7)
    for strip, columns in ((1, None), (few, None), (few, 1), (few, 8), (40, 8)):
        assert relative(decode_in_strips(model, latents, strip, columns), whole_decode) <= CLOSE, (strip, columns)


@torch.no_grad()
def test_the_real_configuration_is_equal():
    model = lite(1)
    latents = noise(1, 32, 2, 1)
    # 1024 channels, whose sums round more
    assert relative(decode_latents(model, latents, method="strips"), model.decode(latents).sample) <= 1e-5


@torch.no_grad()
def test_a_row_of_pixels_depends_on_18_rows_of_latents_and_on_no_more(model):
    stages, latents = decoder_stages(model), noise(1, 32, 45, 1)
    assert (stages.halo, stages.stride, stages.attends) == (18, 32, False)
    # the first convolution sees one row more than the boundary map's halo
    reach = stages.halo + 1
    changed = latents.clone()
    changed[:, :, 22] += 100
    rows = (undivided(model, latents) != undivided(model, changed)).any(dim=(0, 1, 3)).nonzero()
    assert 32 * (22 - reach) <= rows.min() < 32 * (22 - reach + 1)
    assert 32 * (22 + reach) <= rows.max() < 32 * (22 + reach + 1)


@torch.no_grad()
def test_a_row_before_the_encoders_attention_depends_on_5_rows_of_8_pixels_and_on_no_more(model):
    stages, pixels = encoder_stages(model), noise(1, 3, 360, 32)
    assert (stages.halo, stages.stride, stages.attends) == (5, 8, True)

    def boundary_map(x):
        x = model.encoder.conv_in(x)
        for blocks in model.encoder.down_blocks[:3]:
            x = blocks(x)
        return x

    distances = []
    for row in range(176, 184):
        changed = pixels.clone()
        changed[:, :, row] += 100
        rows = (boundary_map(pixels) != boundary_map(changed)).any(dim=(0, 1, 3)).nonzero()
        distances += [22 - rows.min(), rows.max() - 22]
    assert max(distances) == 5


@pytest.mark.parametrize("height", [20, 21, 27, 45])
@torch.no_grad()
def test_the_rows_that_all_layers_are_behind_come_in_pieces(model, height):
    latents = noise(1, 32, height, 2)
    for strip in (1, 2, 5):
        parts = pixel_parts(model, latents, strip)
        assert relative(torch.cat(parts, dim=2), undivided(model, latents)) <= CLOSE
        assert max(part.shape[2] for part in parts) <= 32 * max(2, strip)


@pytest.mark.parametrize("share", [1.0, 1.1, 3.0])
def test_every_budget_from_the_floor_up_gives_the_pixels(model, share):
    latents, report = noise(2, 32, 40, 3), {}
    budget = int(Planner(decoder_stages(model), 40, 3, torch.float32, False).floor().peak_bytes * share)
    got = decode_latents(model, latents, max_bytes=budget, report=report)
    assert relative(got, undivided(model, latents)) <= CLOSE
    assert report["plan"].startswith("strips of ") and "attention" not in report["plan"]
    assert report["predicted_bytes"] <= budget and report["strips"] > 2
    with pytest.raises(ValueError, match="^max_bytes: got 1000, expected at least "):
        decode_latents(model, latents, max_bytes=1000)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_devices_share_the_rows_out(model, count):
    latents = noise(2, 32, 41, 3)
    got, tops = torch.zeros(2, 3, 41 * 32, 96), []
    for picture, top, pixels in decode_rows(model, latents, DecodeOptions(devices=["cpu"] * count)):
        got[picture, :, top : top + pixels.shape[1]] = pixels
        tops.append((picture, top))
    assert len(set(tops)) == len(tops) > 2 * count
    assert relative(got, undivided(model, latents)) <= CLOSE


@pytest.mark.parametrize("calls", [1, 7, 60])
def test_memory_that_runs_out_costs_no_finished_row(model, monkeypatch, calls):
    latents, report = noise(1, 32, 41, 3), {}
    expected = undivided(model, latents)
    monkeypatch.setattr(streaming, "convolve", Fails(streaming.convolve, calls))
    monkeypatch.setattr(plan, "CPU_ROWS", (128, 64))
    floor = Planner(decoder_stages(model), 41, 3, torch.float32, False).floor().peak_bytes
    assert relative(decode_latents(model, latents, max_bytes=2 * floor, report=report), expected) <= CLOSE
    assert report["events"] == ["out of memory, continued with strips of 64 px"]


@torch.no_grad()
def test_other_decoders_without_attention_are_exact_too():
    for changes in (
        {"upsample_block_type": "interpolate"},
        {"decoder_layers_per_block": (1, 2, 1, 1, 1, 1)},
        {"upsample_block_type": "interpolate", "decoder_layers_per_block": (1, 2, 1, 1, 1, 2)},
    ):
        model = lite(16, **changes)
        latents = noise(1, 32, 26, 3)
        for columns in (None, 1):
            assert relative(decode_in_strips(model, latents, 1, columns), model.decode(latents).sample) <= CLOSE
        got = decode_latents(model, latents, devices=["cpu"] * 4)
        assert relative(got, model.decode(latents).sample) <= CLOSE


# Memory and time.


def test_measured_decodes_took_what_was_predicted():
    sizes = json.loads((ROOT / "benchmarks" / "decode_lite.json").read_text())["sizes"]
    for variants in sizes.values():
        for result in variants["dc-ae-lite-f32c32"].values():
            assert result["peak_megabytes"] == pytest.approx(result["predicted_megabytes"], rel=0.1), result["plan"]
        assert variants["dc-ae-lite-f32c32"]["strips"]["relative_difference"] <= 1e-5
