"""An error that a thread passes on keeps no model alive: its frames are freed by reference counting."""

import weakref

import pytest
import torch

from sana_core.batch.plan import ImageSpec
from sana_core.engine.local import ThreadWorker
from sana_core.engine.loop import Run
from sana_core.split.generate import Split

CPU = torch.device("cpu")


class Model:
    """Something that the frames of the failed call refer to."""


def split_fails(error):
    def work(shard):
        raise error("injected")

    Split([CPU, CPU]).run(torch.zeros(2, 32, 8, 8), work)


def chunk_fails(error):
    class Body:
        def __init__(self, device, post, poll):
            pass

        def begin(self, job):
            pass

        def load(self):
            raise error("injected")

    chunks = [(ImageSpec(0, 0, 0),)]
    list(Run({}, chunks, [ThreadWorker("cpu", CPU, Body)], [""], {"": None, None: None}).images())


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
