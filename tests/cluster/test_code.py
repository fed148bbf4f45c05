"""Machines that have other code than the driver: their images are identical, or they are refused by name."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from machines import add_node
from setup import ROOT

import sana_core
from sana_core.cluster.connection import ClusterSettings
from sana_core.errors import ClusterError

# an actor has one core
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
OPTIONS = {"width": 64, "height": 64, "steps": 2, "count": 6, "chunk": 1}


@pytest.fixture
def other_checkout(tmp_path):
    """A folder with a checkout that draws everything inverted."""
    shutil.copytree(
        ROOT / "sana_core", tmp_path / "checkout" / "sana_core", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = tmp_path / "checkout" / "sana_core" / "batch" / "pipeline.py"
    text = file.read_text()
    assert text.count(".clamp(-1, 1)") == 1
    file.write_text(text.replace(".clamp(-1, 1)", ".clamp(-1, 1).neg()"))
    return tmp_path / "checkout"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", [False, True])
def test_a_checkout_in_the_drivers_folder_draws_nothing(cluster, checkpoint, other_checkout, tmp_path, client):
    """Ray puts the folder of a driver before all else on its workers' path, unless a run has one of its own."""
    for _ in range(2):
        add_node(cluster)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sana_core.__main__ import main; sys.exit(main())"
    words = ["batch", tmp_path / "prompts.txt", "--checkpoint", checkpoint, "--report"]
    words += [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    results = {}
    address = cluster.client_address if client else cluster.address
    for name, more in (("here", []), ("there", ["--cluster", address])):
        command = [sys.executable, "-c", code, *map(str, [*words, "--out", tmp_path / name, *more])]
        process = subprocess.run(command, cwd=other_checkout, env={**os.environ}, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        results[name] = {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.png")}
    assert results["here"] == results["there"] and len(results["there"]) == 12


@pytest.mark.timeout(300)
def test_a_machine_that_runs_other_code_all_the_same_is_refused_by_name(cluster, checkpoint, other_checkout):
    """As where an editable install puts another checkout first."""
    (other_checkout / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(other_checkout)!r})\n")
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"PYTHONPATH": str(other_checkout)}) for _ in range(2)]
    names = "|".join(node.node_id[:6] for node in nodes)
    run = ClusterSettings(cluster.address, wait=60)
    with pytest.raises(ClusterError, match=rf"\(({names}), actor \d+\): it runs code of sana_core \w+, not \w+ "):
        sana_core.generate(PROMPTS, checkpoint, cluster=run, **{**OPTIONS, "chunk": None})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_with_other_versions_draws_and_is_told(cluster, checkpoint, tmp_path, caplog):
    metadata = tmp_path / "diffusers-0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 0.1\n")
    node = cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    drawn = sana_core.generate(PROMPTS, checkpoint, cluster=cluster.address, **OPTIONS)
    assert drawn.equal(sana_core.generate(PROMPTS, checkpoint, **OPTIONS))
    assert re.search(rf"\({node.node_id[:6]}\): it runs diffusers 0.1, not \S+ as the driver does", caplog.text)
