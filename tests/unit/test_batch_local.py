"""Batches on the devices of this machine, in threads of this process. test_engine.py has those in processes."""

import logging
import random
import signal
import threading
import time

import pytest
import torch
from pretend_card import pretend_cards
from worker_threads import threads_for_processes

import sana_core
from sana_core.batch import batch_size
from sana_core.batch.pipeline import SamplingSettings, encode_text, load_encoder, local_devices, prepare
from sana_core.batch.plan import FailedImage, Workload, batch_images
from sana_core.checkpoints.load import empty_parameters
from sana_core.engine import body, loop, schedule
from sana_core.engine.local import generate_local, make_job
from sana_core.runtime.limits import LIMITS

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SETTINGS = SamplingSettings(128, 128, steps=4)
CPUS = ["cpu", "cpu"]
# Results differ in rounding if sums are divided among another number of threads.
pytestmark = pytest.mark.usefixtures("one_thread", "threads")


@pytest.fixture(scope="module")
def threads():
    """Several devices are threads of this process, so that tests can replace what they call."""
    with threads_for_processes():
        yield


def draw(checkpoint, count=4, **options):
    return sana_core.generate(PROMPTS, checkpoint, seed=5, count=count, width=128, height=128, steps=4, **options)


def request_of(checkpoint, devices, count=4, chunk=1):
    return prepare(Workload(PROMPTS, batch_images(2, count, 5), chunk), checkpoint, SETTINGS, devices)


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("sana c")]


@pytest.fixture(scope="module")
def alone(checkpoint, threads):
    """Eight images, each generated alone."""
    return draw(checkpoint, chunk=1)


@pytest.fixture
def slow_draw(monkeypatch):
    """A function that installs a callback, which is called before each chunk is generated."""

    def put(before):
        real = body.sample

        def wrapped(models, settings, chunk, *arguments, **options):
            before(chunk)
            return real(models, settings, chunk, *arguments, **options)

        monkeypatch.setattr(body, "sample", wrapped)

    return put


@pytest.mark.parametrize("workers, chunk", [(1, 3), (1, 8), (2, 16), (3, 3)])
def test_images_do_not_depend_on_workers_and_chunks(checkpoint, alone, workers, chunk):
    assert torch.equal(draw(checkpoint, chunk=chunk, devices=["cpu"] * workers), alone)


def test_images_are_yielded_as_they_finish_with_their_specs(checkpoint, alone):
    pictures = batch_images(2, 4, 5)
    for picture, pixels in generate_local(
        prepare(Workload(PROMPTS, pictures, 1, frozenset({0, 5})), checkpoint, SETTINGS, CPUS)
    ):
        assert picture.number not in (0, 5)
        assert torch.equal(pixels, alone[picture.number])


def test_running_out_of_memory_at_random_loses_no_image(checkpoint, alone, slow_draw):
    source = random.Random(1)
    failed = []

    def run_out(chunk):
        if source.random() < 0.08 * len(chunk):
            failed.append(len(chunk))
            raise torch.OutOfMemoryError("fake")

    slow_draw(run_out)
    assert torch.equal(draw(checkpoint, chunk=8, devices=CPUS), alone)
    assert failed


class WakesUp(logging.Handler):
    """Sets an event as soon as a message has this text."""

    def __init__(self, text):
        super().__init__()
        self.text, self.event = text, threading.Event()

    def emit(self, record):
        if self.text in record.getMessage():
            self.event.set()


@pytest.fixture
def hangs():
    """An event that is set when the loop says that a worker hangs."""
    handler = WakesUp("hangs; it gets no more images")
    logger = logging.getLogger("sana_core")
    logger.addHandler(handler)
    yield handler.event
    logger.removeHandler(handler)


def test_a_device_that_responds_again_generates_images_again(checkpoint, alone, slow_draw, hangs, caplog):
    """Also if it is the only device, for example because torch.compile has compiled again."""
    hung = []

    def hang(chunk):
        if chunk[0].number == 3 and not hung:
            hung.append(chunk)
            assert hangs.wait(60)

    slow_draw(hang)
    limits = LIMITS._replace(grace=0.3, patience=2)
    results = dict(generate_local(request_of(checkpoint, ["cpu"]), limits=limits))
    assert hung and {image.number for image in results} == set(range(8))
    assert all(torch.equal(pixels, alone[image.number]) for image, pixels in results.items())
    assert "cpu responds again" in caplog.text


@pytest.mark.parametrize("devices", [["cpu"], CPUS])
def test_a_device_that_hung_while_it_loaded_is_used_again(checkpoint, monkeypatch, hangs, devices):
    real, hung = body.load_models, []

    def load(*arguments):
        if not hung:
            hung.append(1)
            assert hangs.wait(60)
        return real(*arguments)

    monkeypatch.setattr(body, "load_models", load)
    limits = LIMITS._replace(loading=0.3 if len(devices) == 1 else 1.0, turn=0.1)
    assert len(list(generate_local(request_of(checkpoint, devices, count=20), limits=limits))) == 40
    assert hung


def test_a_device_may_load_longer_than_a_chunk_may_take(checkpoint, monkeypatch, caplog):
    real = body.load_models

    def load(*arguments):
        time.sleep(1)
        return real(*arguments)

    monkeypatch.setattr(body, "load_models", load)
    limits = LIMITS._replace(starting=0.5, first=0.5, grace=0.5)
    assert len(list(generate_local(request_of(checkpoint, ["cpu"], count=1), limits=limits))) == 2
    assert "hangs" not in caplog.text


@pytest.mark.parametrize("part", ["load_models", "load_encoder"])
def test_an_interrupt_while_devices_load_waits_for_none(checkpoint, monkeypatch, part):
    started = threading.Event()

    def load(*arguments):
        while True:
            torch.zeros(1)
            started.set()
            time.sleep(0.01)

    monkeypatch.setattr(body, part, load)

    def interrupt():
        if started.wait(60):
            signal.raise_signal(signal.SIGINT)

    # Shells start a program in the background without a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            list(generate_local(request_of(checkpoint, CPUS)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not worker_threads()


@pytest.mark.parametrize("part", ["models", "encoder"])
def test_loading_can_be_cancelled(checkpoint, part):
    class Enough(BaseException):
        pass

    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 20:
            raise Enough

    worker = body.Body("cpu", lambda *event: None, poll)
    worker.begin(make_job(request_of(checkpoint, ["cpu"]), None).pack())
    with pytest.raises(Enough):
        if part == "models":
            worker.load()
        else:
            worker.encode((None, *PROMPTS))
    assert worker.models is None


def test_closing_stops_every_device_within_a_step(checkpoint):
    images = generate_local(request_of(checkpoint, CPUS, count=500))
    next(images)
    assert len(worker_threads()) == 2
    images.close()
    assert not worker_threads()


def test_modules_of_other_threads_keep_their_parameters_while_a_device_loads():
    devices = []

    def construct():
        devices.append(torch.nn.Linear(2, 2).weight.device.type)

    with empty_parameters():
        construct()
        thread = threading.Thread(target=construct)
        thread.start()
        thread.join()
    construct()
    assert devices == ["meta", "cpu", "cpu"]


def test_an_error_of_the_work_is_raised_and_no_thread_stays(checkpoint, slow_draw):
    def fail(chunk):
        raise ValueError("bad weights")

    slow_draw(fail)
    with pytest.raises(ValueError, match="bad weights"):
        draw(checkpoint, devices=CPUS)
    assert not worker_threads()


def test_an_image_that_fails_alone_does_not_end_the_batch(checkpoint, alone, slow_draw):
    """After an unknown error, each image of the chunk is generated alone."""

    def fail(chunk):
        if any(image.number == 5 for image in chunk):
            raise ValueError("unlucky\nmore text")

    slow_draw(fail)
    results = {
        image.number: result
        for image, result in generate_local(
            prepare(Workload(PROMPTS, batch_images(2, 4, 5), 3), checkpoint, SETTINGS, ["cpu"])
        )
    }
    assert results.pop(5) == FailedImage("ValueError: unlucky")
    assert len(results) == 7 and all(torch.equal(result, alone[number]) for number, result in results.items())


def test_errors_of_many_images_in_a_row_end_the_batch(checkpoint, slow_draw):
    drawn = []

    def fail(chunk):
        drawn.append(chunk)
        if len(drawn) > 2:
            raise ValueError("the library is broken")

    slow_draw(fail)
    with pytest.raises(ValueError, match="the library is broken"):
        draw(checkpoint, count=20, chunk=1)
    # The device may have begun another one.
    assert len(drawn) - 2 - loop.FAILURES in (0, 1)


def test_images_with_nan_are_named_after_the_others_were_generated(checkpoint, alone, monkeypatch):
    real = body.sample

    def sample(models, settings, chunk, *arguments, **options):
        latents = real(models, settings, chunk, *arguments, **options)
        return torch.where(torch.tensor([image.seed == 6 for image in chunk])[:, None, None, None], torch.nan, latents)

    monkeypatch.setattr(body, "sample", sample)
    with pytest.raises(sana_core.FailedImagesError) as caught:
        draw(checkpoint, chunk=2, devices=CPUS)
    message = str(caught.value)
    assert message.startswith("images: 2 failed, number 1, 5, counted from 0; number 1 failed because of samples: ")
    assert len(message.splitlines()) == 1 and sorted(caught.value.failed) == [1, 5]
    for number, image in enumerate(caught.value.images):
        assert image.isnan().all() if number in (1, 5) else torch.equal(image, alone[number])


def test_a_single_string_is_one_prompt(checkpoint):
    options = {"width": 32, "height": 32, "steps": 1}
    one, listed = (sana_core.generate(prompt, checkpoint, **options) for prompt in ("cat", ["cat"]))
    assert torch.equal(one, listed) and len(one) == 1
    encoder = load_encoder(checkpoint, torch.device("cpu"), "float32")
    assert len(sana_core.encode_prompts(encoder, "cat")[0]) == 1


def test_a_device_that_does_not_exist_is_left_out_with_a_log(caplog):
    with caplog.at_level(logging.WARNING):
        assert local_devices(["cpu", "cuda:7"]) == [torch.device("cpu")]
    assert "this machine has no cuda:7" in caplog.text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"devices": ["cuda:7"]}, "devices: got cuda:7, expected some of cpu"),
        ({"devices": ["nonsense"]}, "devices: got 'nonsense', expected names like cpu"),
        ({"count": 0}, "count: got 0"),
        ({"chunk": -1}, "chunk: got -1"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
    ],
)
def test_bad_numbers_are_named_before_anything_is_loaded(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        draw(checkpoint, **options)


MANY = [
    f"a {colour} {shape}" for colour in ("red", "green", "blue", "white", "black") for shape in ("circle", "square")
]
SMALL = SamplingSettings(32, 32, steps=1)


@pytest.fixture
def loads(monkeypatch):
    """The models that were loaded, in order."""
    results = []
    for name in ("load_encoder", "load_models"):
        real = getattr(body, name)

        def load(*arguments, real=real, name=name, **more):
            results.append(name)
            return real(*arguments, **more)

        monkeypatch.setattr(body, name, load)
    return results


def draw_many(checkpoint, devices=("cpu",), chunk=1):
    pictures = batch_images(len(MANY), 2, 5)
    return {
        p.number: pixels
        for p, pixels in generate_local(prepare(Workload(MANY, pictures, chunk), checkpoint, SMALL, devices))
    }


@pytest.mark.parametrize("chunk, devices", [(1, ["cpu"]), (3, ["cpu"]), (1, CPUS)])
def test_prompts_of_several_blocks_give_the_same_images(checkpoint, loads, monkeypatch, chunk, devices):
    images = draw_many(checkpoint)
    assert loads == ["load_encoder", "load_models"]
    loads.clear()
    monkeypatch.setattr(schedule, "FIRST_BLOCK", 2)
    some = draw_many(checkpoint, devices, chunk)
    # Blocks of 2, 4 and 5 texts, one of them the negative prompt. Each device loads its models once.
    assert loads.count("load_encoder") == 3 and loads.count("load_models") <= len(devices)
    assert some.keys() == images.keys() and all(torch.equal(some[number], images[number]) for number in images)


def test_with_little_memory_encoder_and_models_are_never_loaded_together(checkpoint, loads, monkeypatch):
    monkeypatch.setattr(schedule, "FIRST_BLOCK", 2)
    monkeypatch.setattr(body, "has_room_for_encoder", lambda *arguments: False)
    with pretend_cards(1):
        some = draw_many(checkpoint, ["cuda:0"])
    assert loads == ["load_encoder", "load_models"] * 3 and some.keys() == set(range(20))


def test_each_gpu_gets_as_many_images_at_once_as_fit_into_its_memory(checkpoint, monkeypatch):
    limits, sizes = {"cuda:0": 3, "cuda:1": 1}, {"cuda:0": set(), "cuda:1": set()}

    def largest(checkpoint, settings, device, **options):
        return limits[str(device)]

    monkeypatch.setattr(body, "largest_chunk", largest)
    monkeypatch.setattr("sana_core.batch.plan.default_chunk_size", lambda *arguments: 3)
    real = body.sample

    def sample(models, settings, chunk, *arguments, **options):
        sizes[str(models.transformer.device)].add(len(chunk))
        return real(models, settings, chunk, *arguments, **options)

    monkeypatch.setattr(body, "sample", sample)
    with pretend_cards(2):
        images = batch_images(len(MANY), 4, 5)
        results = list(generate_local(prepare(Workload(MANY, images), checkpoint, SMALL, list(limits))))
    assert sorted(image.number for image, _ in results) == list(range(40))
    assert max(sizes["cuda:0"]) == 3 and sizes["cuda:1"] == {1}


@pytest.mark.parametrize("share", [0.8, 0.0])
def test_prompts_are_encoded_on_the_cpu_when_a_gpu_has_no_memory_for_it(checkpoint, monkeypatch, share):
    """0.0: no GPU has room for the encoder beside its models."""
    monkeypatch.setattr("sana_core.batch.batch_size.SHARE", share)
    real, used = body.load_encoder, []

    def load(checkpoint, device, *arguments):
        used.append(device.type)
        if device.type != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(checkpoint, device, *arguments)

    monkeypatch.setattr(body, "load_encoder", load)
    with pretend_cards(2):
        images = batch_images(len(MANY), 1, 5)
        results = list(generate_local(prepare(Workload(MANY, images, 1), checkpoint, SMALL, ["cuda:0", "cuda:1"])))
    assert len(results) == 10 and not any(isinstance(result, FailedImage) for _, result in results)
    assert used == ["cuda", "cpu"]


def test_a_gpu_that_breaks_while_it_encodes_leaves_the_prompts_to_the_others(checkpoint, monkeypatch):
    monkeypatch.setattr(schedule, "FIRST_BLOCK", 2)
    real, broken = body.encode_text, []

    def encode(encoder, prompt, instruction):
        if prompt == MANY[3] and not broken:
            broken.append(encoder.model.device)
            cards.fail(encoder.model.device, "driver")
        return real(encoder, prompt, instruction)

    monkeypatch.setattr(body, "encode_text", encode)
    with pretend_cards(2) as cards:
        images = batch_images(len(MANY), 2, 5)
        results = list(generate_local(prepare(Workload(MANY, images, 1), checkpoint, SMALL, ["cuda:0", "cuda:1"])))
    assert broken and sorted(image.number for image, _ in results) == list(range(20))
    assert not any(isinstance(result, FailedImage) for _, result in results)


def test_every_prompt_is_checked_before_anything_is_loaded(checkpoint, loads):
    workload = Workload([*MANY, "half \ud83d"], batch_images(11, 1, 5))
    with pytest.raises(ValueError, match=r"^prompt 11: .*half a character .* at position 5; write the text again$"):
        next(generate_local(prepare(workload, checkpoint, SMALL)))
    assert not loads


def test_a_lone_surrogate_in_the_negative_prompt_is_refused_before_anything_is_loaded(checkpoint, loads):
    settings = SMALL._replace(negative_prompt="half \ud83d")
    with pytest.raises(
        ValueError, match=r"^negative_prompt: .*half a character .* at position 5; write the text again$"
    ):
        next(generate_local(prepare(Workload(MANY, batch_images(10, 1, 5)), checkpoint, settings)))
    assert not loads


def test_an_encoded_prompt_keeps_no_padding(checkpoint):
    encoder = load_encoder(checkpoint, torch.device("cpu"), "float32")
    for tensor in encode_text(encoder, MANY[0], instruction=True):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize("chunk", [None, 1])
def test_a_gpu_that_other_programs_have_filled_is_left_out(checkpoint, monkeypatch, chunk):
    """Even the question for its free memory raises, because the driver has no room for its context."""
    kind = getattr(torch, "AcceleratorError", RuntimeError)
    real = batch_size.free_bytes

    def free_bytes(device):
        if device == torch.device("cuda:0"):
            raise kind("CUDA error: out of memory")
        return real(device)

    def load(checkpoint, device, *arguments, real=body.load_models):
        free_bytes(device)
        return real(checkpoint, device, *arguments)

    monkeypatch.setattr(batch_size, "free_bytes", free_bytes)
    monkeypatch.setattr(body, "load_models", load)
    # GPU 1 has no room for the encoder beside its models, so another device has to encode.
    monkeypatch.setattr(body, "has_room_for_encoder", lambda *arguments: free_bytes(arguments[-1]) < 0)
    with pretend_cards(2):
        images = batch_images(len(MANY), 1, 5)
        results = list(generate_local(prepare(Workload(MANY, images, chunk), checkpoint, SMALL, ["cuda:0", "cuda:1"])))
    assert len(results) == 10 and not any(isinstance(result, FailedImage) for _, result in results)


@pytest.mark.parametrize("bad", [1, 9])
def test_a_negative_prompt_of_nan_does_not_make_all_images_fail(checkpoint, monkeypatch, bad):
    """A broken GPU encodes it for all GPUs. If it is NaN on the CPU too, the batch ends before the first image."""
    real, tries = body.encode_negative, []

    def encode(*arguments):
        embeds, mask = real(*arguments)
        tries.append(1)
        return (embeds * float("nan") if len(tries) <= bad else embeds), mask

    monkeypatch.setattr(body, "encode_negative", encode)
    with pretend_cards(1):
        images = generate_local(request_of(checkpoint, ["cuda:0"]))
        if bad == 1:
            assert not any(isinstance(result, FailedImage) for _, result in images)
        else:
            with pytest.raises(sana_core.CheckpointError, match="gave NaN for the negative prompt on cpu"):
                list(images)
