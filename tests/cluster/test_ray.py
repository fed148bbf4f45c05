"""Batches on a real Ray cluster, while its machines come and go."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from adapted import save_adapter
from clips import save_clip
from machines import actors, add_node, send_to_an_actor, wait_for_no_actors
from setup import ROOT

import sana_core
from sana_core import inspect_checkpoint
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings, encode_texts, load_encoder, prepare, resolve_settings
from sana_core.batch.plan import FailedImage, WorkerReport, Workload, batch_images, no_status
from sana_core.batch.png import describe_settings
from sana_core.checkpoints.fingerprint import fingerprint
from sana_core.cluster.batch import generate_on_cluster, generate_with, make_job
from sana_core.cluster.connection import ACTOR_TIMEOUT, ClusterSettings
from sana_core.cluster.session import run_alone
from sana_core.engine.body import Job
from sana_core.errors import ClusterError
from sana_core.runtime.cancellation import no_poll
from sana_core.runtime.folder_lock import hold

# an actor has one core
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SETTINGS = SamplingSettings(128, 128, steps=4)


def drew(report, node):
    return any(f"({node.node_id[:6]}" in name for name in report.finished)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_cluster_draws_with_a_lora(cluster, checkpoint, tmp_path):
    add_node(cluster)
    file = tmp_path / "it.safetensors"
    save_adapter(checkpoint, file, much=0.1)
    options = {"width": 128, "height": 128, "steps": 2, "loras": [(str(file), 0.6)]}
    remote = sana_core.generate(PROMPTS, checkpoint, cluster=cluster.address, **options)
    assert torch.equal(remote, sana_core.generate(PROMPTS, checkpoint, **options))
    assert not torch.equal(remote, sana_core.generate(PROMPTS, checkpoint, **{**options, "loras": []}))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_best_of_n_on_a_cluster_matches_one_machine(cluster, checkpoint, tmp_path):
    for _ in range(2):
        add_node(cluster)
    folder = tmp_path / "clip"
    save_clip(folder)
    how = {"seed": 5, "best": 1, "of": 6, "scorer": folder, "width": 64, "height": 64, "steps": 4}
    local, remote = {}, {}
    expected = sana_core.generate(PROMPTS, checkpoint, report=local, **how)
    cluster_of = ClusterSettings(cluster.address)
    assert torch.equal(sana_core.generate(PROMPTS, checkpoint, cluster=cluster_of, report=remote, **how), expected)
    assert remote == local


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_machine_without_the_checkpoint_is_named(cluster, checkpoint, tmp_path):
    copy = tmp_path / "sana"
    shutil.copytree(checkpoint, copy)
    node = add_node(cluster)
    path = str(copy)
    job = Job(resolve_settings(SETTINGS, path), path, path, path, {path: fingerprint(path)})
    shutil.rmtree(copy)
    with pytest.raises(ClusterError, match=rf"\({node.node_id[:6]}, actor \d+\): .*sana"):
        generate_job(cluster, job)


def generate_job(cluster, job, workload=None, report=None):
    """Generate the images of a job by their numbers, without the checks of this machine."""
    workload = workload or Workload(PROMPTS, batch_images(2, 1, 5))
    report = WorkerReport() if report is None else report
    run = ClusterSettings(cluster.address)
    return dict(
        (image.number, result)
        for image, result in run_alone(run, lambda run: generate_with(run, job, workload, report), no_poll, no_status)
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_machine_without_the_checkpoint_costs_no_picture(cluster, checkpoint, tmp_path, caplog):
    copy = tmp_path / "sana"
    shutil.copytree(checkpoint, copy)
    add_node(cluster)
    late, report, arrived = None, WorkerReport(), []
    workload = Workload(PROMPTS, batch_images(2, 40, 5), 1)
    for picture, _ in generate_on_cluster(
        prepare(workload, copy, SETTINGS), ClusterSettings(cluster.address), report=report
    ):
        arrived.append(picture.number)
        if late is None:
            copy.rename(tmp_path / "gone")
            late = add_node(cluster)
        elif f"({late.node_id[:6]}" not in caplog.text:
            time.sleep(0.5)
    assert re.search(rf"\({late.node_id[:6]}, actor \d+\) cannot work: sana: no such file", caplog.text)
    assert sorted(arrived) == list(range(80)) and not drew(report, late)


CHANGES = {
    "shift": ("scheduler/scheduler_config.json", b'"flow_shift": 3.0', b'"flow_shift": 4.0'),
    "autoencoder_config": ("vae/config.json", b"0.29957", b"0.3"),
    "transformer_weights": ("transformer/diffusion_pytorch_model.safetensors", None, None),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_machine_whose_files_differ_anywhere_is_named_and_draws_nothing(cluster, checkpoint, tmp_path):
    add_node(cluster)
    for name, (file, old, new) in CHANGES.items():
        copy = shutil.copytree(checkpoint, tmp_path / name)
        path, data = str(copy), bytearray((copy / file).read_bytes())
        weights = {path: fingerprint(path)}
        if old is None:
            data[len(data) * 2 // 3] ^= 1
        (copy / file).write_bytes(data if old is None else data.replace(old, new))
        job = Job(resolve_settings(SETTINGS, path), path, path, path, weights)
        with pytest.raises(ClusterError, match=rf"not what the driver has \({name}\); copy the same"):
            generate_job(cluster, job)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_closing_ends_every_actor(cluster, checkpoint):
    for _ in range(2):
        add_node(cluster)
    workload = Workload(PROMPTS, batch_images(2, 1000, 5), 1)
    drawn = generate_on_cluster(prepare(workload, checkpoint, SETTINGS), ClusterSettings(cluster.address))
    next(drawn)
    assert actors()
    drawn.close()
    wait_for_no_actors()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_actor_that_hangs_is_noticed_and_replaced(cluster, checkpoint):
    add_node(cluster)
    pictures = batch_images(2, 6, 5)
    report, arrived = WorkerReport(), []
    workload, run = Workload(PROMPTS, pictures, 1), ClusterSettings(cluster.address, grace=3.0)
    for picture, _ in generate_on_cluster(prepare(workload, checkpoint, SETTINGS), run, report=report):
        arrived.append(picture.number)
        if len(arrived) == 2:
            send_to_an_actor(signal.SIGSTOP)
    assert sorted(arrived) == list(range(12))
    assert [name.split()[-1] for name in report.finished] == ["1)", "2)"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_consumer_that_stalls_loses_no_actor(cluster, checkpoint, monkeypatch):
    """Every look finds images, and sends pings that nobody reads before the next stall."""
    monkeypatch.setattr(sana_core.cluster.fleet, "ACTOR_TIMEOUT", 2.0)
    monkeypatch.setattr(sana_core.cluster.fleet, "HEALTH_CHECK_INTERVAL", 0.0)
    for _ in range(2):
        add_node(cluster)
    report, arrived = WorkerReport(), []
    workload, run = Workload(PROMPTS, batch_images(2, 20, 5), 1), ClusterSettings(cluster.address)
    for image, _ in generate_on_cluster(prepare(workload, checkpoint, SETTINGS), run, report=report):
        arrived.append(image.number)
        if len(arrived) in (5, 10, 15):
            time.sleep(4)
    assert sorted(arrived) == list(range(40))
    assert sorted(name.split()[-1] for name in report.machines) == ["1)", "2)"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_driver_that_is_stopped_for_a_while_loses_no_actor(cluster, checkpoint, tmp_path):
    for _ in range(2):
        add_node(cluster)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, "--width", 128, "--height", 128]
    words += ["--steps", 20, "--chunk", 1, "--count", 20, "--cluster", cluster.address, "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "sana_core", *map(str, words), "--report"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(list((tmp_path / "out").glob("*.png"))) < 3:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    time.sleep(ACTOR_TIMEOUT + 10)
    process.send_signal(signal.SIGCONT)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0 and len(list((tmp_path / "out").glob("*.png"))) == 40
    assert "lost" not in said and set(re.findall(r"actor (\d+)\): ", said)) == {"1", "2"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("decoded", [True, False])
def test_an_image_with_nan_fails_alone(cluster, checkpoint, decoded):
    """One of the encoded prompts has NaN. Its images are in chunks with the images of other prompts."""
    add_node(cluster)
    encoder = load_encoder(checkpoint, torch.device("cpu"), SETTINGS.dtype)
    texts, negative = encode_texts(encoder, ["a cat", *PROMPTS], "")
    encoded = dict(enumerate(texts.values()))
    encoded[1] = encoded[1][0] * float("nan"), encoded[1][1]
    workload = Workload(range(3), batch_images(3, 2, 5), 3, encoded=(encoded, negative))
    job = make_job(prepare(Workload(PROMPTS, []), checkpoint, SETTINGS))._replace(encoder=None, latents=True)
    if not decoded:
        job = job._replace(autoencoder=None)
    report = WorkerReport()
    results = generate_job(cluster, job, workload, report)
    failed = {number for number, result in results.items() if isinstance(result, FailedImage)}
    assert failed == {2, 3} and "samples: " in results[2].reason
    assert all((results[number][1] is not None) == decoded for number in (0, 1, 4, 5))
    assert sum(report.finished.values()) == 4 and len(report.machines) == 1 and not report.refused


@pytest.mark.timeout(300)
def test_the_command_writes_the_same_files_with_a_cluster_as_without(cluster, checkpoint, tmp_path, capsys):
    add_node(cluster)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    command = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, "--width", 128, "--height", 128]
    command += ["--steps", 4, "--chunk", 2, "--count", 2, "--report"]
    for name, more in (("here", []), ("there", ["--cluster", cluster.address])):
        assert main([str(word) for word in (*command, "--out", tmp_path / name, *more)]) == 0, capsys.readouterr().err
    assert re.search(r"actor 1\): 4", capsys.readouterr().out)
    local, remote = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert local == remote and len(local) == 5


@pytest.fixture
def command(cluster, checkpoint, tmp_path):
    """A function of more options: the arguments of a run that writes four pictures into a folder of all machines."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))

    def build(*more, steps=4):
        words = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, "--width", 128, "--height", 128]
        words += ["--steps", steps, "--chunk", 1, "--count", 4, "--cluster", cluster.address, "--out", tmp_path / "out"]
        return [str(word) for word in (*words, "--report", *more)]

    return build


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_write_into_a_shared_folder_and_a_second_run_goes_on(cluster, command, tmp_path, capsys):
    add_node(cluster)
    assert main(command("--out-shared")) == 0, capsys.readouterr().err
    out, local = tmp_path / "out", {}
    for path in out.iterdir():
        local[path.name] = path.read_bytes()
    assert len(local) == 9
    (out / "00001_2.png").unlink()
    assert main(command("--out-shared")) == 0
    assert "7 of 8 images exist" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == local
    # The files equal the files that the driver would have written.
    assert main(command("--out", str(tmp_path / "there"))) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == local


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_after_the_driver_was_killed_the_same_command_draws_the_rest(cluster, command, tmp_path, capsys):
    add_node(cluster)
    out, environment = tmp_path / "out", {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "sana_core", *command("--out-shared", steps=20)], env=environment)
    while len(list(out.glob("*.png"))) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    # the cluster ends the actors of a driver that has gone
    wait_for_no_actors()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.png")}
    assert main(command("--out-shared", steps=20)) == 0
    assert f"{len(before)} of 8 images exist" in capsys.readouterr().out
    assert len(list(out.iterdir())) == 9
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.fixture
def shared_run(cluster, checkpoint, tmp_path):
    """A function that draws pictures into a folder of all machines, and the run that holds the folder."""
    described = describe_settings(resolve_settings(SETTINGS, checkpoint), inspect_checkpoint(checkpoint))

    def draw(count, report):
        workload, run = Workload(PROMPTS, batch_images(2, count, 5), 1), ClusterSettings(cluster.address)
        return generate_on_cluster(prepare(workload, checkpoint, SETTINGS), run, described, report, held)

    with hold(tmp_path / "out") as held:
        yield draw, held


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_without_the_shared_folder_is_left_out_and_named(cluster, shared_run, caplog):
    add_node(cluster)
    draw, held = shared_run
    out = held.folder
    late, report, arrived = None, WorkerReport(), {}
    for picture, digest in draw(40, report):
        arrived[picture.number] = digest
        if late is None:
            # Without the mark, the machine seems to have another folder at this path.
            (held.run / "mark").unlink()
            late = add_node(cluster)
        elif f"({late.node_id[:6]}" not in caplog.text:
            time.sleep(0.5)
    assert re.search(rf"\({late.node_id[:6]}, actor \d+\) cannot work: out: {out} is not the driver's", caplog.text)
    assert sorted(arrived) == list(range(80)) and not drew(report, late)
    assert {hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.png")} == set(arrived.values())


@pytest.mark.timeout(300)
def test_a_shared_folder_that_goes_away_ends_the_run_with_the_machines_name(cluster, shared_run, tmp_path):
    node = add_node(cluster)
    draw, held = shared_run
    out = held.folder
    pictures = draw(40, WorkerReport())
    next(pictures)
    out.rename(tmp_path / "gone")
    with pytest.raises(
        ClusterError, match=rf"\({node.node_id[:6]}, actor 1\): out: cannot write into {out} \(No such file"
    ):
        list(pictures)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_address_where_nobody_answers_is_named(checkpoint):
    workload = Workload(PROMPTS, batch_images(2, 1, 5))
    drawn = generate_on_cluster(prepare(workload, checkpoint, SETTINGS), ClusterSettings("127.0.0.1:1"))
    with pytest.raises(ConnectionError, match="cluster: nobody answers at 127.0.0.1:1 "):
        next(drawn)
