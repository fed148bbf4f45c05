"""What tests of the decode share."""

import pytest

from sana_core import load_autoencoder


@pytest.fixture(scope="module")
def bundled(checkpoint):
    return load_autoencoder(checkpoint)
