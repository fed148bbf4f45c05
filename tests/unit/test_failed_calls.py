"""`batch` and `train` survive each call of the system that fails; `make soak` tries every one, this a part."""

import json
import os
import subprocess
import sys

import pytest
from setup import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("script", "every", "count"), [("fail_batch.py", 15, 7), ("fail_train.py", 40, 3)])
def test_calls_that_fail_lose_mix_and_leave_nothing(tmp_path, script, every, count):
    command = [sys.executable, ROOT / "tests" / "soak" / script, "--every", str(every)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([*command, "--results", tmp_path / "calls.json"], env=environment, capture_output=True)
    assert process.returncode == 0, process.stderr.decode()
    faults = json.loads((tmp_path / "calls.json").read_bytes())["faults"]
    assert len(faults) == count
    assert all(happened["calls"] >= 2 for happened in faults.values()), faults
