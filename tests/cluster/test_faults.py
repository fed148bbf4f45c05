"""Faults at random moments of a batch: nothing is lost, doubled, or another picture than this machine draws alone."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
import yaml
from host import free_port
from machines import actors, add_node
from setup import ROOT

import sana_core
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import Workload, batch_images
from sana_core.cluster.batch import generate_on_cluster
from sana_core.cluster.connection import ClusterSettings

# an actor has one core
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SIZE = {"width": 64, "height": 64, "steps": 2}
COUNT = 30
MACHINES = 3


@pytest.fixture(scope="module")
def expected(checkpoint):
    return sana_core.generate(PROMPTS, checkpoint, seed=5, count=COUNT, chunk=2, **SIZE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_faults_at_random_moments_cost_no_picture(lasting_cluster, checkpoint, expected, seed):
    """A killed actor, one that hangs, a machine that dies and one that joins, each after some number of pictures."""
    nodes = [node for node in lasting_cluster.worker_nodes if node.any_processes_alive()]
    nodes += [add_node(lasting_cluster) for _ in range(MACHINES - len(nodes))]
    faults = [
        lambda: send_to_any(signal.SIGKILL),
        lambda: send_to_any(signal.SIGSTOP),
        lambda: lasting_cluster.remove_node(nodes[0], allow_graceful=False),
        lambda: add_node(lasting_cluster),
    ]
    chance = random.Random(seed)
    moments = dict(zip(chance.sample(range(1, 2 * COUNT - 10), len(faults)), faults, strict=True))
    stopped, arrived = [], {}

    def send_to_any(number):
        alive = [process for process in actors() if process.pid not in stopped]
        if alive:
            process = chance.choice(alive)
            process.send_signal(number)
            stopped.append(process.pid)

    workload = Workload(PROMPTS, batch_images(2, COUNT, 5), 2)
    run = ClusterSettings(lasting_cluster.address, grace=5.0)
    for picture, pixels in generate_on_cluster(prepare(workload, checkpoint, SamplingSettings(64, 64, 2)), run):
        assert picture.number not in arrived
        arrived[picture.number] = pixels
        if len(arrived) in moments:
            moments[len(arrived)]()
    assert sorted(arrived) == list(range(2 * COUNT))
    assert torch.equal(torch.stack([arrived[number] for number in range(2 * COUNT)]), expected)


@pytest.fixture
def words(checkpoint, tmp_path):
    """A function of a cluster and a folder: the words of the command that draws there."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    size = [word for key, value in SIZE.items() for word in (f"--{key}", value)]
    arguments = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, *size, "--count", COUNT, "--chunk", 2]

    def build(address, out):
        return [
            str(word) for word in (*arguments, *(["--cluster", address] if address else []), "--out", tmp_path / out)
        ]

    return build


def start(words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sana_core", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def end_after(process, folder, count, number):
    """Send a signal to the driver once `count` images exist."""
    while len(list(folder.glob("*.png"))) < count:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate(timeout=120)[0]
    assert process.returncode in (-signal.SIGKILL, 128 + number)
    return said


@pytest.mark.timeout(600)
def test_a_driver_killed_at_random_moments_draws_each_picture_once(cluster, words, tmp_path):
    add_node(cluster)
    out, chance = tmp_path / "out", random.Random(7)
    assert main(words(None, "here")) == 0
    saved = {}
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        said = end_after(start(words(cluster.address, "out")), out, len(saved) + chance.randint(1, 10), number)
        assert "Traceback" not in said and "SIGTERM received" not in said
        if number == signal.SIGINT:
            assert "stopped; all files that were listed are complete" in said and "connecting to the cluster" in said
        times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.png")}
        assert saved.items() <= times.items()
        saved = times
    assert main(words(cluster.address, "out")) == 0
    assert saved.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("*.png")}.items()
    assert files(out) == files(tmp_path / "here") and len(files(out)) == 2 * COUNT


@pytest.mark.timeout(400)
def test_a_head_that_dies_ends_a_command_of_ray_client_within_a_minute(cluster, words, tmp_path):
    add_node(cluster)
    # Long enough that the batch is not finished when the head dies.
    out, process = tmp_path / "out", start([*words(cluster.client_address, "out"), "--steps", "100"])
    while len(list(out.glob("*.png"))) < 3:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    for kind in ("gcs_server", "raylet"):
        os.kill(cluster.head_node.all_processes[kind][0].process.pid, signal.SIGKILL)
    killed = time.monotonic()
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 1 and time.monotonic() - killed < 60
    assert "cluster: lost the head at ray://127.0.0.1:" in said and "Traceback" not in said
    assert re.search(r"at least \d+ of 60 images exist; run the same command for the rest", said)


@pytest.mark.timeout(400)
def test_two_drivers_share_a_cluster_and_no_folder(cluster, words, tmp_path):
    add_node(cluster)
    first = start(words(cluster.address, "out"))
    while not (tmp_path / "out" / ".sana-batch").exists():
        assert first.poll() is None
        time.sleep(0.01)
    refused = start(words(cluster.address, "out"))
    other = start(words(cluster.address, "other"))
    assert "another run" in refused.communicate(timeout=300)[0] and refused.returncode == 1
    for process in (first, other):
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
    assert files(tmp_path / "out") == files(tmp_path / "other") and len(files(tmp_path / "out")) == 2 * COUNT


@pytest.mark.timeout(400)
def test_a_full_shared_disk_ends_the_run_with_a_hint_and_costs_no_picture(words, tmp_path):
    """In a process of its own, whose disk is one in memory that nobody else sees; the cluster is its child."""
    assert main(words(None, "here")) == 0
    command = words("HERE", "out") + ["--out-shared"]
    code = (
        f"import sys; sys.path += {[*sys.path, str(Path(__file__).parent)]}; import full_disk; full_disk.run({command})"
    )
    completed = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", code], capture_output=True, text=True
    )
    if "unshare" in completed.stderr.partition("\n")[0]:
        pytest.skip("no mounts of one's own here")
    assert completed.returncode == 0, completed.stderr[-3000:]
    full, remaining, drawn = completed.stdout.split("=====\n")
    assert re.search(
        r"out: cannot write into .*/out \(No space left on device\); (see its rights and its|check its .* and) disk$",
        full.strip(),
    )
    (number,) = re.findall(r"^at least (\d+) of 60 images exist; run the same command for the rest$", full, re.M)
    (matches,) = re.findall(r"^(\d+) of 60 images exist$", remaining, re.M)
    assert 0 < int(number) <= int(matches) < 60
    local = {name: hashlib.sha256(content).hexdigest() for name, content in files(tmp_path / "here").items()}
    assert json.loads(drawn) == local


@pytest.fixture
def growing_cluster(tmp_path):
    """The address of a cluster without machines that draw; its autoscaler, Ray's fake one, starts them on this one."""
    # The content of python/ray/autoscaler/_private/fake_multi_node/example.yaml, which Ray's wheel lacks.
    gpu = {"resources": {"CPU": 1, "GPU": 1, "object_store_memory": 80_000_000}, "node_config": {}, "max_workers": 1}
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    provider = {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True}
    config = {"cluster_name": "fake_multinode", "max_workers": 1, "head_node_type": "ray.head.default", "auth": {}}
    port = free_port()
    provider["gcs_address"] = f"{ray.util.get_node_ip_address()}:{port}"
    config["provider"] = {**provider, "disable_launch_config_check": True}
    config |= {"upscaling_speed": 1.0, "idle_timeout_minutes": 5, "docker": {}, "file_mounts": {}}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    config |= {f"{name}_commands": [] for name in commands} | {"cluster_synced_files": []}
    config["file_mounts_sync_continuously"] = False
    config["available_node_types"] = {"gpu": {**gpu, "min_workers": 0}, "ray.head.default": head}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=0", "--include-dashboard=false", f"--autoscaling-config={tmp_path / 'config.yaml'}"]
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    yield f"127.0.0.1:{port}"
    ray.shutdown()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.timeout(200)
def test_a_waiting_run_makes_the_autoscaler_start_a_machine(growing_cluster, checkpoint, expected):
    said, arrived = [], {}
    workload = Workload(PROMPTS, batch_images(2, COUNT, 5), 2)
    run = ClusterSettings(growing_cluster)
    deadline = time.monotonic() + 60
    while True:
        try:
            for picture, pixels in generate_on_cluster(
                prepare(workload, checkpoint, SamplingSettings(64, 64, 2)), run, on_status=said.append
            ):
                arrived[picture.number] = pixels
            break
        except ConnectionError:
            # it is starting itself
            assert not arrived and time.monotonic() < deadline
    assert torch.equal(torch.stack([arrived[number] for number in range(2 * COUNT)]), expected)
    assert any("no GPU among the cluster's 1 machine" in text for text in said)
