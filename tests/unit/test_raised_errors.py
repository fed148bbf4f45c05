"""An error that a thread passes on keeps no model alive: its frames are freed by reference counting."""

import weakref
from contextlib import closing

import pytest
import torch

from sana_core.batch.local import LocalPool
from sana_core.batch.loop import run_batch
from sana_core.batch.plan import ImageSpec
from sana_core.batch.queue import Queue
from sana_core.split.devices import Split

CPU = torch.device("cpu")


class Model:
    """Something that the frames of the failed call refer to."""


def split_fails(error):
    def work(shard):
        raise error("injected")

    Split([CPU, CPU]).run(torch.zeros(2, 32, 8, 8), work)


def chunk_fails(error):
    def prepare(device, poll):
        def generate(chunk):
            raise error("injected")

        return generate

    with closing(LocalPool([CPU], prepare)) as pool:
        list(run_batch(Queue([(ImageSpec(0, 0, 0),)]), pool))


@pytest.mark.parametrize(
    "fails, error",
    [(split_fails, ValueError), (split_fails, torch.OutOfMemoryError), (chunk_fails, ValueError)],
)
@pytest.mark.usefixtures("no_collector")
def test_a_failed_call_is_freed_with_its_error(fails, error):
    def call():
        model = Model()
        try:
            fails(error)
        except error:
            return weakref.ref(model)

    assert call()() is None
