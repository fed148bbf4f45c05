"""What unit tests share."""

import shutil

import pytest

from sana_core import load_autoencoder


@pytest.fixture(scope="module")
def bundled(checkpoint):
    return load_autoencoder(checkpoint)


@pytest.fixture
def copy(checkpoint, tmp_path):
    """The bundled checkpoint's folder, to be changed."""
    return shutil.copytree(checkpoint, tmp_path / "model")
