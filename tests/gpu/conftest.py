"""What runs on the accelerator, if there is one: `make gpu`. On a CPU or a small card with small models."""

import sys
from pathlib import Path

import pytest
import torch

from sana_core.runtime.accelerator import current_accelerator, memory_info

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))

# bytes of a card from which on its models have the widths of released ones
LARGE = 8e9


@pytest.fixture(scope="session")
def device():
    return current_accelerator() or torch.device("cpu")


@pytest.fixture(scope="session")
def small(device):
    """Whether models have fewer channels than released ones."""
    return device.type == "cpu" or memory_info(device)[1] < LARGE


@pytest.fixture(scope="session")
def devices(device):
    """Two different accelerators. Without them the test is skipped, because one accelerator twice proves nothing."""
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    if count < 2:
        pytest.skip(f"needs two accelerators, and this machine has {count}")
    return [torch.device(device.type, index) for index in range(2)]


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def exact_products():
    """float32 as float32, for TF32 would be the largest difference of all; and no gradients."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        yield
    torch.backends.cudnn.allow_tf32 = before
