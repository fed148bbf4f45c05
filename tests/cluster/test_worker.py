"""What an actor does on a pretended GPU that fails. The actor runs in this process, without Ray's scheduling."""

import numpy as np
import pytest
import torch
from pretend_card import NAN, pretend_cards
from ray.cloudpickle import dumps, loads

from sana_core import inspect_checkpoint
from sana_core.batch.batch_size import weight_bytes
from sana_core.batch.pipeline import SamplingSettings, load_models, resolve_settings
from sana_core.batch.plan import batch_images
from sana_core.checkpoints.fingerprint import fingerprint
from sana_core.cluster.actor import Actor
from sana_core.cluster.worker import Job

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = SamplingSettings(64, 64, 2)
CHUNK = [tuple(image) for image in batch_images(1, 3, 5)]
PROMPTS = ["a red circle"] * 3


def call(actor, method, *arguments):
    """Return the result, the kind of the failure, and the message."""
    return loads(actor.call(method, dumps(arguments)))[:3]


@pytest.fixture
def job(checkpoint):
    path = str(checkpoint)
    settings = resolve_settings(SETTINGS, path)
    return Job(settings, {path: fingerprint(path)}, path, path, path).pack()


@pytest.mark.parametrize(
    "failure, kind",
    [
        ("memory", "memory"),
        ("cublas memory", "memory"),
        ("cudnn memory", "memory"),
        ("cublas", "driver"),
        ("cudnn", "driver"),
        ("driver", "driver"),
    ],
)
def test_a_failure_of_the_gpu_is_reported_by_its_kind(job, failure, kind):
    with pretend_cards() as cards:
        actor = Actor()
        assert call(actor, "prepare", job, 1, [])[1] == ""
        cards.fail("cuda", failure, at=200)
        result, reported, reason = call(actor, "generate", CHUNK, PROMPTS)
        assert result is None and reported == kind and "\n" not in reason
        if kind == "memory":
            (_, images), reported, _ = call(actor, "generate", CHUNK, PROMPTS)
            assert reported == "" and len(images) == 3


def test_a_chunk_with_nan_is_a_value(job):
    with pretend_cards() as cards:
        actor = Actor()
        call(actor, "prepare", job, 1, [])
        good = call(actor, "generate", CHUNK, PROMPTS)[0][1]
        # The prompts are encoded, so the call is one of the transformer's.
        cards.fail("cuda", NAN, at=200)
        (_, images), kind, _ = call(actor, "generate", CHUNK, PROMPTS)
        assert kind == "" and all("NaN" in image["failed"] for image in images)
        again = call(actor, "generate", CHUNK, PROMPTS)[0][1]
    assert all(np.array_equal(one, other) for one, other in zip(good, again, strict=True))


def test_a_gpu_whose_text_encoder_returns_nan_is_not_ready(job):
    """Its images would all fail, and faster than another GPU can generate them."""
    with pretend_cards() as cards:
        actor = Actor()
        call(actor, "prepare", job, 1, [])
        # The model is loaded, so the call is one of the text encoder's.
        cards.fail("cuda", NAN, at=50)
        _, kind, reason = call(actor, "prepare", job, 1, [])
        assert kind == "error" and "the text encoder returned NaN" in reason
        assert call(actor, "prepare", job, 1, [])[1] == ""


def test_a_gpu_without_memory_for_the_text_encoder_generates(job, checkpoint):
    """The text encoder is then on the CPU."""
    with pretend_cards() as cards:
        models = load_models(
            inspect_checkpoint(checkpoint),
            torch.device("cuda:0"),
            resolve_settings(SETTINGS, checkpoint),
            inspect_checkpoint(checkpoint),
        )
        needed = cards.peak[models.transformer.device]
    encoder = weight_bytes(inspect_checkpoint(checkpoint), torch.float32, ["text_encoder"])
    with pretend_cards(total=needed + encoder // 2) as cards:
        actor = Actor()
        assert call(actor, "prepare", job, 1, [])[1] == ""
        assert {parameter.device.type for parameter in actor.worker.encoder.model.parameters()} == {"cpu"}
        # Sampling needs more than the weights.
        cards.limit("cuda", 10 * needed)
        (_, images), kind, reason = call(actor, "generate", CHUNK[:1], PROMPTS[:1])
    assert kind == "" and len(images) == 1, reason
