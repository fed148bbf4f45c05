"""What an actor does on a pretended GPU that fails. The actor runs in this process, without Ray's scheduling."""

import sys

import numpy as np
import pytest
import torch
from pretend_card import NAN, pretend_cards

from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.batch.plan import batch_images
from sana_core.checkpoints.fingerprint import fingerprint
from sana_core.cluster.actor import Actor, from_bytes, to_bytes
from sana_core.engine.body import Job, describe_failure
from sana_core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = SamplingSettings(64, 64, 2)
CHUNK = [tuple(image) for image in batch_images(1, 3, 5)]
PROMPTS = ["a red circle"] * 3


def test_a_message_arrives_with_its_values():
    values = {
        "none": None,
        ("a prompt", 3): (1, -1.5, 2**64 - 1, float("inf"), True),
        "array": (b"\xff\x00", "half a surrogate \ud83d", {None: (), 3: "three"}),
    }
    assert from_bytes(to_bytes(values)) == values
    # A named tuple arrives as the tuple that it is.
    assert from_bytes(to_bytes(batch_images(1, 1, 5))) == (tuple(batch_images(1, 1, 5)[0]),)
    arrays = [np.arange(6, dtype="<f4").reshape(2, 3).T, np.zeros((2, 0), "u1"), np.array(3, dtype="i8")]
    for sent, arrived in zip(arrays, from_bytes(to_bytes(arrays)), strict=True):
        assert arrived.dtype == sent.dtype and arrived.shape == sent.shape and (arrived == sent).all()
        assert arrived.flags.writeable
    for value in (torch.zeros(1), object(), ValueError("no")):
        with pytest.raises(AttributeError):
            to_bytes((1, value))


def call(actor, name, *arguments):
    """Return the events of a call."""
    return list(from_bytes(actor.call(name, 1, 1, to_bytes(arguments))))


def kinds(events):
    return [event[0] for event in events]


@pytest.fixture
def start(checkpoint):
    """A function that returns a new actor with loaded models, and the embeddings of the prompts."""
    path = str(checkpoint)
    job = Job(resolve_settings(SETTINGS, path), path, path, path, {path: fingerprint(path)}, fixed_chunk=True)

    def build():
        actor = Actor()
        actor.open(1)
        assert kinds(call(actor, "begin", job.pack())) == ["done"]
        encoded = [event for event in call(actor, "encode", (None, PROMPTS[0])) if event[0] == "text"]
        assert kinds(call(actor, "load")) == ["done"]
        return actor, {prompt: text for _, prompt, text in encoded}

    return build


def images_of(events):
    return [event[2] for event in events if event[0] == "image"]


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
def test_a_failure_of_the_gpu_is_reported_by_its_kind(start, failure, kind):
    with pretend_cards() as cards:
        actor, texts = start()
        cards.fail("cuda", failure, at=200)
        events = call(actor, "generate", CHUNK, PROMPTS, texts, {})
        ((task, reported, reason, _),) = [values for name, *values in events if name == "failed"]
        assert (task, reported) == (1, kind) and "\n" not in reason
        if kind == "memory":
            again = call(actor, "generate", CHUNK, PROMPTS, texts, {})
            assert kinds(again) == ["image"] * 3 + ["done"]


def test_a_chunk_with_nan_is_a_value(start):
    with pretend_cards() as cards:
        actor, texts = start()
        good = images_of(call(actor, "generate", CHUNK, PROMPTS, texts, {}))
        # The call is one of the transformer's.
        cards.fail("cuda", NAN, at=200)
        broken = images_of(call(actor, "generate", CHUNK, PROMPTS, texts, {}))
        assert len(broken) == 3 and all("NaN" in image["failed"] for image in broken)
        again = images_of(call(actor, "generate", CHUNK, PROMPTS, texts, {}))
    assert all(np.array_equal(one, other) for one, other in zip(good, again, strict=True))


def test_a_cancelled_run_ends_its_tasks_and_no_later_ones(start):
    with pretend_cards():
        actor, texts = start()
        actor.cancel(1)
        assert call(actor, "generate", CHUNK, PROMPTS, texts, {}) == []
        events = from_bytes(actor.call("generate", 2, 1, to_bytes((CHUNK, PROMPTS, texts, {}))))
        assert kinds(events) == ["image"] * 3 + ["done"]


def test_an_actor_answers_what_it_does_in_the_meantime(start, monkeypatch):
    """The driver asks in another thread, while the actor loads."""
    with pretend_cards():
        actor, _ = start()
        answers = []
        monkeypatch.setattr("sana_core.engine.body.load_models", lambda *arguments: answers.append(actor.answer()))
        call(actor, "release")
        call(actor, "load")
    assert answers == [(1, 1, "loading")]


def test_an_actor_uses_its_share_of_the_cores(start):
    before = torch.get_num_threads()
    try:
        actor = Actor()
        actor.open(3)
        call(actor, "begin", {})
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_actor_without_a_library_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "sana_core.engine.body", None)
    ((name, task, kind, reason, _),) = call(Actor(), "begin", {})
    assert (name, task, kind) == ("failed", 1, "refused") and reason.startswith("ModuleNotFoundError: ")


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
        (RuntimeError("GET was unable to find an engine to execute this computation"), "memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors"), "driver"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"), "driver"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "driver"),
        (OSError("libjpeg.so.62: cannot open shared object file"), "error"),
        (ModuleNotFoundError("No module named 'safetensors'"), "refused"),
        (CheckpointError("sana: not what the driver has"), "refused"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied\nand more"), "error"),
    ],
)
def test_an_actor_reports_the_kind_of_its_failure_on_one_line(error, expected):
    kind, reason, _ = describe_failure(error)
    assert kind == expected and "\n" not in reason and str(error).splitlines()[0] in reason
