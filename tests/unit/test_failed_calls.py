"""`batch` survives each call of the operating system that fails; `make soak` tries every one, this a part."""

import json
import os
import subprocess
import sys

import pytest
from setup import ROOT


@pytest.mark.slow
def test_calls_that_fail_lose_mix_and_leave_nothing(tmp_path):
    script = [sys.executable, ROOT / "tests" / "soak" / "fail_batch.py", "--every", "15"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*script, "--results", tmp_path / "calls.json"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    faults = json.loads((tmp_path / "calls.json").read_bytes())["faults"]
    assert len(faults) == 7
    assert all(happened["calls"] >= 2 for happened in faults.values()), faults
