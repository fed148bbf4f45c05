"""The fused kernels without a card: their numbers in Triton's interpreter, their machine code for every card."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from setup import ROOT

from benchmarks import kernels
from sana_core.kernels import trial

pytest.importorskip("triton")


# the interpreter takes a second for a program of the depthwise kernel
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chosen", ["bfloat16", pytest.param("not bfloat16", marks=pytest.mark.slow)])
def test_their_numbers_are_as_near_the_truth_as_plain_torch_s(chosen):
    """In a process of their own: Triton decides at import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "tests/unit/kernel_numbers.py", "-x"]
    command += ["-k", chosen]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("card", kernels.CARDS)
def test_each_builds_for_every_card(card):
    for launch in kernels.recorded(2240, torch.bfloat16):
        found = kernels.resources(kernels.build(launch, card))
        # what a block of Turing may have, the least of all
        assert found["shared_bytes"] <= 48 * 1024, (launch.kernel.__name__, found)
        # Turing has no products of bf16
        assert found["spilled_bytes"] == 0 or card == 75, (launch.kernel.__name__, found)


def test_there_are_none_on_a_cpu():
    assert not trial.runs(torch.device("cpu"), torch.float32)


def test_without_triton_there_is_one_line_in_the_log(monkeypatch, caplog):
    trial.runs.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in [name for name in sys.modules if name.startswith("sana_core.kernels.")]:
        if module != trial.__name__:
            monkeypatch.delitem(sys.modules, module)
    with caplog.at_level(logging.WARNING):
        assert not any(trial.runs(torch.device("privateuseone"), torch.bfloat16) for _ in range(3))
    trial.runs.cache_clear()
    assert [record.name for record in caplog.records] == [trial.__name__]
    assert "plain torch" in caplog.text and "triton" in caplog.text


def test_a_kernel_that_does_not_build_is_one_line_in_the_log(monkeypatch, caplog):
    def fail(device, dtype):
        raise RuntimeError("ptxas: no\nsecond line")

    trial.runs.cache_clear()
    monkeypatch.setattr(trial, "try_all", fail)
    assert not trial.runs(torch.device("privateuseone"), torch.float16)
    trial.runs.cache_clear()
    assert "RuntimeError: ptxas: no" in caplog.text and "second" not in caplog.text


def test_memory_that_runs_out_says_nothing_of_the_kernels(monkeypatch):
    def fail(device, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trial.runs.cache_clear()
    monkeypatch.setattr(trial, "try_all", fail)
    with pytest.raises(torch.OutOfMemoryError):
        trial.runs(torch.device("privateuseone"), torch.float16)
    monkeypatch.setattr(trial, "try_all", lambda device, dtype: None)
    assert trial.runs(torch.device("privateuseone"), torch.float16)
    trial.runs.cache_clear()
