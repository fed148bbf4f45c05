"""`make gpu`: what a machine without a network gets, and what is written when stages fail or time runs out."""

import json
import os
import subprocess
import sys
import time
import zipfile

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


@pytest.mark.slow
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


# stages of the day, and the files whose lines they have to reach
DAY = {
    ("correctness",): ("tests/gpu/*.py",),
    ("kernels", "rates", "doctor", "graphs", "compiled step"): (
        "benchmarks/gpu.py",
        "benchmarks/sampling_gpu.py",
        "sana_core/doctor/arithmetic.py",
        "sana_core/doctor/figures.py",
    ),
    ("templates in ComfyUI",): ("tests/graph/test_templates.py",),
}


def add_wheel(folder):
    """Put the wheel of a package that no Python has into `folder`."""
    folder.mkdir()
    about = "nothing_such-1.0.dist-info"
    with zipfile.ZipFile(folder / "nothing_such-1.0-py3-none-any.whl", "w") as file:
        file.writestr("nothing_such.py", "")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: nothing-such\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def test_no_stage_is_left_out():
    assert sorted(sum(DAY, ())) == sorted(name for name, _, _ in gpu.STAGES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stages", DAY, ids=lambda stages: stages[0])
def test_every_line_runs_on_two_gpus_that_compute_on_the_cpu(tmp_path, stages):
    """Every stage of `make gpu` passes, and coverage finds no line that was not reached."""
    pytest.importorskip("coverage")
    config = tmp_path / "coverage.ini"
    # the CPU runs its part in every `make test`; hanging stages, wrong GPUs and training on the canvas have tests
    config.write_text(
        f"""[run]
data_file = {tmp_path / "lines"}
parallel = true
include = {", ".join(str(ROOT / path) for path in DAY[stages])}
[report]
exclude_also =
    if TYPE_CHECKING:
    if .*device.type == "cpu"
    if device.type != "cuda"
    if (device|DEVICE) is None.*:
    if not .*is_(file|dir)\\(\\)
    if report.late
    if not .*isfinite
    except subprocess.TimeoutExpired
    if kind == "SanaNodesTrain"
"""
    )
    add_wheel(tmp_path / "wheels")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "pretended_day"), "OMP_NUM_THREADS": "1"}
    environment |= {"COVERAGE_PROCESS_START": str(config)}
    command = [sys.executable, "tests/pretended_day/day.py", "--minutes", "1000", "--stages", *stages]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = json.loads((tmp_path / "pretended.json").read_text())
    assert done.returncode == 0, (done.stdout, done.stderr, found)
    assert found["cards"] == 2 and found["wheels"] == ["nothing_such-1.0"] and found["stages"].keys() == set(stages)
    coverage = (sys.executable, "-m", "coverage")
    subprocess.run([*coverage, "combine", "-q", f"--rcfile={config}"], cwd=ROOT, check=True)
    report = [*coverage, "report", f"--rcfile={config}", "--show-missing", "--fail-under=100"]
    done = subprocess.run(report, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


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
