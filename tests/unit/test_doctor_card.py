"""The doctor on the GPUs of `pretend_card`, which compute: a healthy GPU has no fault, a broken part is named."""

import sys

import pytest
import torch
from pretend_card import pretend_cards
from setup import ROOT

from sana_core.doctor import Report, examine
from sana_core.doctor.machine import describe_devices
from sana_core.kernels import trial

POSTERS = ROOT / "demo" / "sana-posters"
CYANOTYPE = ROOT / "demo" / "sana-posters-cyanotype.safetensors"
CARD = torch.device("cuda", 0)


@pytest.fixture
def no_trials(monkeypatch):
    """Triton launches on none of these; its kernels are tried elsewhere."""
    monkeypatch.setattr(trial, "TRIALS", {})
    trial.refused_kernels.cache_clear()
    yield
    trial.refused_kernels.cache_clear()


@pytest.fixture
def cards(request, no_trials):
    """One GPU, or as many as a test is parametrized with."""
    with pretend_cards(getattr(request, "param", 1)) as cards:
        yield cards


def faults(report):
    return {line.subject: line.got for line in report.faults}


def rights(report):
    return {line.subject for line in report.lines if line.verdict == "right"}


def test_tensors_of_several_devices_raise_and_bytes_are_counted():
    with pretend_cards(2, total=1000) as cards:
        x = torch.ones(10, device="cuda:0")
        assert x.device == CARD and bool((~x.isnan()).all()) and x.cpu().device.type == "cpu"
        for other in (torch.ones(10), x.to("cuda:1")):
            with pytest.raises(RuntimeError, match="same device"):
                x + other
        with pytest.raises(TypeError):
            x.numpy()
        view = x[2:]
        assert cards.alive[CARD] == 40 and torch.equal((view + 1.0).cpu(), torch.full((8,), 2.0))
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(250, device="cuda:0")
        assert cards.alive[CARD] == 40
        del x, view
        assert not cards.alive[CARD]


@pytest.mark.parametrize("cards", [1, 2], indirect=True)
def test_a_working_gpu_has_no_fault_in_any_section(cards):
    report = Report(seconds=5000)
    examine(report, [POSTERS, CYANOTYPE])
    assert not report.faults, report.markdown()
    assert rights(report) >= {"fused kernels, bfloat16", "fused kernels, float16"}
    assert not any(cards.alive.values())


def test_a_gpu_without_triton_says_which_kernels_are_missing_and_why(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("triton", "sana_core.kernels."))]:
        if name != trial.__name__:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    trial.refused_kernels.cache_clear()
    report = Report()
    with pretend_cards():
        describe_devices(report)
    trial.refused_kernels.cache_clear()
    assert faults(report).keys() == {"fused kernels, bfloat16", "fused kernels, float16"}
    for got in faults(report).values():
        assert all(f"not {name} (" in got for name in trial.TRIALS) and "triton" in got
