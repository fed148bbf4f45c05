"""A picture that the machines of a Ray cluster share, and one of them that dies in its midst."""

import signal
import time

import pytest
import torch
from machines import actors, add_node

import sana_core
from sana_core.batch.pipeline import SamplingSettings
from sana_core.batch.plan import Workload, batch_images
from sana_core.cluster.connection import ClusterSettings, connected
from sana_core.cluster.split import generate_split_on_cluster
from sana_core.errors import InputError

# an actor has one core
pytestmark = pytest.mark.usefixtures("one_thread")


PROMPT = "a red circle on a blue background"


# of which the second picture lasts for seconds, so that a member dies in its midst
STEPS = {"between two pictures": 3, "in the midst of one": 60}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", STEPS)
def test_a_dead_member_s_rows_go_to_the_others(lasting_cluster, checkpoint, caplog, when):
    for _ in range(3):
        add_node(lasting_cluster)
    began: list[float] = []

    def poll():
        if began and time.monotonic() - began[0] > 0.7:
            began.clear()
            actors()[1].send_signal(signal.SIGKILL)

    drawn = generate_split_on_cluster(
        Workload([PROMPT], batch_images(1, 2, 5)),
        checkpoint,
        SamplingSettings(128, 160, steps=STEPS[when]),
        ClusterSettings(lasting_cluster.address),
        poll,
    )
    pictures = [next(drawn)[1]]
    before = {process.pid for process in actors()}
    assert len(before) >= 3
    if when == "in the midst of one":
        began.append(time.monotonic())
    else:
        actors()[1].send_signal(signal.SIGKILL)
    pictures += [pixels for _, pixels in drawn]
    assert len(before & {process.pid for process in actors()}) < len(before)
    expected = sana_core.generate([PROMPT], checkpoint, seed=5, count=2, width=128, height=160, steps=STEPS[when])
    torch.testing.assert_close(torch.stack(pictures), expected, atol=1e-4, rtol=0)
    assert caplog.text.count("cluster: lost ") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_member_that_hangs_is_replaced_where_there_are_but_two_gpus(cluster, checkpoint, caplog):
    for _ in range(2):
        add_node(cluster)
    workload, run = Workload([PROMPT], batch_images(1, 3, 5)), ClusterSettings(cluster.address)
    pictures = []
    for _, pixels in generate_split_on_cluster(workload, checkpoint, SamplingSettings(128, 160, steps=3), run):
        if not pictures:
            actors()[1].send_signal(signal.SIGSTOP)
        pictures.append(pixels)
    expected = sana_core.generate([PROMPT], checkpoint, seed=5, count=3, width=128, height=160, steps=3)
    torch.testing.assert_close(torch.stack(pictures), expected, atol=1e-4, rtol=0)
    assert caplog.text.count("cluster: lost ") == 1 and "it has not answered for" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpus_of_others_are_not_waited_for(cluster, checkpoint):
    class Other:
        """Somebody else's actor, of a class that the machines need no module for."""

    for _ in range(3):
        add_node(cluster)
    with connected(cluster.address) as ray:
        other = ray.remote(num_gpus=1)(Other).remote()
        ray.get(other.__ray_ready__.remote())
        began = time.monotonic()
        workload, settings = Workload([PROMPT], batch_images(1, 1, 5)), SamplingSettings(128, 160, steps=2)
        ((_, pixels),) = generate_split_on_cluster(workload, checkpoint, settings, ClusterSettings(cluster.address))
        assert time.monotonic() - began < 120
    expected = sana_core.generate([PROMPT], checkpoint, seed=5, width=128, height=160, steps=2)
    torch.testing.assert_close(pixels[None], expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_cluster_of_one_gpu_shares_no_picture(cluster, checkpoint):
    add_node(cluster)
    with pytest.raises(InputError, match="cluster: got 1 GPUs to share an image, expected two or more"):
        sana_core.generate([PROMPT], checkpoint, width=128, height=128, cluster=cluster.address, split=True)
