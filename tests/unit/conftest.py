"""What tests of the decode share."""

import pytest
import torch

from sana_core import load_autoencoder


@pytest.fixture(scope="module")
def one_thread():
    """Kernels of several threads divide sums by the size of their input."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bundled(checkpoint):
    return load_autoencoder(checkpoint)
