"""What a run takes of a cluster's machines, where its actors are, and machines that cannot draw."""

import re
import shutil
import time
from contextlib import closing
from pathlib import Path

import pytest
import ray
from machines import actors, add_node

import sana_core
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import WorkerReport, Workload, batch_images
from sana_core.cluster.batch import generate_on_cluster
from sana_core.cluster.connection import ACTOR_IDLE_TIMEOUT, HEALTH_CHECK_INTERVAL, ClusterSettings

# an actor has one core
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(400)]

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
OPTIONS = {"width": 64, "height": 64, "steps": 2, "count": 6, "chunk": 1}


@pytest.fixture
def drawing(cluster, checkpoint):
    """A function (**share) that returns the images of a long run as they arrive."""

    def build(**share):
        workload = Workload(PROMPTS, batch_images(2, 1000, 5), 1)
        settings = ClusterSettings(cluster.address, **share)
        return generate_on_cluster(prepare(workload, checkpoint, SamplingSettings(64, 64, 2)), settings)

    return build


def wait_for_two_checks():
    time.sleep(2.5 * HEALTH_CHECK_INTERVAL)


@pytest.mark.slow
def test_a_run_takes_no_more_gpus_than_it_may(cluster, drawing):
    cluster.add_node(num_cpus=1, num_gpus=3)
    with closing(drawing(gpus=2)) as images:
        next(images)
        for _ in range(2):
            wait_for_two_checks()
            next(images)
        # Neither does it request more.
        assert ray.available_resources()["GPU"] == 1 and len(actors()) == 2


@pytest.mark.slow
def test_two_processes_share_a_gpu(cluster, drawing):
    cluster.add_node(num_cpus=1, num_gpus=1)
    with closing(drawing(gpus_per_worker=0.5)) as images:
        next(images)
        wait_for_two_checks()
        next(images)
        assert "GPU" not in ray.available_resources() and len(actors()) >= 2


@pytest.mark.slow
def test_only_machines_with_a_custom_resource_are_used(cluster, checkpoint):
    add_node(cluster)
    big = cluster.add_node(num_cpus=1, num_gpus=1, resources={"big": 1})
    request = prepare(Workload(PROMPTS, batch_images(2, 6, 5), 1), checkpoint, SamplingSettings(64, 64, 2))
    settings, report = ClusterSettings(cluster.address, resources=(("big", 0.001),)), WorkerReport()
    assert len(list(generate_on_cluster(request, settings, report=report))) == 12
    assert all(f"({big.node_id[:6]})" in machine for machine in report.machines.values())


def test_a_run_waits_longer_than_the_workers_of_another_stay_idle():
    assert ClusterSettings().wait > ACTOR_IDLE_TIMEOUT


@pytest.mark.slow
def test_a_machine_that_cannot_set_up_the_environment_costs_no_picture(cluster, checkpoint, caplog):
    add_node(cluster)
    broken = cluster.add_node(num_cpus=1, num_gpus=1, runtime_env_dir_name="broken")
    folder = Path(broken.get_session_dir_path()) / "broken" / "working_dir_files"
    while not folder.exists():
        time.sleep(0.1)
    # A file in place of the folder makes every write fail, like a full disk.
    shutil.rmtree(folder)
    folder.touch()
    drawn = sana_core.generate(PROMPTS, checkpoint, cluster=cluster.address, **OPTIONS)
    assert drawn.equal(sana_core.generate(PROMPTS, checkpoint, **OPTIONS))
    assert re.search(rf"\({broken.node_id[:6]}\): its processes end before they are ready \(.*broken", caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("error, count", [("OSError", 40), ("RuntimeError", 400)])
def test_a_machine_that_fails_in_some_other_way_costs_no_picture(
    cluster, checkpoint, tmp_path, capsys, caplog, error, count
):
    """An error that may be the GPU's is repeated by another actor before the machine is left out."""
    (tmp_path / "PIL.py").write_text(f"raise {error}('libjpeg.so.62: cannot open shared object file')\n")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    add_node(cluster)
    broken = cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    words = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, "--report", "--out", tmp_path / "out"]
    words += [word for name, value in {**OPTIONS, "count": count}.items() for word in (f"--{name}", value)]
    assert main([str(word) for word in (*words, "--cluster", cluster.address)]) == 0
    assert len(list((tmp_path / "out").glob("*.png"))) == 2 * count
    assert re.search(rf"\({broken.node_id[:6]}, actor \d+\) cannot work: .*libjpeg.so.62", caplog.text)
    assert re.search(rf"left out: .*\({broken.node_id[:6]}, actor \d+\): .*libjpeg.so.62", capsys.readouterr().out)


@pytest.mark.slow
def test_generate_says_what_it_waits_for_and_what_machines_warn_of(cluster, checkpoint, tmp_path, capsys, caplog):
    node = add_node(cluster)
    words = ["generate", "a very red circle " * 100, "--checkpoint", checkpoint, "--width", 64, "--height", 64]
    words += ["--steps", 1, "--out", tmp_path, "--cluster", cluster.address]
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr().err
    assert "connecting to the cluster" in said and "1 worker starting on 1 machine with 1 GPU" in said
    assert re.search(rf"\({node.node_id[:6]}\): .*tokens were cut", caplog.text)
