"""Batches on a real Ray cluster, while its machines come and go."""

import re
import shutil
import signal
import time

import pytest
import torch
from machines import add_node, send_to_an_actor

import sana_core
from sana_core.__main__ import main
from sana_core.batch.cluster import connect, draw_on_cluster
from sana_core.batch.draw import Settings, complete
from sana_core.batch.folder import fingerprint
from sana_core.batch.painter import Order
from sana_core.batch.plan import batch_pictures
from sana_core.batch.ray_pool import RayPool

# an actor has one core
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SETTINGS = Settings(128, 128, steps=4)


@pytest.mark.timeout(400)
def test_every_picture_arrives_once_while_machines_die_and_join(cluster, checkpoint):
    nodes = [add_node(cluster) for _ in range(3)]
    expected = sana_core.generate(PROMPTS, checkpoint, seed=5, count=20, width=128, height=128, steps=4, chunk=2)
    pictures = batch_pictures(2, 20, 5)
    report, joined, arrived = {}, None, {}
    drawn = draw_on_cluster(PROMPTS, checkpoint, SETTINGS, pictures, cluster.address, 2, report=report)
    for picture, pixels in drawn:
        assert picture.number not in arrived
        arrived[picture.number] = pixels
        if len(arrived) == 5:
            cluster.remove_node(nodes[0], allow_graceful=False)
        elif len(arrived) == 9:
            send_to_an_actor(signal.SIGKILL)
        elif len(arrived) == 11:
            joined = add_node(cluster)
        deadline = time.monotonic() + 4  # the new machine needs a while to load
        while len(arrived) > 11 and time.monotonic() < deadline and not drew(report, joined):
            time.sleep(0.1)
    assert sorted(arrived) == list(range(40))
    assert torch.equal(torch.stack([arrived[number] for number in range(40)]), expected)
    assert sum(report["drawn"].values()) == 40 and drew(report, joined)


def drew(report, node):
    return any(f"({node.node_id[:6]}" in name for name in report["drawn"])


@pytest.mark.timeout(200)
def test_a_machine_without_the_checkpoint_is_named(cluster, checkpoint, tmp_path):
    copy = tmp_path / "sana"
    shutil.copytree(checkpoint, copy)
    node = add_node(cluster)
    connect(cluster.address)
    path = str(copy)
    pool = RayPool(Order(complete(SETTINGS, path), {path: fingerprint(path)}, path, path, path), PROMPTS, 60)
    shutil.rmtree(copy)
    try:
        with pytest.raises(OSError, match=rf"\({node.node_id[:6]}, actor \d+\): .*sana"):
            while True:
                pool.workers()
                pool.wait()
    finally:
        pool.close()


@pytest.mark.timeout(300)
def test_an_actor_that_hangs_is_noticed_and_replaced(cluster, checkpoint):
    add_node(cluster)
    pictures = batch_pictures(2, 6, 5)
    report, arrived = {}, []
    options = {"chunk": 1, "grace": 3.0, "report": report}
    for picture, _ in draw_on_cluster(PROMPTS, checkpoint, SETTINGS, pictures, cluster.address, **options):
        arrived.append(picture.number)
        if len(arrived) == 2:
            send_to_an_actor(signal.SIGSTOP)
    assert sorted(arrived) == list(range(12))
    assert [name.split()[-1] for name in report["drawn"]] == ["1)", "2)"]


@pytest.mark.timeout(300)
def test_the_command_writes_the_same_files_with_a_cluster_as_without(cluster, checkpoint, tmp_path, capsys):
    add_node(cluster)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    own = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, "--width", 128, "--height", 128]
    own += ["--steps", 4, "--chunk", 2, "--count", 2, "--report"]
    for name, more in (("here", []), ("there", ["--cluster", cluster.address])):
        assert main([str(word) for word in (*own, "--out", tmp_path / name, *more)]) == 0, capsys.readouterr().err
    assert re.search(r"actor 1\): 4", capsys.readouterr().out)
    here, there = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert here == there and len(here) == 5
