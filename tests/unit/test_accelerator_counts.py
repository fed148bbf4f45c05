"""Steps, decodes and encodes on accelerators that are not there: launches, bytes, peaks, and devices that mix."""

import json
from functools import partial

import pytest
import torch
import torch._dynamo
from fake_accelerator import FIRST, SECOND, Counter, fake_accelerators
from setup import ROOT

from benchmarks import accelerator_counts as counts
from sana_core.advice import work_of
from sana_core.decode.plan import Planner
from sana_core.decode.stages import decoder_stages
from sana_core.model.known_models import VARIANTS

pytest.importorskip("triton")
# Older versions need a driver for fake tensors on cuda.
pytest.importorskip("torch", "2.9")


def committed():
    return json.loads((ROOT / "benchmarks" / "accelerator_counts.json").read_text())


def counted(figures):
    """The figures that were counted, without the predictions."""
    return {name: figure for name, figure in figures.items() if not name.startswith("predicted")}


def test_the_counter_counts_what_is_launched_moved_and_alive():
    counter = Counter()
    with fake_accelerators():
        x = torch.empty(1024, 256, device=FIRST)
        weight = torch.empty(256, device=FIRST).expand(1024, 256)
    with fake_accelerators(counter):
        y = x.view(512, 512) + 1  # reads and writes 1 MiB
        y = (y.view(1024, 256) * weight).relu_()  # the weight is 1 KiB
        del x
    assert counter.launches == 3 and counter.moved == 6 * 2**20 + 2**10
    assert counter.peak == {FIRST: 2 * 2**20} and counter.alive[FIRST] == 2**20
    del y
    assert counter.alive[FIRST] == 0


def test_a_bias_of_a_convolution_is_a_launch_and_weights_in_another_layout_are_noticed():
    counter = Counter()
    with fake_accelerators(counter), torch.no_grad():
        conv = torch.nn.Conv2d(4, 8, 3, device=FIRST).requires_grad_(False)
        x = torch.empty(1, 4, 8, 8, device=FIRST, memory_format=torch.channels_last)
        before = counter.launches
        out = conv(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert counter.launches - before == 2 and counter.weight_copies == 1


def test_devices_that_mix_raise():
    with fake_accelerators(), pytest.raises(RuntimeError, match="device"):
        torch.empty(2, device=FIRST) + torch.empty(2, device=SECOND)


def test_kernels_see_no_two_devices():
    from sana_core.kernels.channels import add_bias

    with fake_accelerators(), pytest.raises(AssertionError, match="map_rows"):
        x = torch.empty(4, 8, device=FIRST)
        add_bias(x, torch.empty(8, device=SECOND), x)


def test_a_guided_step_stays_within_its_launches_and_bytes():
    figures = counts.step("1.6B", 1024)
    assert figures["launches"] <= 300 and figures["gigabytes_moved"] <= 11.5 and figures["transfers"] == 0
    assert 0.95 <= figures["predicted_of_peak"][0] <= 1.10
    assert counted(figures) == counted(committed()["guided_step"]["1.6B, 1024 px"])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("variant, pixels", [("1.6B", 1024), ("1.6B", 4096), ("0.6B", 1024), ("1.5-1.6B", 1024)])
def test_the_predicted_work_of_a_step_is_what_was_counted(variant, pixels, passes):
    side = pixels // 32
    figures = counts.share(variant, pixels, passes, 1)
    work = work_of(VARIANTS[variant], side, side, passes, 2)
    assert abs(work.launches - figures["launches"]) <= 2
    assert 0.95 <= work.moved / 1e9 / figures["gigabytes_moved"] <= 1.01
    assert 0.97 <= work.product_bytes / 1e9 / figures["gigabytes_of_products"] <= 1.01


def test_a_share_of_two_moves_what_is_promised():
    figures = committed()["guided_step_of_a_share"]
    for pixels, most in ((1024, 0.63), (2048, 0.55), (4096, 0.52)):
        whole_step, apart, rows = (
            figures[f"1.6B, {pixels} px, {name}"] for name in ("one", "one of two", "one of two, by rows")
        )
        # the weights are read whole
        assert apart["gigabytes_moved"] <= most * whole_step["gigabytes_moved"]
        assert apart["gigabytes_moved"] < rows["gigabytes_moved"] and apart["launches"] < rows["launches"]
    assert counts.share("1.6B", 1024, 1, 1) == figures["1.6B, 1024 px, one of two"]


@pytest.mark.slow
def test_norms_of_queries_and_keys_are_a_launch_each():
    """SANA-1.5 has three in a block, two beside the self-attention."""
    layers, plain = 60, 13
    figures = counts.step("1.5-4.8B", 1024)
    assert figures["launches"] <= (plain + 3) * layers + 40
    assert counted(figures) == counted(committed()["guided_step"]["1.5-4.8B, 1024 px"])


def test_an_amd_card_launches_and_moves_as_much(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert counted(counts.step("1.6B", 1024)) == counted(committed()["guided_step"]["1.6B, 1024 px"])


def test_weights_lie_as_the_maps_of_their_device_do():
    from sana_core.model.layers import arrange_convolutions

    def strides(conv):
        arrange_convolutions(conv)
        return conv.weight.stride()

    with fake_accelerators():
        conv = torch.nn.Conv2d(4, 8, 3, device=FIRST).requires_grad_(False)
        assert strides(conv) == (36, 1, 12, 4) and conv.weight.untyped_storage().nbytes() == 8 * 4 * 9 * 4
        storage = conv.weight.untyped_storage()._cdata
        # the second time it is there already
        assert strides(conv) == (36, 1, 12, 4) and conv.weight.untyped_storage()._cdata == storage
        for device in ("cpu", "mps"):
            conv.weight = torch.nn.Parameter(torch.empty(8, 4, 3, 3, device=device), requires_grad=False)
            assert strides(conv) == (36, 9, 3, 1)


def test_weights_that_come_back_to_the_cpu_are_what_they_were():
    from sana_core.model.layers import arrange_convolutions

    conv = torch.nn.Conv2d(4, 8, 3)
    weight, place = conv.weight.detach().clone(), conv.weight.data_ptr()
    arrange_convolutions(conv)
    assert conv.weight.data_ptr() == place
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    arrange_convolutions(conv)
    assert conv.weight.is_contiguous() and torch.equal(conv.weight, weight)


def test_a_loaded_autoencoder_is_laid_out(monkeypatch, checkpoint):
    import sana_core
    from sana_core.checkpoints import load

    arranged = []
    monkeypatch.setattr(load, "arrange_convolutions", arranged.append)
    assert arranged == [sana_core.load_autoencoder(checkpoint)]


def test_a_copy_for_another_device_is_laid_out():
    from sana_core.decode.devices import copy_to

    decoder = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3))
    assert copy_to(torch.device("meta"), decoder)[0].weight.stride() == (36, 1, 12, 4)
    assert decoder[0].weight.is_contiguous()


def test_a_decode_stays_within_its_launches_and_bytes():
    figures = counts.decode(1024)
    assert figures["weight_copies"] == 0
    # the latents' first and the pixels' ways to other devices; none within
    assert figures["transfers"] <= 5
    assert figures["launches"] <= 750 and figures["predicted_of_peak"][0] <= 1.04
    assert 0.95 <= figures["predicted_of_peak"][0] <= 1.10
    assert figures == committed()["decode"]["1024 px"]


@pytest.mark.parametrize(
    "kind, pixels",
    [("f32c32", 1024), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("f32c32", 2048), ("lite", 1024)))],
)
def test_the_planner_chooses_the_plan_with_the_fewest_launches_that_fits(monkeypatch, kind, pixels):
    stages = decoder_stages(counts.autoencoder(kind=kind))
    planner = Planner(stages, pixels // 32, pixels // 32, counts.DTYPE, True)
    chosen, budget = [], float("inf")
    for _ in range(4):
        chosen.append(planner.fitting(budget))
        budget = chosen[-1].peak_bytes - 1
    assert [plan.rows * stages.stride for plan in chosen[:3]] == [1024, 512, 256]
    if stages.attends:
        assert [plan.attention_rows for plan in chosen] == [32, 32, 32, 16]
    figures = []
    for plan in chosen:
        monkeypatch.setattr(counts, "plan_for", lambda *args, plan=plan: (planner, plan))
        figures.append(counts.decode(pixels, kind=kind))
    launches, peaks = ([row[name] for row in figures] for name in ("launches", "peak_megabytes"))
    assert launches == sorted(launches) and peaks == sorted(peaks, reverse=True)
    assert all(0.95 <= row["predicted_of_peak"][0] <= 1.10 for row in figures)


@pytest.mark.parametrize(
    "count",
    [
        partial(counts.step, "1.6B", 1024),
        pytest.param(partial(counts.step, "1.6B", 1024, perturbed=True), marks=pytest.mark.slow),
        partial(counts.decode, 1024),
        pytest.param(partial(counts.decode, 1024, triton=False), marks=pytest.mark.slow),
        pytest.param(partial(counts.decode, 128, smallest=True), marks=pytest.mark.slow),
        pytest.param(partial(counts.decode, 1024, kind="lite"), marks=pytest.mark.slow),
        partial(counts.encode, 1024),
        pytest.param(partial(counts.encode, 128, smallest=True), marks=pytest.mark.slow),
    ],
    ids=lambda count: f"{count.func.__name__} {count.args} {count.keywords}",
)
def test_no_more_memory_is_needed_where_callers_keep_their_arguments(count):
    """As in Python 3.10, and after torch.compile has failed in a process. `torch._dynamo.run` evaluates frames so."""
    assert torch._dynamo.run(count)() == count()


def test_a_decode_without_triton_needs_little_more_memory():
    plain, fused = counts.decode(1024, triton=False), committed()["decode"]["1024 px"]
    # Without the fused kernels a tall strip needs some more.
    assert plain["peak_megabytes"] <= 1.12 * fused["peak_megabytes"]
    assert plain["launches"] > fused["launches"] and plain["gigabytes_moved"] > fused["gigabytes_moved"]


@pytest.mark.slow
def test_a_large_decode_stays_within_its_launches_and_bytes():
    figures = counts.decode(4096)
    assert figures["launches"] <= 2850 and figures["gigabytes_moved"] <= 600 and figures["peak_megabytes"] <= 3250
    assert 0.96 <= figures["predicted_of_peak"][0] <= 1.04
    assert figures == committed()["decode"]["4096 px"]
