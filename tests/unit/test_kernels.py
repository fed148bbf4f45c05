"""The fused kernels without a card: their numbers in Triton's interpreter, their machine code for every card."""

import os
import subprocess
import sys

import pytest
import torch
from setup import ROOT

from benchmarks import kernels
from sana_core.kernels import trial

triton = pytest.importorskip("triton")
gated_depthwise = pytest.importorskip("sana_core.kernels.gated_depthwise")


def ends(cards):
    """The oldest and the newest of `cards`, and those between as slow ones."""
    first, *between, last = cards
    return [first, *(pytest.param(card, marks=pytest.mark.slow) for card in between), last]


# The interpreter takes a second for a program of the depthwise kernel.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chosen", [("-k", "bfloat16", "-m", "not slow"), pytest.param((), marks=pytest.mark.slow)])
def test_their_numbers_are_as_near_the_truth_as_plain_torch_s(chosen):
    run_interpreted("tests/unit/kernel_numbers.py", *chosen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_split_members_may_have_different_kernels_and_inputs_keep_their_values():
    run_interpreted("tests/unit/kernel_contracts.py")


def run_interpreted(*arguments):
    """Run tests in another process, because Triton decides at import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-x", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-4000:]


@pytest.mark.parametrize("card", ends(kernels.CARDS))
def test_each_builds_for_every_card(card):
    for launch in kernels.recorded(2240, torch.bfloat16):
        result = kernels.resources(kernels.build(launch, card))
        # Turing allows a block the least shared memory of all.
        assert result["shared_bytes"] <= 48 * 1024, (launch.kernel.__name__, result)
        # Turing has no products of bf16
        assert result["spilled_bytes"] == 0 or card == 75, (launch.kernel.__name__, result)


@pytest.mark.parametrize("dtype, channel_bytes", [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)], ids=str)
def test_the_depthwise_kernel_reads_each_input_once_per_row(dtype, channel_bytes):
    """Counted in machine code for sm_90, where an earlier kernel issued 104 loads of 2 bytes in each row."""
    (launch,) = [launch for launch in kernels.recorded(2240, dtype) if launch.kernel.__name__ == "gated_depthwise"]
    columns, channels = gated_depthwise.COLUMNS, gated_depthwise.CHANNELS
    per_thread = channels // 32
    counts = kernels.instructions(kernels.build(launch, 90))
    # Each row loads the columns of a strip and one more on both sides, of values and of gates, and stores its outputs.
    assert counts["accesses"] == {per_thread * channel_bytes: 2 * (columns + 2) + columns}
    # SiLU is one exponential and one reciprocal: once for each input, and once for each gate.
    assert counts["special_functions"] == 2 * per_thread * (2 * (columns + 2) + columns)
    assert counts["instructions"] <= (560 if dtype != torch.float32 else 780)


@pytest.mark.parametrize("card", ends(kernels.AMD_CARDS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_builds_for_every_amd_card(card, dtype, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for launch in kernels.recorded(2240, dtype):
        # A workgroup has at most this much shared memory.
        assert kernels.build(launch, card).metadata.shared <= 64 * 1024, launch.kernel.__name__


def test_there_are_none_on_a_cpu():
    assert not trial.kernels_on(torch.device("cpu"), torch.float32)


@pytest.fixture
def tried(monkeypatch):
    """A function that returns the kernels that still run after some functions of TRIALS are replaced."""

    def kernels_on(dtype=torch.float16, **replaced):
        trial.refused_kernels.cache_clear()
        nothing = dict.fromkeys(trial.TRIALS, lambda rows: None)
        monkeypatch.setattr(trial, "TRIALS", nothing | replaced)
        return trial.kernels_on(torch.device("privateuseone"), dtype)

    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: None)
    yield kernels_on
    trial.refused_kernels.cache_clear()


def failing(error):
    def attempt(rows):
        raise error

    return attempt


def test_without_triton_there_is_one_line_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: None)
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in [name for name in sys.modules if name.startswith("sana_core.kernels.")]:
        if module != trial.__name__:
            monkeypatch.delitem(sys.modules, module)
    trial.refused_kernels.cache_clear()
    assert not any(trial.kernels_on(torch.device("privateuseone"), torch.bfloat16) for _ in range(3))
    trial.refused_kernels.cache_clear()
    assert [record.name for record in caplog.records] == [trial.__name__]
    assert "plain torch" in caplog.text and caplog.text.count("triton") == 1


def test_a_kernel_that_does_not_build_drops_no_other_and_the_log_has_the_reason(tried, caplog):
    """Triton's AMD backend refuses products of TF32 with a long message."""
    (launch,) = (kernel for kernel in kernels.recorded(2240, torch.float16) if "precision" in kernel.arguments)
    with pytest.raises(triton.CompilationError) as refused:
        kernels.build(launch, "gfx942")
    assert tried(linear_attention=failing(refused.value)) == trial.TRIALS.keys() - {"linear_attention"}
    (line,) = caplog.text.splitlines()
    assert "no fused kernels for linear_attention on" in line and "input_precision must be one of" in line


def test_memory_that_runs_out_says_nothing_of_the_kernels(tried):
    with pytest.raises(torch.OutOfMemoryError):
        tried(modulation=failing(torch.OutOfMemoryError("CUDA out of memory")))
    assert tried() == trial.TRIALS.keys()
