"""Memory that runs out, devices that fail, and cancel: no finished row is lost, and nothing is left behind."""

import threading
import time
import weakref

import pytest
import torch
from allocations import large_tensors
from decoders import f32c32_layout, noise, relative

from sana_core import decode_latents, encode_images
from sana_core.decode import DecodeOptions, decode_into, decode_rows, devices, oom, plan, streaming
from sana_core.decode.plan import Planner, smaller
from sana_core.decode.row_partition import RowPartition
from sana_core.decode.stages import decoder_stages, encoder_stages

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
pytestmark = pytest.mark.usefixtures("one_thread")


class Fails:
    """A function that raises the n-th time it is called, and works after that."""

    def __init__(self, function, calls, error=torch.OutOfMemoryError):
        self.function, self.calls, self.error = function, calls, error

    def __call__(self, *arguments, **options):
        self.calls -= 1
        if self.calls == 0:
            raise self.error("no memory")
        return self.function(*arguments, **options)


def roomy(bundled, height=9, width=7):
    """Memory for strips with halves to go to."""
    return Planner(decoder_stages(bundled), height, width, torch.float32, False).floor().peak_bytes * 4


@pytest.mark.parametrize("calls", [1, 2, 5, 9, 14, 20])
def test_memory_that_runs_out_in_a_convolution_costs_no_finished_row(bundled, monkeypatch, calls):
    latents = noise(1, 32, 9, 7)
    expected = decode_latents(bundled, latents)
    monkeypatch.setattr(streaming, "convolve", Fails(streaming.convolve, calls))
    report, tops = {}, []
    got = torch.zeros_like(expected)
    for _, top, pixels in decode_rows(bundled, latents, DecodeOptions(max_bytes=roomy(bundled)), report):
        tops.append((top, pixels.shape[1]))
        got[0, :, top : top + pixels.shape[1]] = pixels
    assert relative(got, expected) <= 1e-5
    assert [top for top, _ in tops[1:]] == [top + count for top, count in tops[:-1]]
    assert len(report["events"]) == 1 and report["events"][0].startswith("out of memory, continued with strips")


def test_a_first_strip_shorter_than_the_repeated_rows_is_left_out_whole(bundled, monkeypatch):
    """Memory runs out after 44 rows. The next strips begin at row 40, and the first of them has only 3 rows."""
    stages = decoder_stages(bundled)
    assert stages.stride == 8
    planner, rows = Planner(stages, 2, 2, torch.float32, False), torch.arange(64.0).view(1, 1, 64, 1)
    attempts = [[14, 30, None], [3, 6, 15]]

    def strips_of_sizes(decoder, stages, boundary, span, strip, workspace, poll):
        top = span.start * stages.stride
        for size in attempts.pop(0):
            if size is None:
                raise torch.OutOfMemoryError("no memory")
            yield rows[:, :, top : top + size]
            top += size
        assert top == 64

    monkeypatch.setattr(oom, "pixel_rows", strips_of_sizes)
    report = {"events": []}
    retry = oom.OomRetry(planner, planner.fitting(2**40), report)
    boundary = RowPartition([torch.zeros(1, stages.boundary_width, 8, 8)])
    pieces = list(retry.local_stage(bundled.decoder, stages, boundary, lambda: None))
    assert [(top, pixels.shape[2]) for top, pixels in pieces] == [(0, 14), (14, 30), (44, 5), (49, 15)]
    assert torch.equal(torch.cat([pixels for _, pixels in pieces], dim=2), rows)
    assert len(report["events"]) == 1


@pytest.mark.parametrize("accelerator", [False, True])
def test_after_memory_ran_out_comes_the_fastest_plan_of_half_as_much(accelerator):
    """Down to the least that works, and no further."""
    planner = Planner(decoder_stages(f32c32_layout()), 128, 128, torch.bfloat16, accelerator)
    result, peaks = planner.fitting(2**40), []
    while result is not None:
        peaks.append(result.peak_bytes)
        following = smaller(planner, result)
        half = planner.fitting(result.peak_bytes / 2)
        assert following in (half, None) if half else following in (planner.floor(), None)
        result = following
    assert len(peaks) >= 2 and peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] == planner.floor().peak_bytes


@pytest.mark.parametrize("name", ["score_pieces", "attend_rows"])
def test_memory_that_runs_out_in_the_attention_begins_it_again(bundled, monkeypatch, name):
    from sana_core.decode import strips

    latents = noise(1, 32, 9, 7)
    expected = decode_latents(bundled, latents)
    monkeypatch.setattr(plan, "CPU_ATTENTION_ROWS", (4, 2))
    planner = Planner(decoder_stages(bundled), 9, 7, torch.float32, False)
    budget = next(size for size in range(planner.floor().peak_bytes, 10**9, 50_000) if halves(planner, size))
    monkeypatch.setattr(strips, name, Fails(getattr(strips, name), 2))
    report = {}
    assert relative(decode_latents(bundled, latents, max_bytes=budget, report=report), expected) <= 1e-5
    assert len(report["events"]) == 1


def halves(planner, budget):
    """Whether the plan for `budget` has its attention in strips, and room below it."""
    result = planner.fitting(budget)
    return result.attention_rows is not None and result.peak_bytes > planner.floor().peak_bytes


def test_memory_that_never_suffices_ends_at_the_floor_with_the_error_s_own_type(bundled, monkeypatch):
    def none(*arguments):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(streaming, "convolve", none)
    with pytest.raises(torch.OutOfMemoryError):
        decode_latents(bundled, noise(1, 32, 9, 7), max_bytes=roomy(bundled))


def test_another_error_is_not_taken_for_memory(bundled, monkeypatch):
    monkeypatch.setattr(streaming, "convolve", Fails(streaming.convolve, 3, ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        decode_latents(bundled, noise(1, 32, 9, 7))


def test_memory_that_runs_out_while_encoding(bundled, monkeypatch):
    pictures = noise(1, 3, 288, 224)
    expected = encode_images(bundled, pictures)
    budget = Planner(encoder_stages(bundled), 9, 7, torch.float32, False).floor().peak_bytes * 4
    monkeypatch.setattr(streaming, "convolve", Fails(streaming.convolve, 7))
    assert relative(encode_images(bundled, pictures, max_bytes=budget), expected) <= 1e-5


# cancel


class Cancelled(BaseException):
    """As ComfyUI's, which is no Exception."""


def test_a_cancel_at_any_point_leaves_nothing_behind(bundled):
    latents = noise(1, 32, 9, 7)
    points = 0

    def count():
        nonlocal points
        points += 1

    budget = roomy(bundled)
    expected = decode_latents(bundled, latents, max_bytes=budget, poll=count)
    assert points > 40
    before = large_tensors()
    for number in range(1, points, 5):
        out = torch.zeros_like(expected)
        alive = weakref.ref(out)
        calls = iter(range(1, points + 1))

        def cancel(calls=calls, number=number):
            if next(calls) == number:
                raise Cancelled

        with pytest.raises(Cancelled):
            decode_into(out, bundled, latents, DecodeOptions(max_bytes=budget, poll=cancel))
        del out
        remaining = large_tensors()
        assert alive() is None
        assert remaining <= before
    assert torch.equal(decode_latents(bundled, latents, max_bytes=budget), expected)


# several devices


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_devices_give_the_pixels_of_one(bundled, workers):
    latents = noise(2, 32, 16, 12)
    one = decode_latents(bundled, latents, devices=["cpu"])
    assert relative(one, decode_latents(bundled, latents)) <= 1e-5
    assert torch.equal(decode_latents(bundled, latents, devices=["cpu"] * workers), one)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("height, width", [(1, 1), (2, 9), (7, 2), (9, 5)])
def test_small_pictures_on_more_devices_than_they_have_rows_for(bundled, height, width, workers):
    latents = noise(1, 32, height, width)
    got = decode_latents(bundled, latents, devices=["cpu"] * workers)
    assert relative(got, bundled.decode(latents).sample) <= 1e-5


@pytest.mark.parametrize(
    "module, where, calls",
    [
        (devices, "score_pieces", 2),
        (devices, "attend_rows", 2),
        (devices, "pixel_rows", 2),
        (streaming, "convolve", 60),
    ],
)
def test_memory_that_runs_out_on_a_device_gives_its_rows_to_the_others(bundled, monkeypatch, module, where, calls):
    """In the last case in the midst of a device's rows, of which some are out."""
    latents = noise(1, 32, 16, 12)
    expected = decode_latents(bundled, latents, devices=["cpu"])
    monkeypatch.setattr(module, where, Fails(getattr(module, where), calls))
    for workers in (2, 3):
        report = {}
        assert torch.equal(decode_latents(bundled, latents, devices=["cpu"] * workers, report=report), expected)
        assert report["events"] == ["cpu failed (OutOfMemoryError), its rows went to the others"] * (workers == 2)


def test_memory_that_runs_out_on_all_devices_leaves_one_that_takes_smaller_strips(bundled, monkeypatch):
    latents = noise(1, 32, 16, 12)
    expected = decode_latents(bundled, latents, devices=["cpu"])
    both, lock, compute = threading.Barrier(2), threading.Lock(), streaming.convolve
    failing = threading.local()

    def fail_once(*arguments):
        if not hasattr(failing, "done"):
            failing.done = True
            both.wait(10)
            raise torch.OutOfMemoryError("no memory")
        with lock:
            return compute(*arguments)

    monkeypatch.setattr(streaming, "convolve", fail_once)
    report = {}
    assert torch.equal(decode_latents(bundled, latents, devices=["cpu"] * 2, report=report), expected)
    assert report["events"] == ["cpu failed (OutOfMemoryError), its rows went to the others"]


@pytest.mark.parametrize("where", ["score_pieces", "pixel_rows"])
def test_an_error_that_is_not_about_a_device_ends_the_decode(bundled, monkeypatch, where):
    monkeypatch.setattr(devices, where, Fails(getattr(devices, where), 2, OSError))
    with pytest.raises(OSError):
        decode_latents(bundled, noise(1, 32, 16, 12), devices=["cpu"] * 3)


def test_when_all_devices_fail_the_error_is_theirs(bundled, monkeypatch):
    def none(*arguments, **options):
        raise torch.OutOfMemoryError("no memory")

    for module in (devices, oom):
        monkeypatch.setattr(module, "pixel_rows", none)
    with pytest.raises(torch.OutOfMemoryError):
        decode_latents(bundled, noise(1, 32, 16, 12), devices=["cpu"] * 2)
    with pytest.raises(ValueError, match="^devices: got none"):
        decode_latents(bundled, noise(1, 32, 4, 4), devices=[])


def test_a_cancel_ends_all_workers(bundled):
    polls = iter(range(10**6))

    def cancel():
        if next(polls) == 12:
            raise Cancelled

    before = threading.active_count()
    with pytest.raises(Cancelled):
        decode_latents(bundled, noise(1, 32, 32, 24), devices=["cpu"] * 2, poll=cancel)
    assert threading.active_count() == before


def test_after_a_cancel_no_queued_band_begins(bundled, monkeypatch):
    """Eight bands on two workers. The cancel comes while each worker computes its first band."""
    began, cancelled = [], threading.Event()
    compute = devices.score_pieces

    def slow(*arguments):
        began.append(threading.current_thread())
        assert cancelled.wait(10)
        time.sleep(0.1)
        return compute(*arguments)

    def cancel():
        if began:
            cancelled.set()
            raise Cancelled

    monkeypatch.setattr(devices, "LARGEST_TENSOR", 2)
    monkeypatch.setattr(devices, "score_pieces", slow)
    with pytest.raises(Cancelled):
        decode_latents(bundled, noise(1, 32, 16, 12), devices=["cpu"] * 2, poll=cancel)
    assert 1 <= len(began) <= 2


def test_strips_that_were_computed_ahead_of_a_failed_strip_are_not_taken_for_it(bundled, monkeypatch):
    """The second strip of a worker runs out of memory. Its rows come in the next attempt, each row once."""
    latents, failures = noise(1, 32, 16, 12), []
    expected, compute = decode_latents(bundled, latents, devices=["cpu"]), devices.pixel_rows

    def fail_second(*arguments):
        for number, pixels in enumerate(compute(*arguments)):
            if number == 1 and not failures:
                failures.append(number)
                raise torch.OutOfMemoryError("no memory")
            yield pixels

    monkeypatch.setattr(devices, "pixel_rows", fail_second)
    report, rows = {}, []
    for _, top, pixels in decode_rows(bundled, latents, DecodeOptions(devices=["cpu"] * 3), report):
        assert torch.equal(pixels, expected[0, :, top : top + pixels.shape[1]])
        rows += range(top, top + pixels.shape[1])
    assert sorted(rows) == list(range(512))
    assert report["events"] == ["cpu failed (OutOfMemoryError), its rows went to the others"]
