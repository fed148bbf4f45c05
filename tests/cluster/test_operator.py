"""What an operator reads of a run in Ray's own tools, and when actors that nobody wants any more end."""

import pytest
from machines import actors, add_node, wait_for_no_actors

from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import WorkerReport, Workload, batch_images
from sana_core.cluster.batch import generate_on_cluster, generate_with, make_job
from sana_core.cluster.connection import ClusterSettings
from sana_core.cluster.session import Session

pytestmark = pytest.mark.timeout(300)

SETTINGS = SamplingSettings(64, 64, 2)


@pytest.mark.slow
def test_ray_lists_the_job_by_its_name(cluster, checkpoint):
    from ray._private.worker import global_worker

    add_node(cluster)
    workload = Workload(["a red circle"], batch_images(1, 4, 5), 1)
    drawn = generate_on_cluster(prepare(workload, checkpoint, SETTINGS), ClusterSettings(cluster.address))
    next(drawn)
    jobs = global_worker.gcs_client.get_all_job_info().values()
    assert [job.config.metadata["job_name"] for job in jobs] == ["sana"]
    drawn.close()


@pytest.mark.slow
def test_workers_that_nobody_wants_for_long_end(cluster, checkpoint):
    add_node(cluster)
    workload = Workload(["a red circle"], batch_images(1, 2, 5), 1)
    job = make_job(prepare(workload, checkpoint, SETTINGS))
    session = Session(ClusterSettings(cluster.client_address), idle=5.0)
    for seed in range(2):
        before = {process.pid for process in actors()}
        assert (
            len(list(session.run("the same", dict, lambda run: generate_with(run, job, workload, WorkerReport())))) == 2
        )
        # The actors of the first run also generate in the second.
        assert not seed or {process.pid for process in actors()} == before
    assert actors()
    wait_for_no_actors()
