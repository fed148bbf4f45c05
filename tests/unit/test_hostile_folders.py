"""Code in a model folder never runs. scripts/versions.py runs these tests with the lowest and newest libraries too."""

import json
import os
import subprocess
import sys

import pytest
from hostile_folders import CLIPS, MODELS, make

# It takes the place of the package that downloads kernels.
KERNELS = """
__version__ = "0.18.2"
class Anything:
    def __init__(self, *arguments, **options):
        pass
    def __call__(self, *arguments, **options):
        return arguments[0] if arguments else self
    def __getattr__(self, name):
        return Anything()
def get_kernel(*arguments, **options):
    open({marker!r}, "a").write("get_kernel")
    raise RuntimeError
def __getattr__(name):
    return Anything
"""
# As transformers would read the tokenizer of a model that is trusted.
TRUSTING = (
    "import sys; from transformers import AutoTokenizer;"
    "AutoTokenizer.from_pretrained(sys.argv[1] + '/tokenizer', trust_remote_code=True)"
)
pytestmark = pytest.mark.slow


def run(*words, cache):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    (root / "markers").mkdir()
    for name, changes in {**MODELS, **CLIPS}.items():
        make(root / name, changes, root / "markers" / name)
    (root / "packages" / "kernels").mkdir(parents=True)
    (root / "packages" / "kernels" / "__init__.py").write_text(KERNELS.format(marker=str(root / "markers" / "kernels")))
    metadata = root / "packages" / "kernels-0.18.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    return root


@pytest.fixture(scope="module")
def notes(root, tmp_path_factory):
    """What happened while each folder was read."""
    reading = run(__file__.replace("test_hostile", "hostile"), root, cache=tmp_path_factory.mktemp("cache"))
    assert reading.returncode == 0, reading.stderr
    return json.loads(reading.stdout)


@pytest.mark.parametrize("name", [*MODELS, *CLIPS])
def test_no_code_of_a_folder_runs_and_every_error_is_ours(notes, name):
    assert notes[name] == []


def test_no_kernel_is_asked_for(notes, root):
    assert not (root / "markers" / "kernels").exists()


def test_the_code_would_run_if_the_folder_were_trusted(root, tmp_path):
    run("-c", TRUSTING, root / "tokenizer-auto-map", cache=tmp_path)
    assert (root / "markers" / "tokenizer-auto-map").exists()
