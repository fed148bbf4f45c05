"""Batches on the devices of this machine."""

import logging
import random
import threading
import time
from contextlib import closing

import pytest
import torch
from pretend_card import pretend_cards

import sana_core
from sana_core.batch import batch_size, local, pipeline
from sana_core.batch.local import generate_local
from sana_core.batch.loop import run_batch
from sana_core.batch.pipeline import SamplingSettings, encode_text, load_encoder, local_devices, prepare
from sana_core.batch.plan import FailedImage, ImageSpec, Workload, batch_images, split_into_chunks
from sana_core.batch.queue import Queue
from sana_core.checkpoints.load import empty_parameters
from sana_core.runtime.cancellation import Polled

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SETTINGS = SamplingSettings(128, 128, steps=4)
CPUS = ["cpu", "cpu"]
# Results differ in rounding if sums are divided among another number of threads.
pytestmark = pytest.mark.usefixtures("one_thread")


def draw(checkpoint, count=4, **options):
    return sana_core.generate(PROMPTS, checkpoint, seed=5, count=count, width=128, height=128, steps=4, **options)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Eight images, each generated alone."""
    return draw(checkpoint, chunk=1)


@pytest.fixture
def slow_draw(monkeypatch):
    """A function that installs a callback, which is called before each chunk is generated."""

    def put(before):
        real = local.generate_chunk

        def wrapped(models, settings, chunk, *options):
            before(chunk)
            return real(models, settings, chunk, *options)

        monkeypatch.setattr(local, "generate_chunk", wrapped)

    return put


@pytest.mark.parametrize("workers, chunk", [(1, 2), (1, 3), (1, 8), (2, 1), (2, 3), (2, 16), (3, 1), (3, 3)])
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


def test_too_little_memory_for_any_image_ends_with_that_error(checkpoint, slow_draw):
    def run_out(chunk):
        raise torch.OutOfMemoryError("fake")

    slow_draw(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        draw(checkpoint, devices=CPUS)


def test_a_device_that_fails_is_left_out(checkpoint, alone, slow_draw):
    def fail(chunk):
        if threading.current_thread().name.endswith("#2"):
            # its name before torch 2.8
            kind = getattr(torch, "AcceleratorError", RuntimeError)
            raise kind("CUDA error: an illegal memory access was encountered")

    slow_draw(fail)
    assert torch.equal(draw(checkpoint, chunk=1, devices=CPUS), alone)


@pytest.mark.slow
def test_a_device_that_hangs_is_left_out(checkpoint, slow_draw, caplog):
    woken = threading.Event()

    def hang(chunk):
        if threading.current_thread().name.endswith("#2"):
            woken.wait()

    slow_draw(hang)
    pictures = batch_images(2, 4, 5)
    arrived = [
        p.number
        for p, _ in generate_local(prepare(Workload(PROMPTS, pictures, 1), checkpoint, SETTINGS, CPUS), grace=0.1)
    ]
    woken.set()
    assert sorted(arrived) == list(range(8))


def test_a_device_that_responds_again_generates_images_again(caplog):
    """Also if it is the only device, for example because torch.compile has compiled again."""
    hang, hung = threading.Event(), []

    def prepare(device, poll):
        def generate(chunk):
            if chunk[0].number == 3 and not hung:
                hung.append(chunk)
                hang.wait(20)
            return list(chunk)

        return generate

    with closing(local.LocalPool([torch.device("cpu")], prepare)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 8, 0), 1))
        real = pool.drop

        def drop(worker, reason):
            real(worker, reason)
            assert pool.workers() == []
            hang.set()

        pool.drop = drop
        images = [image.number for image, _ in run_batch(queue, pool, grace=0.1)]
        assert sorted(images) == list(range(8)) and pool.workers() == ["cpu"]
    assert "no other device is left, so the run waits for cpu" in caplog.text and "cpu responds again" in caplog.text


def test_a_device_may_load_longer_than_a_chunk_may_take(monkeypatch):
    monkeypatch.setattr(local, "LOADING_PATIENCE", 0.5)
    woken = threading.Event()

    def before_chunk(worker, device, chunk, poll):
        if worker.endswith("#2"):
            # It does not poll, as a device that hangs.
            woken.wait(20)
        else:
            for _ in range(10):
                time.sleep(0.1)
                poll()

    devices = [torch.device("cpu")] * 2
    with closing(local.LocalPool(devices, lambda device, poll: list, before_chunk=before_chunk)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 2, 0), 1))
        # The first device loads for a second, far longer than a chunk takes, and is not dropped.
        assert len(list(run_batch(queue, pool, grace=0.01))) == 2
        assert pool.workers() == ["cpu"]
        woken.set()


def test_an_idle_device_and_a_long_step_do_not_count_as_loading(monkeypatch, caplog):
    monkeypatch.setattr(local, "LOADING_PATIENCE", 0.3)

    def prepare(device, poll):
        def generate(chunk):
            poll()
            time.sleep(1.0 if chunk[0].number == 0 else 0.0)
            return list(chunk)

        return generate

    with closing(local.LocalPool([torch.device("cpu")] * 2, prepare)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 2, 0), 1))
        assert len(list(run_batch(queue, pool))) == 2
        assert pool.workers() == ["cpu", "cpu #2"]
    assert "gets no more images" not in caplog.text


def test_a_device_that_hung_while_it_prepared_is_used_again(monkeypatch):
    monkeypatch.setattr(local, "LOADING_PATIENCE", 0.3)
    monkeypatch.setattr(local, "JOIN_TIMEOUT", 1.0)
    woken, dropped = threading.Event(), threading.Event()

    def prepare(device, poll):
        woken.wait(20)
        return list

    def cancel():
        if time.monotonic() - began > 10:
            raise TimeoutError("the run does not end")
        if not pool.workers():
            # It wakes up and finds an empty inbox.
            dropped.set()
            woken.set()

    began = time.monotonic()
    with closing(local.LocalPool([torch.device("cpu")], prepare, cancel)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 3, 0), 1))
        assert len(list(run_batch(queue, pool))) == 3
    assert dropped.is_set()


def test_closing_while_devices_load_does_not_wait_for_them():
    loading, started = threading.Event(), threading.Barrier(3, timeout=20)

    def before_chunk(worker, device, chunk, poll):
        started.wait()
        with Polled(poll):
            while not loading.is_set():
                torch.zeros(1)
                time.sleep(0.01)

    pool = local.LocalPool([torch.device("cpu")] * 2, lambda device, poll: list, before_chunk=before_chunk)
    for worker in pool.workers():
        pool.submit(worker, (ImageSpec(0, 0, 0),))
    threads = list(pool.threads.values())
    started.wait()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5 and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("part", ["models", "encoder"])
def test_loading_can_be_cancelled(checkpoint, part):
    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 20:
            raise local.Cancelled

    chunk, cpu = tuple(batch_images(1, 1, 0)), torch.device("cpu")
    generation = local.LocalGeneration(prepare(Workload(PROMPTS, chunk), checkpoint, SETTINGS, [cpu]), [chunk])
    with pytest.raises(local.Cancelled):
        if part == "models":
            generation.load_models_on(cpu, poll)
        else:
            generation.encode_on(cpu, False, "cpu", (), poll)
    assert generation.negative is None and generation.models[cpu].models is None


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


def test_closing_stops_every_device_within_a_step():
    started = threading.Barrier(3, timeout=30)
    polls = []

    def count(poll):
        started.wait()
        while True:
            polls.append(1)
            poll()

    pool = local.LocalPool([torch.device("cpu")] * 2, lambda device, poll: lambda chunk: count(poll))
    for worker in pool.workers():
        pool.submit(worker, ())
    threads = list(pool.threads.values())
    started.wait()
    pool.close()
    assert polls and not any(thread.is_alive() for thread in threads)


def test_an_error_of_the_work_is_raised_and_no_thread_stays(checkpoint, slow_draw):
    def fail(chunk):
        raise ValueError("bad weights")

    slow_draw(fail)
    with pytest.raises(ValueError, match="bad weights"):
        draw(checkpoint, devices=CPUS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sana batch")]


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
    assert len(drawn) == 2 + local.LARGEST_FAILURES


def test_images_with_nan_are_named_after_the_others_were_generated(checkpoint, alone, monkeypatch):
    real = pipeline.sample

    def sample(models, settings, chunk, *arguments, **options):
        latents = real(models, settings, chunk, *arguments, **options)
        return torch.where(torch.tensor([image.seed == 6 for image in chunk])[:, None, None, None], torch.nan, latents)

    monkeypatch.setattr(pipeline, "sample", sample)
    with pytest.raises(sana_core.FailedImagesError) as caught:
        draw(checkpoint, chunk=2, devices=CPUS)
    message = str(caught.value)
    assert message.startswith("images: 2 failed, number 1, 5, counted from 0; number 1 failed because of samples: ")
    assert len(message.splitlines()) == 1 and list(caught.value.failed) == [1, 5]
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
        real = getattr(local, name)

        def load(*arguments, real=real, name=name, **more):
            results.append(name)
            return real(*arguments, **more)

        monkeypatch.setattr(local, name, load)
    return results


def draw_many(checkpoint, devices=("cpu",), chunk=1):
    pictures = batch_images(len(MANY), 2, 5)
    return {
        p.number: pixels
        for p, pixels in generate_local(prepare(Workload(MANY, pictures, chunk), checkpoint, SMALL, devices))
    }


@pytest.mark.parametrize("chunk, devices", [(1, ["cpu"]), (3, ["cpu"]), (1, CPUS)])
def test_prompts_of_several_sessions_give_the_same_images(checkpoint, loads, monkeypatch, chunk, devices):
    images = draw_many(checkpoint)
    assert loads == ["load_encoder", "load_models", "load_encoder"]
    loads.clear()
    monkeypatch.setattr(local, "FIRST_ON_CPU", 2)
    some = draw_many(checkpoint, devices, chunk)
    # Sessions of 2, 4 and 4 prompts. The models are loaded once.
    assert loads.count("load_encoder") >= 3 and loads.count("load_models") == 1
    assert some.keys() == images.keys() and all(torch.equal(some[number], images[number]) for number in images)


def test_with_little_memory_encoder_and_models_are_never_loaded_together(checkpoint, loads, monkeypatch):
    images = draw_many(checkpoint)
    loads.clear()
    monkeypatch.setattr(local, "FIRST_ON_CPU", 2)
    monkeypatch.setattr(local, "has_room_for_encoder", lambda *arguments: False)
    some = draw_many(checkpoint)
    assert loads == ["load_encoder", "load_models"] * 3
    assert all(torch.equal(some[number], images[number]) for number in images)


def test_a_late_copy_generates_only_the_images_that_nobody_has_finished(checkpoint, alone):
    images = batch_images(2, 4, 5)
    chunk, cpu = (images[3], images[4]), torch.device("cpu")
    generation = local.LocalGeneration(prepare(Workload(PROMPTS, images), checkpoint, SETTINGS, [cpu]), [chunk])
    generate = generation.prepare(cpu, lambda: None)
    generation.before_chunk("cpu", cpu, chunk, lambda: None)
    generation.finish_image(0)
    finished, missing = generate(chunk)
    assert finished == FailedImage("another device has finished it") and torch.equal(missing, alone[4])
    generation.finish_image(1)
    assert generate(chunk) == [finished] * 2


def test_each_gpu_gets_as_many_images_at_once_as_fit_into_its_memory(checkpoint, monkeypatch):
    limits, sizes = {"cuda:0": 3, "cuda:1": 1}, {"cuda:0": set(), "cuda:1": set()}
    monkeypatch.setattr(local, "largest_chunk", lambda checkpoint, settings, device, prompts: limits[str(device)])
    monkeypatch.setattr("sana_core.batch.plan.default_chunk_size", lambda *arguments: 3)
    real = local.generate_chunk

    def generate(models, settings, chunk, *arguments):
        sizes[str(models.transformer.device)].add(len(chunk))
        return real(models, settings, chunk, *arguments)

    monkeypatch.setattr(local, "generate_chunk", generate)
    with pretend_cards(2):
        images = batch_images(len(MANY), 2, 5)
        results = list(generate_local(prepare(Workload(MANY, images), checkpoint, SMALL, list(limits))))
    assert sorted(image.number for image, _ in results) == list(range(20))
    assert max(sizes["cuda:0"]) == 3 and sizes["cuda:1"] == {1}


@pytest.mark.parametrize("share", [0.8, 0.0])
def test_prompts_move_to_another_device_when_the_first_gpu_cannot_encode(checkpoint, monkeypatch, share):
    """Out of memory on the GPUs while they encode. 0.0: no GPU has room beside its models."""
    monkeypatch.setattr("sana_core.batch.batch_size.SHARE", share)
    real, used = local.load_encoder, []

    def load(checkpoint, device, *arguments):
        used.append(str(device))
        if (str(device) == "cuda:0" or not share) and device.type != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(checkpoint, device, *arguments)

    monkeypatch.setattr(local, "load_encoder", load)
    with pretend_cards(2):
        images = batch_images(len(MANY), 1, 5)
        results = list(generate_local(prepare(Workload(MANY, images, 1), checkpoint, SMALL, ["cuda:0", "cuda:1"])))
    assert len(results) == 10 and not any(isinstance(result, FailedImage) for _, result in results)
    assert used[-1] == ("cuda:1" if share else "cpu")


def test_a_gpu_that_breaks_while_it_encodes_leaves_the_prompts_to_the_others(checkpoint, monkeypatch):
    monkeypatch.setattr(local, "FIRST", 2)
    real = local.encode_text

    def encode(encoder, prompt, instruction):
        if encoder.model.device.index == 0 and prompt == MANY[3]:
            cards.fail("cuda:0", "driver")
        return real(encoder, prompt, instruction)

    monkeypatch.setattr(local, "encode_text", encode)
    with pretend_cards(2) as cards:
        images = batch_images(len(MANY), 2, 5)
        results = list(generate_local(prepare(Workload(MANY, images, 1), checkpoint, SMALL, ["cuda:0", "cuda:1"])))
    assert sorted(image.number for image, _ in results) == list(range(20))


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


def test_no_thread_holds_the_lock_while_a_device_tells_its_memory(checkpoint, monkeypatch):
    monkeypatch.setattr(local, "FIRST_ON_CPU", 1)
    images, cpu = batch_images(2, 1, 5), torch.device("cpu")
    generation = local.LocalGeneration(prepare(Workload(PROMPTS, images), checkpoint, SETTINGS, [cpu]), [images])
    # Another device encodes. This device checks whether it has room for a text encoder too.
    generation.plan.begin("other", "another device", time.monotonic())
    generation.models[cpu].models = object()
    held = []

    def has_room(*arguments):
        held.append(generation.lock.locked())
        return True

    monkeypatch.setattr(local, "has_room_for_encoder", has_room)
    generation.before_chunk("cpu", cpu, images[:1], lambda: None)
    assert held and not any(held)
    assert PROMPTS[0] in generation.plan.texts


@pytest.mark.parametrize("chunk", [None, 1])
def test_a_gpu_that_other_programs_have_filled_is_left_out(checkpoint, monkeypatch, chunk):
    """Even the question for its free memory raises, because the driver has no room for its context."""
    kind = getattr(torch, "AcceleratorError", RuntimeError)
    real = batch_size.free_bytes

    def free_bytes(device):
        if device == torch.device("cuda:0"):
            raise kind("CUDA error: out of memory")
        return real(device)

    def load(checkpoint, device, *arguments, real=local.load_models):
        free_bytes(device)
        return real(checkpoint, device, *arguments)

    monkeypatch.setattr(batch_size, "free_bytes", free_bytes)
    monkeypatch.setattr(local, "load_models", load)
    # GPU 1 has no room for the encoder beside its models, so another device has to encode.
    monkeypatch.setattr(local, "has_room_for_encoder", lambda *arguments: free_bytes(arguments[-1]) < 0)
    with pretend_cards(2):
        images = batch_images(len(MANY), 1, 5)
        results = list(generate_local(prepare(Workload(MANY, images, chunk), checkpoint, SMALL, ["cuda:0", "cuda:1"])))
    assert len(results) == 10 and not any(isinstance(result, FailedImage) for _, result in results)


def test_a_gpu_that_is_full_does_not_end_the_search_for_a_place_for_the_encoder(checkpoint, monkeypatch):
    devices = [torch.device("cuda", index) for index in range(2)]

    def has_room(checkpoint, settings, device):
        if device == devices[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return False

    monkeypatch.setattr(local, "has_room_for_encoder", has_room)
    images = batch_images(1, 1, 5)
    request = prepare(Workload(PROMPTS, images), checkpoint, SETTINGS)._replace(devices=devices)
    generation = local.LocalGeneration(request, [images])
    places = [str(device) for device, _ in generation.places_for_encoder(devices[1])]
    assert places == ["cuda:1", "cpu", "cuda:1"]


@pytest.mark.parametrize("bad", [1, 9])
def test_a_negative_prompt_of_nan_does_not_make_all_images_fail(checkpoint, monkeypatch, bad):
    """One broken GPU encodes it for all GPUs. If it is NaN everywhere, the batch ends before the first image."""
    real, tries = local.encode_negative, []

    def encode(*arguments):
        embeds, mask = real(*arguments)
        tries.append(1)
        return (embeds * float("nan") if len(tries) <= bad else embeds), mask

    monkeypatch.setattr(local, "encode_negative", encode)
    images = batch_images(2, 4, 5)
    generated = generate_local(prepare(Workload(PROMPTS, images, 1), checkpoint, SETTINGS, ["cpu"]))
    if bad == 1:
        assert not any(isinstance(result, FailedImage) for _, result in generated)
        return
    with pytest.raises(sana_core.CheckpointError, match="gave NaN for the negative prompt on cpu"):
        list(generated)


def test_models_are_unloaded_only_when_nobody_uses_them_and_are_loaded_once():
    models, log = local.DeviceModels(), []
    using, leave, polls = threading.Event(), threading.Event(), []

    def load():
        log.append("load")
        return object()

    def use():
        with models.use(load, lambda: None):
            using.set()
            leave.wait(20)
            log.append("used")

    def poll():
        polls.append(1)
        leave.set()

    thread = threading.Thread(target=use)
    thread.start()
    assert using.wait(20)
    with models.reserve(poll, unload=True):
        log.append("unloaded")
        assert models.models is None
    thread.join()
    assert log == ["load", "used", "unloaded"] and polls
    with models.use(load, lambda: None), models.use(load, lambda: None):
        assert log[3:] == ["load"]


def test_a_reservation_ends_with_an_error_and_can_be_cancelled_while_it_waits():
    models = local.DeviceModels()

    def cancel():
        raise local.Cancelled

    with pytest.raises(ValueError), models.reserve(cancel, unload=True):
        # Another thread waits, and is cancelled.
        with pytest.raises(local.Cancelled), models.use(object, cancel):
            pass
        raise ValueError
    # A load that fails leaves the models to the next thread.
    with pytest.raises(ZeroDivisionError), models.use(lambda: 1 / 0, cancel):
        pass
    with models.use(object, cancel):
        # The models are in use, so the wait for the unloading is cancelled, and the reservation ends.
        with pytest.raises(local.Cancelled), models.reserve(cancel, unload=True):
            pass
        with models.use(object, cancel):
            pass
    assert models.users == 0 and not models.reserved
