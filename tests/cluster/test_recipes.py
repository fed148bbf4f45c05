"""docs/examples as an operator runs them: Ray and its tokens are real, Slurm's two commands are not."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from setup import ROOT

from sana_core.commands import batch

EXAMPLES = ROOT / "docs" / "examples"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
if [[ "$1 $2" == "ray start" ]]; then set -- "$@" --num-gpus=1 --num-cpus=1 --object-store-memory=80000000; fi
exec "$@"
"""
SCONTROL = "#!/bin/bash\nhostname\n"


@pytest.fixture
def slurm(tmp_path):
    """An environment in which a job of one node of Slurm runs, number 395, with prompts.txt in its folder."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "prompts.txt").write_text("a red circle on a blue background\n")
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": "395", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "1"}
    sizes = {"SLURM_CPUS_PER_TASK": "1", "SLURM_GPUS_PER_NODE": "1"}
    return {**os.environ, **job, **sizes, "PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_slurm_script_draws_on_a_cluster_that_asks_for_its_token(slurm, checkpoint, tmp_path):
    script = (EXAMPLES / "batch.sbatch").read_text().replace("/models/sana", f"{checkpoint} --width 128 --height 128")
    job = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=slurm, start_new_session=True)
    try:
        assert job.wait(250) == 0
        assert len(list((tmp_path / "pictures").glob("*.png"))) == 4
        token = tmp_path / ".ray" / "sana_token"
        assert len(token.read_text()) == 64 and token.stat().st_mode & 0o077 == 0
        # Ray runs until Slurm ends the job's steps. It does not answer a client without the token.
        words = [
            sys.executable,
            "-m",
            "sana_core",
            "batch",
            "prompts.txt",
            "--checkpoint",
            checkpoint,
            "--out",
            "other",
        ]
        words += ["--cluster", f"127.0.0.1:{10000 + 395 * 50}"]
        refused = {**slurm, "RAY_AUTH_MODE": "disabled"}
        process = subprocess.run(words, cwd=tmp_path, env=refused, capture_output=True, text=True, timeout=200)
        assert process.returncode == 1 and "nobody answers" in process.stderr and "set its token" in process.stderr
    finally:
        os.killpg(job.pid, 9)


def test_the_kubernetes_job_runs_what_the_command_line_knows():
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "rayjob.yaml").read_text())
    words = job["spec"]["entrypoint"].split()
    assert words[:4] == ["python", "-m", "sana_core", "batch"]
    parser = argparse.ArgumentParser()
    batch.configure(parser)
    parsed = parser.parse_args(words[4:])
    assert parsed.cluster == "auto" and parsed.out_shared
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    volumes = [group["template"]["spec"] for group in groups]
    assert all(spec["containers"][0]["volumeMounts"][0]["mountPath"] == "/data" for spec in volumes)
    assert cluster["authOptions"] == {"mode": "token"}
    image = (EXAMPLES / "kubernetes" / "Dockerfile").read_text()
    assert f"ray[default]=={cluster['rayVersion']}" in image
