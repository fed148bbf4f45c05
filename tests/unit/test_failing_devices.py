"""A short run of tests/soak/fail_devices.py: batches on pretended GPUs that fail at random."""

import subprocess
import sys

from setup import ROOT


def test_random_device_failures_never_lose_repeat_or_swap_images():
    script = [sys.executable, ROOT / "tests" / "soak" / "fail_devices.py", "--runs", "10"]
    process = subprocess.run([str(word) for word in script], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "'runs': 10" in process.stdout and "'complete'" in process.stdout
