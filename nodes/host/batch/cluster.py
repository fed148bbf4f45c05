"""The Ray cluster that the server's operator has configured, and the description of a MODEL for its machines.

A machine of the cluster loads the file that MODEL came from, and receives the weights that LoRAs have changed. Workers
stay for the next run, if it has the same MODEL.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, TypeVar

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from server import PromptServer

from ....sana_core.batch.progress import OnStatus
from ....sana_core.checkpoints import Checkpoint
from ....sana_core.checkpoints.fingerprint import fingerprint
from ....sana_core.cluster.actors import Work
from ....sana_core.cluster.connection import ClusterSettings
from ....sana_core.cluster.session import Session
from ....sana_core.engine.body import Job
from ....sana_core.errors import InputError
from ..compat.internals import loaded_from, path_of
from ..compat.patches import WEIGHTS
from ..folders import configured_cluster

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

T = TypeVar("T")
# The attribute of the PromptServer that has the session.
SESSION = "sana_cluster_session"


def require_cluster() -> ClusterSettings:
    """Return the configured cluster. Raises InputError if there is none, or if its file is broken."""
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


def plain_file(model: ModelPatcher) -> tuple[str, int | None, str]:
    """Return the path of the file or folder that MODEL came from, the resolution and the reference that were chosen.

    Raises InputError if ComfyUI's layers compute with quantised weights, because a cluster cannot do that.
    """
    _, weight_dtype, resolution, reference, _ = loaded_from(model)
    if weight_dtype.endswith("fast") or model.model.model_config.quant_config:
        raise InputError(
            "model: a cluster has no quantised products; choose weight_dtype default or without fast, and quantise off"
        )
    return path_of(model), resolution, reference


def fingerprints(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Mapping[str, object]]:
    """Return the fingerprint of each checkpoint. The first time, this reads the whole files. Polls cancel."""
    poll = comfy.model_management.throw_exception_if_processing_interrupted
    return {path: fingerprint(checkpoint, lambda *progress: poll()) for path, checkpoint in checkpoints.items()}


def run_for(
    model: ModelPatcher,
    session: Session,
    job: Job,
    work: Work[T],
    on_status: OnStatus,
) -> Generator[T, None, None]:
    """Yield the results of `work` from workers that have loaded the models of `job`, with the LoRAs of MODEL.

    The workers end when MODEL is freed. Cancel is polled.
    """
    settings = job.settings
    files = (job.transformer, job.autoencoder, repr(job.weights))
    key = (*files, job.resolution, settings.dtype, settings.reference, model.patches_uuid)

    def changed() -> dict[str, torch.Tensor]:
        weakref.finalize(model.model, session.forget, key)
        return changed_weights(model)

    return session.run(key, changed, work, comfy.model_management.throw_exception_if_processing_interrupted, on_status)


def changed_weights(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """Return the transformer's weights that LoRAs change or that have eight bits, by diffusers' names.

    They have the values and the dtype with which this machine would generate.
    """
    device, model_dtype = model.load_device, model.model.get_dtype_inference()
    changed = {}
    for key, ((weight, convert), *patches) in model.get_key_patches(WEIGHTS).items():
        if patches:
            dtype = comfy.model_management.lora_compute_dtype(device)
            wide = convert(comfy.model_management.cast_to_device(weight, device, dtype, copy=True), inplace=True)
            patched = comfy.lora.calculate_weight(patches, wide, key)
            weight = comfy.float.stochastic_rounding(patched, weight.dtype, seed=comfy.utils.string_to_seed(key))
        elif weight.itemsize > 1:
            continue
        # torch cannot unpickle tensors of eight bits.
        changed[key.removeprefix(WEIGHTS)] = weight.to("cpu", model_dtype)
    return changed
