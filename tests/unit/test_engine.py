"""Batches on several worker processes: the same bits as in this process, and no image lost when processes fail.

The real processes are started once and stay warm for all tests of this file. Tests of faults use the stub of
stub_runs.py, whose processes start at once.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from adapted import save_adapter
from diffusers import SanaTransformer2DModel
from stub_runs import CPU, Work, scaled, stub_workers

import sana_core
from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import FailedImage, ImageInputs, Workload, batch_images
from sana_core.engine import local, process
from sana_core.engine.local import generate_local
from sana_core.engine.process import Processes
from sana_core.errors import ClusterError
from sana_core.runtime import limits
from sana_core.sampling.samplers import InitImage

ROOT = Path(__file__).parents[2]
PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SIZE = {"seed": 5, "width": 64, "height": 64, "steps": 3}
CPUS = ["cpu", "cpu"]
# The shipped limits, all shorter by one factor.
LIMITS = scaled(0.005)
# Results differ in rounding if sums are divided among another number of threads.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="signals of POSIX"),
]


def running(pid):
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid):
    """The worker processes that a process has started."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [child for child in pids if is_worker_of(child, pid)]


def is_worker_of(child, pid):
    try:
        parent = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])
        return parent == pid and b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    except OSError:
        return False


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return result


# --- real processes: the same bits ---


@pytest.fixture(scope="module", autouse=True)
def own_processes():
    """Worker processes of this file alone, which end with it."""
    with pytest.MonkeyPatch.context() as patch:
        registry = Processes()
        patch.setattr(local, "processes", lambda: registry)
        yield registry
        registry.end()


@pytest.fixture(scope="module")
def lora(checkpoint, tmp_path_factory):
    file = tmp_path_factory.mktemp("loras") / "style.safetensors"
    save_adapter(checkpoint, file, much=0.1)
    return str(file)


@pytest.fixture(scope="module")
def sprint(checkpoint, tmp_path_factory):
    """A checkpoint of Sprint's architecture."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("sprint") / "model")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    torch.manual_seed(0)
    changes = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
    SanaTransformer2DModel.from_config(config | changes).save_pretrained(folder / "transformer")
    return folder


def generate(checkpoint, devices, **options):
    return sana_core.generate(PROMPTS, checkpoint, count=3, devices=devices, **SIZE | options)


OPTIONS = {
    "plain": {},
    "chunks of 2": {"chunk": 2},
    "one chunk": {"chunk": 6, "guidance_interval": (0.2, 0.8)},
    "euler, negative prompt": {"sampler": "flow_euler", "negative_prompt": "dark"},
    "PAG, latents": {
        "pag_scale": 2.0,
        "pag_blocks": "1",
        "latents": torch.randn(6, 32, 2, 2, generator=torch.Generator().manual_seed(3)),
    },
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_images_are_equal_to_the_bit_on_1_2_and_3_workers(checkpoint, options):
    alone = generate(checkpoint, ["cpu"], **options)
    # Another number of devices takes another way only with chunks of a chosen size.
    for devices in (CPUS, ["cpu"] * 3) if "chunk" in options else (CPUS,):
        assert torch.equal(generate(checkpoint, devices, **options), alone)


def test_a_lora_is_on_then_off_then_on_in_warm_processes(checkpoint, lora):
    loras = [(lora, 0.6)]
    without, with_lora = generate(checkpoint, ["cpu"]), generate(checkpoint, ["cpu"], loras=loras)
    assert not torch.equal(without, with_lora)
    for options, expected in (({"loras": loras}, with_lora), ({}, without), ({"loras": loras}, with_lora)):
        assert torch.equal(generate(checkpoint, CPUS, **options), expected)


def test_a_file_that_changes_between_two_runs_is_loaded_again(checkpoint, tmp_path):
    file = tmp_path / "style.safetensors"
    images = []
    for seed in (7, 8):
        save_adapter(checkpoint, file, seed=seed, much=0.1)
        images.append(generate(checkpoint, CPUS, loras=[(str(file), 1.0)]))
        assert torch.equal(images[-1], generate(checkpoint, ["cpu"], loras=[(str(file), 1.0)]))
    assert not torch.equal(*images)


def test_sprint_is_equal_on_2_workers(sprint):
    options = {"sampler": "scm", "steps": 2}
    assert torch.equal(generate(sprint, CPUS, **options), generate(sprint, ["cpu"], **options))


def test_embeds_are_equal_on_2_workers(checkpoint):
    encoder = sana_core.load_text_encoder(checkpoint)
    embeds, mask = (
        torch.cat(parts) for parts in zip(*(sana_core.encode_prompts(encoder, [p]) for p in PROMPTS), strict=True)
    )
    # No text has these embeddings.
    options = {"prompt_embeds": 0.9 * embeds, "prompt_attention_mask": mask, "count": 3, **SIZE}
    alone, together = (sana_core.generate(None, checkpoint, devices=devices, **options) for devices in (["cpu"], CPUS))
    assert torch.equal(together, alone)


@pytest.mark.parametrize("masked", [False, True])
def test_images_that_start_from_an_image_are_equal_on_2_workers(checkpoint, masked):
    numbers = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 32, 2, 2, generator=numbers)
    init = InitImage(latents, torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(1, 32, 2, 2) if masked else None)
    workload = Workload(PROMPTS, batch_images(2, 3, 5), 1, inputs=ImageInputs(init=init))
    alone, together = (
        {image.number: pixels for image, pixels in generate_local(prepare(workload, checkpoint, settings, devices))}
        for settings in [SamplingSettings(64, 64, steps=3)]
        for devices in (["cpu"], CPUS)
    )
    assert alone.keys() == together.keys() == set(range(6))
    assert all(torch.equal(together[number], pixels) for number, pixels in alone.items())
    if masked:
        plain = generate(checkpoint, ["cpu"])
        assert not torch.equal(alone[0], plain[0])


def test_the_best_of_n_are_equal_on_2_workers(checkpoint, clip):
    options = {"best": 1, "of": 4, "scorer": clip, **SIZE}
    alone, together = (
        sana_core.generate(PROMPTS, checkpoint, devices=devices, **options) for devices in (["cpu"], CPUS)
    )
    assert torch.equal(together, alone)


def test_a_callback_gets_the_latents_of_every_step_from_each_worker(checkpoint):
    steps = {"alone": {}, "together": {}}
    for name, devices in (("alone", ["cpu"]), ("together", CPUS)):

        def note(step, name=name):
            steps[name][step.images, step.step] = step.sigma, step.latents.clone()

        generate(checkpoint, devices, chunk=1, callback=note)
    assert steps["alone"].keys() == steps["together"].keys() and len(steps["alone"]) == 18
    for key, (sigma, latents) in steps["alone"].items():
        assert steps["together"][key][0] == sigma and torch.equal(steps["together"][key][1], latents)


def test_a_callback_that_raises_ends_the_run_and_the_workers_stay_warm(checkpoint, own_processes):
    def stop(step):
        raise KeyError("enough")

    expected = generate(checkpoint, CPUS)
    pids = [worker.process.pid for worker in own_processes.workers]
    with pytest.raises(KeyError, match="enough"):
        generate(checkpoint, CPUS, callback=stop)
    assert torch.equal(generate(checkpoint, CPUS), expected)
    assert [worker.process.pid for worker in own_processes.workers] == pids


def test_a_worker_that_is_killed_while_it_samples_loses_no_image(checkpoint, own_processes, caplog):
    expected = generate(checkpoint, ["cpu"], chunk=1)
    killed = []

    def kill(step):
        if not killed:
            killed.extend(worker.process.pid for worker in own_processes.workers[:2])
            os.kill(killed[0], signal.SIGKILL)

    assert torch.equal(generate(checkpoint, CPUS, chunk=1, callback=kill), expected)
    assert not running(killed[0]) and running(killed[1])


def test_a_prompt_that_is_too_long_is_named_once_by_the_process(checkpoint, caplog):
    sana_core.generate("red " * 400, checkpoint, devices=CPUS, count=2, **SIZE)
    assert sum("300" in record.getMessage() for record in caplog.records) == 1


# --- stub: faults in every phase ---


@pytest.fixture(scope="module")
def stub():
    with stub_workers() as workers:
        yield workers


@pytest.fixture
def run(stub):
    """A function that does a Work on two workers and returns its failed images. It raises if the run does not end."""

    def do(work, workers=2, limits=LIMITS):
        end = time.monotonic() + 60

        def poll():
            assert time.monotonic() < end, "the run does not end"

        with stub.processes.borrow([CPU] * workers) as borrowed:
            running_work = work.run(borrowed, limits)
            failed = work.check(list(running_work.images(poll)))
        do.finished = running_work.finished
        return failed

    yield do
    stub.withdraw()


def pids(stub):
    return [worker.process.pid for worker in stub.workers]


def test_two_runs_in_a_row_use_the_same_processes(stub, run):
    """Also if the second one has another negative prompt and other weights."""
    run(Work({"name": "first"}, weights={"layer": b"1"}))
    before = pids(stub)
    run(Work({"name": "second"}, weights={"layer": b"1"}))
    run(Work({"name": "third", "revision": "2"}, weights={"layer": b"2"}))
    run(Work({"name": "fourth", "revision": "3"}))
    assert pids(stub) == before and all(map(running, before))


def test_the_second_run_needs_no_other_load_of_the_models(stub, run):
    run(Work({"revision": "warm"}, count=20, chunk=1))
    # A load would take longer than the run may last.
    run(Work({"revision": "warm", "load": 120}))


PHASES = ["start", "begin", "load", "encode", "step", "decode", "send"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["kill", "exit", "driver"])
def test_a_worker_that_is_lost_in_any_phase_loses_no_image(stub, run, phase, kind):
    if phase == "start":
        stub.processes.end()
    file = stub.order(phase, kind)
    failed = run(Work({"revision": f"{phase} {kind}"}, weights={"layer": b"1"}, count=8))
    assert not file.exists()
    # While it sends, an error is an error of that image.
    assert not failed or (phase, kind) == ("send", "driver")


@pytest.mark.parametrize("phase", ["begin", "step", "decode", "send"])
@pytest.mark.parametrize("kind", ["stop", "deaf"])
def test_a_worker_that_hangs_in_any_phase_loses_no_image_of_this_run_and_the_next(stub, run, phase, kind):
    """deaf: it hangs and keeps Python's lock, so none of its threads runs."""
    file = stub.order(phase, kind)
    for number in range(2):
        assert not run(Work({"name": f"{phase} {number}"}, count=8))
    assert not file.exists() and all(map(running, pids(stub)))


def test_a_worker_that_was_stopped_between_two_runs_is_replaced(stub, run):
    run(Work({}))
    before = stub.workers[0].process.pid
    os.kill(before, signal.SIGSTOP)
    # It has the time of a start, although it may load for much longer.
    run(Work({}), workers=1, limits=LIMITS._replace(loading=1000))
    assert not running(before)


def test_a_worker_that_was_killed_between_two_runs_is_replaced(stub, run):
    run(Work({}))
    before = stub.workers[0].process.pid
    os.kill(before, signal.SIGKILL)
    run(Work({}), workers=1)
    assert not running(before)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_memory_that_runs_out_above_2_images_halves_the_chunks(run, chunk, caplog):
    assert not run(Work({"fits": 2}, ["a"], 24, chunk))
    assert ("memory ran out" in caplog.text) == (chunk > 2)


def test_memory_that_is_too_small_for_any_image_ends_with_that_error(run):
    with pytest.raises(torch.OutOfMemoryError):
        run(Work({"fits": 0}))


def test_a_worker_that_says_how_many_images_fit_gets_no_more(run, caplog):
    assert not run(Work({"revision": "limited", "limit": 2, "fits": 2}, ["a"], 24, 8))
    assert "memory ran out" not in caplog.text


def test_an_image_that_fails_everywhere_is_the_only_one_that_fails(run):
    assert run(Work({"bad": ["b"]}, count=1, chunk=3)) == [FailedImage("an ordered NaN")]


def test_an_unknown_error_is_tried_again_elsewhere(stub, run):
    file = stub.order("step", "error")
    assert not run(Work({}, count=8))
    assert not file.exists()


@pytest.mark.parametrize("phase", ["begin", "load"])
def test_a_worker_that_refuses_the_job_is_left_out(stub, run, caplog, phase):
    stub.order(phase, "refused")
    assert not run(Work({"revision": f"refused in {phase}"}))
    assert caplog.text.count("is left out: ") == 1


def test_a_run_ends_with_the_reason_of_the_first_worker_when_all_refuse(stub, run):
    for _ in range(2):
        stub.order("begin", "refused")
    with pytest.raises(sana_core.CheckpointError, match="^an ordered failure: refused$"):
        run(Work({}))
    assert not run(Work({})), "the next run uses them again"


def test_a_worker_that_never_starts_ends_the_run_after_three_tries(stub, run):
    stub.processes.end()
    files = [stub.order("start", "error") for _ in range(4)]
    with pytest.raises(ClusterError, match="^cpu: StubError: error$"):
        run(Work({}), workers=1)
    assert [file.exists() for file in files] == [False] * 3 + [True]
    stub.withdraw()
    assert not run(Work({}), workers=1)


def test_an_image_that_kills_its_worker_five_times_is_a_failed_image(stub, run):
    run(Work({}))
    for _ in range(5):
        stub.order("send", "kill")
    failed = run(Work({}, ["a"], 30, 1))
    assert len(failed) <= 1


def test_a_consumer_that_pauses_while_a_worker_is_lost_gets_all_images(stub, monkeypatch):
    """The pause is longer than a worker may be silent. It must not count as silence of the other worker."""
    monkeypatch.setattr(limits, "LONGEST_GAP", 0.2)
    work = Work({"revision": "pause", "step": 0.02}, count=20, chunk=1)
    results, births = [], []
    with stub.processes.borrow([CPU] * 2) as workers:
        run = work.run(workers, scaled(0.01))
        for result in run.images():
            results.append(result)
            if not births and all(run.finished[worker.name] > 2 for worker in workers):
                births = [worker.birth for worker in workers]
                os.kill(workers[0].process.pid, signal.SIGKILL)
                time.sleep(1.5)
        assert births and [worker.birth for worker in workers] == [births[0] + 1, births[1]]
    assert not work.check(results)


def test_a_short_batch_twice_uses_both_workers_the_second_time(stub, run):
    """The second worker loads when the first run ends. It goes on, so that the next run finds it ready."""
    stub.processes.end()
    run(Work({"revision": "short", "load": 0.5}, ["a"], 2, 1))
    first = stub.workers[0] if run.finished["cpu"] else stub.workers[1]
    time.sleep(1)
    # With another load a worker would take no part.
    run(Work({"revision": "short", "load": 120, "step": 0.02}, ["a"], 30, 1))
    assert first and min(run.finished[worker.name] for worker in stub.workers[:2]) > 0


def test_closing_a_run_cancels_its_workers_and_the_next_run_is_whole(stub, run):
    work = Work({"step": 0.05}, count=100, chunk=1)
    with stub.processes.borrow([CPU] * 2) as workers:
        with closing(work.run(workers).images()) as images:
            next(images)
            began = time.monotonic()
        assert time.monotonic() - began < 1
    before = pids(stub)
    assert not run(Work({}))
    assert pids(stub) == before


@pytest.mark.parametrize("phase", ["load", "encode"])
def test_a_cancelled_run_ends_long_work_of_its_workers_and_they_stay_warm(stub, run, phase):
    run(Work({}))
    before = pids(stub)
    polls = []

    def poll():
        polls.append(1)
        if len(polls) > 4:
            raise KeyboardInterrupt

    with stub.processes.borrow([CPU] * 2) as workers, pytest.raises(KeyboardInterrupt):
        list(Work({"revision": "cancelled", phase: 120}).run(workers).images(poll))
    assert not run(Work({}))
    assert pids(stub) == before


def test_two_runs_at_the_same_time_have_processes_of_their_own():
    first, second = Work({"name": "first"}, count=10), Work({"name": "second"}, count=10)
    with stub_workers() as stub, stub.processes.borrow([CPU] * 2) as some, stub.processes.borrow([CPU] * 2) as others:
        assert not {*some} & {*others}
        runs = [work.run(workers).images() for work, workers in ((first, some), (second, others))]
        results = list(zip(*runs, strict=True))
    for work, images in zip((first, second), zip(*results, strict=True), strict=True):
        assert not work.check(images)


def test_processes_load_one_after_another():
    """RAM must not have two copies of the weights, so the stub fails if two processes load at the same time."""
    work = Work({"revision": "in turn", "load": 0.1, "alone": True, "step": 0.02}, count=20, chunk=1)
    with stub_workers() as stub, stub.processes.borrow([CPU] * 3) as workers:
        run = work.run(workers)
        assert not work.check(list(run.images()))
    assert run.finished.keys() == {worker.name for worker in workers}


# --- processes as a whole ---


def test_a_process_that_cannot_import_the_package_says_why_in_one_line(checkpoint, tmp_path, monkeypatch):
    package = tmp_path / "sana_core"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object file")')
    monkeypatch.setattr(process, "PACKAGE", package)
    registry = Processes()
    monkeypatch.setattr(local, "processes", lambda: registry)
    with pytest.raises(ClusterError) as caught:
        generate(checkpoint, CPUS)
    assert str(caught.value) == "cpu: ImportError: libcudart.so.12: cannot open shared object file" or str(
        caught.value
    ) == ("cpu #2: ImportError: libcudart.so.12: cannot open shared object file")
    assert not any(worker.process.is_alive() for worker in registry.workers)


SCRIPT = """
import os, sys
sys.path.insert(0, "pack")
import torch
torch.set_num_threads(1)
import sana_core
images = sana_core.generate({prompts}, {checkpoint!r}, count=3, devices=["cpu", "cpu"], **{size})
torch.save(images, "images.part")
os.replace("images.part", "images.pt")
sana_core.generate({prompts}, {checkpoint!r}, count=10_000, devices=["cpu", "cpu"], **{size})
"""


def test_a_script_without_a_main_guard_leaves_no_process_when_it_is_killed(checkpoint, tmp_path):
    """Its folder has a dot and a space in its name."""
    folder = tmp_path / "my pack.v1"
    shutil.copytree(ROOT / "sana_core", folder / "pack" / "sana_core", ignore=shutil.ignore_patterns("__pycache__"))
    script = SCRIPT.format(prompts=PROMPTS, checkpoint=str(checkpoint), size=SIZE)
    (folder / "script.py").write_text(textwrap.dedent(script))
    parent = subprocess.Popen([sys.executable, "script.py"], cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: parent.poll() is not None or (folder / "images.pt").exists(), 300)
        assert parent.poll() is None, parent.stderr.read()
        workers = children(parent.pid)
        assert len(workers) == 2
        assert torch.equal(torch.load(folder / "images.pt"), generate(checkpoint, ["cpu"]))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(running, workers)))


@pytest.mark.parametrize(
    "moment",
    [
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("at the start", "0.3 s later")),
        "after the first image",
    ],
)
def test_ctrl_c_ends_a_batch_in_one_line_and_leaves_no_process(checkpoint, tmp_path, moment):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, "--out", tmp_path / "out", "--count", 5000]
    words += ["--width", 64, "--height", 64, "--steps", 2, "--chunk", 1, "--devices", *CPUS]
    command = [sys.executable, "-m", "sana_core", *map(str, words)]
    # The processes of a terminal are a group, and Ctrl+C reaches all of them.
    parent = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        workers = wait_until(lambda: children(parent.pid) or parent.poll() is not None, 120)
        assert parent.poll() is None, parent.stderr.read()
        if moment == "0.3 s later":
            time.sleep(0.3)
        elif moment == "after the first image":
            wait_until(lambda: list((tmp_path / "out").glob("*.png")), 120)
        workers = children(parent.pid)
        os.killpg(parent.pid, signal.SIGINT)
        output = parent.communicate(timeout=60)[1]
    finally:
        parent.kill()
    # Libraries write warnings while they are imported.
    lines = [line for line in output.splitlines() if line.strip() and "torch" not in line]
    assert parent.returncode == 130 and lines == ["stopped; all files that were listed are complete"], output
    wait_until(lambda: not any(map(running, workers)))
