"""`make gpu`: what a machine without a network gets, and what is written when stages fail or time runs out."""

import json
import sys
import time

import gpu_wheels
import pytest
from setup import ROOT

from benchmarks import gpu


@pytest.fixture
def stages(monkeypatch, tmp_path):
    """A function that runs such stages, and returns the status and what is in the file of results."""

    def run(*stages, minutes=8.0):
        monkeypatch.setattr(gpu, "STAGES", stages)
        monkeypatch.setattr(gpu, "WHEELS", tmp_path / "none")
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", str(minutes), "--out", str(tmp_path / "out")])
        status = gpu.main()
        (file,) = (tmp_path / "out").glob("*.json")
        return status, json.loads(file.read_text())

    return run


def test_a_stage_that_fails_hangs_or_has_no_time_left_stops_no_other(stages, tmp_path, monkeypatch):
    figure = (
        "-c",
        "import sys; print('{\"seconds\": 1}', flush=True); print('a warning', file=sys.stderr)",
        "--figure",
    )
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "found.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(mine))
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
    late = f"import time; time.sleep(6); open({str(tmp_path / 'late')!r}, 'w')"
    status, found = stages(
        ("fails", ("-c", "print('why'); raise SystemExit(3)"), 60),
        ("hangs", ("-c", "import time; print('so far', flush=True); time.sleep(60)"), 3),
        ("hangs with a child", ("-c", child, late), 3),
        ("has the paths of its caller", ("-c", "import found"), 60),
        ("measures", figure, 60),
    )
    assert status == 3 and found["stages"]["has the paths of its caller"]["ended"] == "passed"
    assert found["stages"]["fails"]["ended"] == "failed with 3" and found["stages"]["fails"]["said"] == ["why"]
    assert found["stages"]["hangs"]["ended"] == "took more than 3 s" and found["stages"]["hangs"]["said"] == ["so far"]
    assert found["stages"]["measures"]["figures"] == {"seconds": 1}
    assert found["card"] and found["torch"] and found["python"]
    time.sleep(5)
    assert not (tmp_path / "late").exists()
    status, found = stages(("late", figure, 60), minutes=0)
    assert status == 1 and found["stages"]["late"]["ended"] == "no time left"


def test_its_files_are_there():
    for _, words, _ in gpu.STAGES:
        path = words[-1] if words[0] == "-m" else words[0]
        assert (ROOT / path).exists(), path


def test_what_is_brought_along_is_pinned_with_hashes():
    lines = (ROOT / "requirements" / "gpu.in").read_text().splitlines()
    names = {line for line in lines if line and not line.startswith("#")}
    text = gpu_wheels.pinned(names)
    found = {line.partition("==")[0] for line in text.splitlines() if "==" in line.split(" ")[0]}
    assert found == names and text.count("--hash=sha256:") > len(names)
    with pytest.raises(SystemExit, match="got nothing-such"):
        gpu_wheels.pinned({"nothing-such"})
