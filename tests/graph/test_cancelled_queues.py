"""A short run of tests/soak/cancelled_queues.py: random queues that are cancelled, fail, or give the right image."""

import os
import subprocess
import sys

from setup import ROOT


def test_thirty_random_queues_leave_every_model_where_comfyui_lists_it():
    script = [sys.executable, ROOT / "tests" / "soak" / "cancelled_queues.py", "--queues", "30", "--part", "10"]
    script += ["--gpus", "0", "0", "2", "--seed", "11"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [str(word) for word in script], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500
    )
    assert process.returncode == 0, process.stderr[-3000:]
    *_, last = process.stdout.splitlines()
    assert last.startswith("30 queues:") and "'interrupted'" in last and "'finished'" in last
