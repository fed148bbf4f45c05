"""A short run of tests/soak/fail_devices.py: batches on pretended GPUs that fail at random."""

import pytest

from tests.soak.fail_devices import soak


@pytest.mark.usefixtures("one_thread")
def test_random_device_failures_never_lose_repeat_or_swap_images():
    happened = soak(4, 0)
    assert happened["runs"] == 4 and happened["complete"]
