"""SANA Batch Sampler on the Ray cluster that the server's operator has configured.

A machine of the cluster loads the file that MODEL came from, and receives encoded prompts and the weights that LoRAs
have changed. Workers stay for the next run, if it has the same MODEL.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import comfy.model_management
import torch
from server import PromptServer

from ....sana_core.batch.plan import FailedImage, Generated, ImageSpec, Progress, WorkerReport, Workload
from ....sana_core.checkpoints import inspect_checkpoint
from ....sana_core.checkpoints.fingerprint import fingerprint
from ....sana_core.cluster.batch import generate_with
from ....sana_core.cluster.connection import ClusterSettings
from ....sana_core.cluster.session import ClusterRun, Session
from ....sana_core.errors import InputError
from ..folders import configured_cluster
from ..report import Notes, progress_under_running_node, status_under_running_node
from .job import CLUSTER, changed_weights, describe_job, encode_batch_hints
from .results import Results, Row

if TYPE_CHECKING:
    from .job import BatchInputs

# The attribute of the PromptServer that has the session.
SESSION = "sana_cluster_session"


def require_cluster() -> ClusterSettings:
    """Return the configured cluster."""
    cluster = configured_cluster()
    if cluster is None:
        raise InputError("devices: this server has no cluster; its operator can add one, see docs/cluster.md")
    return cluster


def session_on(cluster: ClusterSettings) -> Session:
    """Return the session on `cluster`. It is an attribute of the server, because it outlives graphs."""
    server = PromptServer.instance
    session: Session | None = getattr(server, SESSION, None)
    if session is not None and session.cluster != cluster:
        session.leave()
        session = None
    if session is None or session.lost:
        session = Session(cluster)
        setattr(server, SESSION, session)
    return session


def sample_on_cluster(batch: BatchInputs, notes: Notes) -> tuple[dict[ImageSpec, Row], Counter[str]]:
    """Return the rows of the images, and the number of images of each machine. Adds lines for the user to `notes`."""
    cluster, poll = require_cluster(), comfy.model_management.throw_exception_if_processing_interrupted
    job, encoded = describe_job(batch, encode_batch_hints(batch), CLUSTER)
    files = filter(None, (job.transformer, job.autoencoder, *(control.path for control in job.controls)))
    # The first time, this reads the whole files.
    weights = {path: fingerprint(inspect_checkpoint(path), lambda *progress: poll()) for path in files}
    job = job._replace(weights=weights, previews=False)
    workload = Workload(range(batch.prompts), batch.images, batch.chunk or None, encoded=encoded)
    results, report, session = Results(batch, len(batch.images)), WorkerReport(), session_on(cluster)
    progress, show = Progress(len(batch.images)), progress_under_running_node()
    settings = job.settings
    models = (job.transformer, job.autoencoder, repr(weights), job.resolution, settings.dtype, settings.reference)
    key = (*models, batch.model.patches_uuid)

    def changed() -> dict[str, torch.Tensor]:
        # The workers end when MODEL is freed.
        weakref.finalize(batch.model.model, session.forget, key)
        return dict(changed_weights(batch.model))

    def work(run: ClusterRun) -> Generator[Generated, None, None]:
        return generate_with(run, job, workload, report)

    with closing(session.run(key, changed, work, poll, status_under_running_node())) as generated:
        for image, content in generated:
            results.add(image, content)
            latent = None if isinstance(content, FailedImage) else torch.from_numpy(content[0].copy())[None]
            results.advance(1, None if latent is None else results.preview(latent))
            progress.step()
            show(progress.describe(len(report.ready)))
    machines: Counter[str] = Counter()
    for worker, number in report.finished.items():
        machines[report.machines[worker]] += number
    return results.finish(notes), machines
