"""A short run of tests/soak/fail_devices.py: batches on pretended GPUs that fail at random."""

import subprocess
import sys

from setup import ROOT


def test_random_failures_of_devices_lose_double_and_mix_nothing():
    script = [sys.executable, ROOT / "tests" / "soak" / "fail_devices.py", "--runs", "10"]
    done = subprocess.run([str(word) for word in script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'runs': 10" in done.stdout and "'complete'" in done.stdout
