"""Cancelling in the middle of a library's forward leaves torch as it was."""

import pytest
import torch

from sana_core.runtime.cancellation import Polled


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("calls", range(4))
def test_gradients_are_on_again_wherever_it_is_cancelled(calls):
    remaining = iter(range(calls))

    def poll():
        if next(remaining, None) is None:
            raise Cancelled

    with pytest.raises(Cancelled), Polled(poll):
        for _ in range(4):
            with torch.no_grad():
                torch.ones(1)
    assert torch.is_grad_enabled()
