"""Steps that are computed from a recording have the bits of computed steps, and no recording outlives its sampling."""

import itertools
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from adapted import save_adapter
from fake_graph import FakeRecorder
from tiny import random_prompt, tiny_transformer

from benchmarks.host_time import EmptyRecorder, calls_of
from sana_core.__main__ import main
from sana_core.batch import pipeline
from sana_core.batch.pipeline import Conditioning, Models, ResolvedSettings, load_models, sample
from sana_core.batch.plan import ImageInputs, ImageSpec
from sana_core.checkpoints import inspect_checkpoint
from sana_core.model.known_models import SPRINT
from sana_core.runtime import accelerator
from sana_core.sampling import step_graph
from sana_core.sampling.guidance import ShardedModel, denoiser
from sana_core.sampling.samplers import SAMPLERS, InitImage
from sana_core.sampling.step_graph import EAGER_CALLS, Recorder, StepGraph, recorder_for

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
STEPS = 6


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompts(channels):
    """A prompt of 7 tokens, and a negative one of 2."""
    texts = []
    for tokens in (7, 2):
        mask = torch.zeros(1, 300)
        mask[:, :tokens] = 1
        texts.append((numbers(1, 300, channels, seed=tokens), mask))
    return Conditioning(texts[:1], texts[1])


@pytest.fixture
def recorders(monkeypatch):
    """The recorders of all samplings, which record on the CPU."""
    all_recorders = []

    def make(device):
        all_recorders.append(FakeRecorder(device))
        return all_recorders[-1]

    monkeypatch.setattr(pipeline, "recorder_for", make)
    return all_recorders


def draw(models, inputs=None, images=1, counts=None, **changes):
    settings = ResolvedSettings(**{"width": 128, "height": 96, "steps": STEPS, "guidance": 4.5} | changes)
    text = prompts(models.transformer.config.caption_channels)
    text = text._replace(texts=text.texts * images)
    chunk = tuple(ImageSpec(i, 0, 3 + i) for i in range(images))
    return sample(models, settings, chunk, text, images=inputs or ImageInputs(), counts=counts)


def compare(recorders, models, inputs=None, **changes):
    """Check that the bits are the same with and without recordings, and that none is alive. Returns the counts."""
    recorders.clear()
    expected = draw(models, inputs, **changes)
    assert not recorders
    counts = Counter()
    got = draw(models, inputs, counts=counts, **changes)
    assert torch.equal(got, expected) and got.isfinite().all()
    assert sum(len(recorder.graphs) for recorder in recorders) == 0 and counts["failed"] == 0
    return counts + Counter(eager=sum(recorder.eager for recorder in recorders))


@pytest.fixture(scope="module")
def models(checkpoint, tmp_path_factory):
    """The checkpoint without and with a LoRA."""
    file = tmp_path_factory.mktemp("loras") / "it.safetensors"
    save_adapter(checkpoint, file, much=0.1)
    settings = ResolvedSettings(steps=STEPS, guidance=4.5, sampler="flow_dpmpp_2m")
    loras = ((), ((str(file), 0.6),))
    return [load_models(inspect_checkpoint(checkpoint), CPU, settings._replace(loras=lora)) for lora in loras]


INPUTS = {
    "text": ImageInputs(),
    "image": ImageInputs(init=InitImage(numbers(1, 32, 3, 4, seed=5), None)),
    "mask": ImageInputs(init=InitImage(numbers(1, 32, 3, 4, seed=5), (numbers(1, 32, 3, 4, seed=6) > 0).float())),
}


@pytest.mark.parametrize("image", INPUTS)
@pytest.mark.parametrize("interval", [(0.0, 1.0), (0.2, 0.6)])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != SPRINT])
def test_replayed_steps_have_the_bits_of_computed_steps(recorders, models, name, interval, image):
    for model, pag in itertools.product(models, (0.0, 2.0)):
        counts = compare(
            recorders,
            model,
            INPUTS[image],
            sampler=name,
            pag_scale=pag,
            pag_blocks="1" if pag else "",
            guidance_interval=interval,
        )
        calls = 2 * STEPS - 1 if name == "flow_heun" else STEPS
        assert counts["replayed"] + counts["eager"] == calls
        if interval == (0.0, 1.0):
            assert counts["eager"] == EAGER_CALLS and counts["recorded"] == 1


@pytest.mark.parametrize("variant", ["sprint", "sana-1.5", "sana-4k"])
def test_other_models_have_the_same_bits(recorders, variant):
    sampler = SPRINT if variant == "sprint" else "flow_dpmpp_3m"
    counts = compare(recorders, Models(tiny_transformer(variant), None, 3.0), sampler=sampler)
    assert counts == {"recorded": 1, "replayed": STEPS - EAGER_CALLS, "eager": EAGER_CALLS}


def test_half_precision_and_no_guidance_have_the_same_bits(recorders, models):
    bf16 = models[0]._replace(transformer=tiny_transformer().to(torch.bfloat16))
    for model, guidance in itertools.product((bf16, models[0]), (1.0, 4.5)):
        assert compare(recorders, model, sampler="flow_dpmpp_2m", guidance=guidance)["replayed"] == STEPS - EAGER_CALLS


def test_several_images_of_a_cpu_are_separate_samplings(recorders, models):
    counts = compare(recorders, models[0], images=3, sampler="flow_euler")
    assert counts["recorded"] == 3 and len(recorders) == 3


def test_a_new_shape_frees_the_recording_before_it_has_one_of_its_own(recorders, models):
    most = 0

    def look(step):
        nonlocal most
        most = max(most, len(recorders[0].graphs))

    options = {"sampler": "flow_euler", "steps": 16, "guidance_interval": (0.3, 0.6), "counts": Counter()}
    draw(models[0], ImageInputs(callback=look), **options)
    assert options["counts"]["recorded"] == 3 and most == 1


@pytest.mark.parametrize("reason", ["compiled", "sharded", "control", "counts"])
def test_some_samplings_have_no_recorder(recorders, models, monkeypatch, reason):
    """A compiled transformer, an image on several devices, a ControlNet, and callers that do not ask for it."""

    def stop(model, *args):
        graphs.append(args[-1])
        raise KeyError

    graphs = []
    monkeypatch.setattr(pipeline, "denoiser", stop)
    inputs = ImageInputs(control=SimpleNamespace(latents=[0])) if reason == "control" else ImageInputs()
    settings = ResolvedSettings(steps=2, guidance=4.5, sampler="flow_euler", compiled=reason == "compiled")
    sharded = ShardedModel(None, []) if reason == "sharded" else None
    counts = None if reason == "counts" else Counter()
    with pytest.raises(KeyError):
        sample(models[0], settings, (ImageSpec(0, 0, 0),), prompts(64), images=inputs, sharded=sharded, counts=counts)
    assert graphs == [None] and not recorders


def test_steps_are_recorded_only_if_the_host_limits_their_speed(recorders, models, monkeypatch):
    monkeypatch.setattr(FakeRecorder, "host_limits", False)
    assert compare(recorders, models[0], sampler="flow_euler") == {"eager": STEPS}


def test_a_replayed_step_needs_a_tenth_of_the_calls_of_an_eager_one():
    transformer, x = tiny_transformer(), numbers(1, 32, 3, 4)
    graph = StepGraph(EmptyRecorder(CPU), Counter())
    calls = []
    for chosen in (None, graph):
        model = denoiser(transformer, random_prompt(seed=1), random_prompt(seed=2), 4.5, graph=chosen)
        for _ in range(EAGER_CALLS + 1):
            model(x, 0.5)
        calls.append(calls_of(partial(model, x, 0.5)))
    eager, replayed = calls
    # The released models have 20 to 60 layers instead of 3.
    assert graph.counts["replayed"] == 2 and 10 < replayed <= 0.1 * eager


# Failures


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (RuntimeError, ValueError))],
)
def test_a_recording_that_fails_at_any_call_leaves_the_results_right(recorders, monkeypatch, caplog, error):
    model, calls, counts = Models(tiny_transformer(layers=1), None, 3.0), [], Counter()
    options = {"sampler": "flow_euler", "steps": EAGER_CALLS + 1}
    expected = draw(model, **options)
    monkeypatch.setattr(FakeRecorder, "check", staticmethod(calls.append))
    draw(model, counts=Counter(), **options)
    assert len(calls) > 50
    for at in calls:

        def fail(number, at=at):
            if number == at:
                raise error("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(FakeRecorder, "check", staticmethod(fail))
        assert torch.equal(draw(model, counts=counts, **options), expected)
    assert counts == {"failed": len(calls)} and sum(len(recorder.graphs) for recorder in recorders) == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("cpu: steps are computed without a CUDA graph (")


def test_a_cancellation_within_a_recording_is_not_a_failure(recorders, models, monkeypatch):
    def cancel(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeRecorder, "check", staticmethod(cancel))
    counts = Counter()
    with pytest.raises(KeyboardInterrupt):
        draw(models[0], sampler="flow_euler", counts=counts)
    assert not counts and accelerator.ALLOCATOR.acquire(blocking=False)
    accelerator.ALLOCATOR.release()


def test_a_sampling_that_ends_early_keeps_no_recording(recorders, models):
    def stop(step):
        assert step.step < 4, "cancelled"

    with pytest.raises(AssertionError, match="cancelled"):
        draw(models[0], ImageInputs(callback=stop), sampler="flow_euler", counts=Counter())
    assert sum(len(recorder.graphs) for recorder in recorders) == 0


def test_a_batch_reports_its_steps_and_keeps_a_device_whose_recordings_fail(
    recorders, checkpoint, tmp_path, monkeypatch, capsys, caplog
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle")
    words = ["batch", "prompts.txt", "--checkpoint", str(checkpoint), "--count", "2", "--width", "32", "--height", "32"]

    def batch(folder):
        assert main([*words, "--steps", str(STEPS), "--report", "--out", folder]) == 0
        images = [path.read_bytes() for path in sorted((tmp_path / folder).glob("*.png"))]
        return images, capsys.readouterr().out

    replayed, out = batch("replayed")
    assert f"  steps replayed from CUDA graphs: {2 * (STEPS - EAGER_CALLS)}\n" in out and len(replayed) == 2

    def fail(number):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FakeRecorder, "check", staticmethod(fail))
    computed, out = batch("computed")
    assert computed == replayed and "  cpu: 2\n" in out and "replayed" not in out
    assert caplog.text.count("without a CUDA graph") == 1 and "left out" not in caplog.text


# Threads


def test_two_threads_never_record_at_once_and_nobody_frees_memory_meanwhile(models, monkeypatch):
    inside, most, recorded = [], [], Counter()

    class Slow(FakeRecorder):
        def capture(self, work):
            inside.append(threading.get_ident())
            most.append(len(inside))
            out = super().capture(work)
            inside.remove(threading.get_ident())
            recorded[threading.get_ident()] += 1
            return out

    monkeypatch.setattr(pipeline, "recorder_for", Slow)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: most.append(len(inside) + 1))
    monkeypatch.setattr(accelerator, "current_device", lambda device: accelerator.nullcontext())
    ended, results = threading.Event(), {}

    def free_memory():
        while not ended.is_set():
            accelerator.empty_cache(torch.device("cuda", 0))

    def work(number):
        results[number] = [draw(models[0], sampler="flow_euler", steps=12, counts=Counter()) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    freeing = threading.Thread(target=free_memory)
    freeing.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    freeing.join()
    assert set(most) == {1} and recorded and not inside
    expected = draw(models[0], sampler="flow_euler", steps=12)
    assert all(torch.equal(got, expected) for latents in results.values() for got in latents)


def test_a_thread_computes_while_another_one_records(models, monkeypatch):
    recorder = FakeRecorder(CPU)
    monkeypatch.setattr(pipeline, "recorder_for", lambda device: recorder)
    held, released = threading.Event(), threading.Event()

    def hold():
        with accelerator.ALLOCATOR:
            held.set()
            released.wait()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    counts = Counter()
    draw(models[0], sampler="flow_euler", counts=counts)
    released.set()
    other.join()
    assert not +counts and recorder.eager == STEPS


# The recorder of CUDA, with a driver that notes the calls


@pytest.fixture
def driver(monkeypatch):
    """Replaces torch.cuda. `calls` has the calls in their order, `failing` the names of those that raise."""
    state = SimpleNamespace(calls=[], failing=set(), stream="default", elapsed=5.0, ended=True)

    def note(name, result=None):
        def call(*args, **options):
            state.calls.append(name)
            if name in state.failing:
                raise RuntimeError(f"{name} failed")
            return result

        return call

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            state.calls.append(f"{self.name} waits for {other.name}")

    class Inside:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, state.stream = state.stream, self.stream.name

        def __exit__(self, *error):
            state.stream = self.before

    class Graph:
        replay = staticmethod(note("replay"))

        def capture_begin(self, pool, capture_error_mode):
            assert capture_error_mode == "thread_local" and pool == (0, 7)
            note(f"begin on {state.stream}")()
            if "begin" in state.failing:
                raise RuntimeError("begin failed")

        capture_end = staticmethod(note("end"))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        record = staticmethod(note("event"))

        def query(self):
            return state.ended

        def elapsed_time(self, other):
            assert state.ended, "it would wait"
            return state.elapsed

    for name, value in {
        "Stream": lambda device: Stream("side"),
        "stream": Inside,
        "current_stream": lambda device: Stream("default"),
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 7),
        "Event": Event,
        "empty_cache": note("empty_cache"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", note("end pool"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", note("release pool"), raising=False)
    step_graph.side_stream.cache_clear()
    yield state
    step_graph.side_stream.cache_clear()


def recorder_with_work(driver):
    def work():
        driver.calls.append(f"work on {driver.stream}")
        if "work" in driver.failing and driver.calls[-2].startswith("begin"):
            raise RuntimeError("work failed")
        return torch.ones(1)

    return Recorder(torch.device("cuda", 0)), work


def test_a_recording_is_on_a_stream_of_its_own_after_the_work_has_run_there(driver):
    recorder, work = recorder_with_work(driver)
    recording = recorder.record(work)
    assert driver.calls == [
        "side waits for default",
        "work on side",
        "empty_cache",
        "begin on side",
        "work on side",
        "end",
        "default waits for side",
    ]
    recording.replay()
    assert driver.calls[-1] == "replay" and driver.stream == "default"


@pytest.mark.parametrize("name", ["work", "end", "begin", "empty_cache", "end pool"])
def test_a_recording_that_fails_leaves_the_allocator_as_it_was(driver, name):
    recorder, work = recorder_with_work(driver)
    driver.failing |= {name, "work"} if name == "end pool" else {name}
    with pytest.raises(RuntimeError, match="work failed" if name == "end pool" else f"{name} failed"):
        recorder.record(work)
    assert driver.stream == "default"
    assert ("end" in driver.calls) is (name not in ("begin", "empty_cache"))
    # If the recording has ended, torch raises, and the graph releases its memory itself.
    assert ("end pool" in driver.calls) is (name != "empty_cache")
    assert ("release pool" in driver.calls) is (name not in ("empty_cache", "end pool"))
    with accelerator.ALLOCATOR:
        pass


@pytest.mark.parametrize(
    "elapsed, ended, expected", [(5.0, True, True), (5.0, False, False), (1e6, True, False), (0.0, True, True)]
)
def test_the_host_is_the_limit_if_the_device_does_not_take_longer(driver, monkeypatch, elapsed, ended, expected):
    recorder, work = recorder_with_work(driver)
    clock = iter((1.0, 1.005))
    monkeypatch.setattr(step_graph.time, "perf_counter", lambda: next(clock))
    driver.elapsed, driver.ended = elapsed, ended
    assert recorder.run(work).item() == 1
    assert driver.calls == ["event", "work on default", "event"]
    assert recorder.waits_for_host() is expected


def test_only_torchs_own_allocator_on_cuda_has_a_recorder(driver, monkeypatch):
    device = torch.device("cuda", 0)
    backend = ["native"]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend[0])
    assert recorder_for(CPU) is None and type(recorder_for(device)) is Recorder
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.2")
        assert recorder_for(device) is None
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_cuda_endAllocateToPool")
        assert recorder_for(device) is None
    backend[0] = "cudaMallocAsync"
    assert recorder_for(device) is None
