"""Paths. The project is last on sys.path, because its `nodes` must not hide ComfyUI's nodes.py."""

import gc
import io
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]
# The number of modules that were imported when the heap was last frozen.
FROZEN_MODULES = pytest.StashKey[int]()


def pytest_collection_modifyitems(items):
    """Unit tests and fuzzing first: some fork, and a fork dies where a test of a cluster has left threads of gRPC.

    Browser tests are next. At the end, one worker would run the templates while the other has nothing left to run.
    """
    order = ["unit", "fuzz", "browser"]

    def place(item):
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        return order.index(folder) if folder in order else len(order)

    items.sort(key=place)


def pytest_sessionstart():
    """Importing all test files creates millions of objects and hardly any garbage."""
    gc.disable()


def pytest_collection_finish():
    gc.enable()


def pytest_runtest_setup(item):
    """Freeze the heap before a test if earlier tests or the collection of tests imported libraries.

    A full garbage collection would spend up to 0.5 s on the objects of these libraries. Many failures run one.
    """
    if len(sys.modules) >= item.config.stash.get(FROZEN_MODULES, 0) + 20:
        gc.collect()
        gc.freeze()
        item.config.stash[FROZEN_MODULES] = len(sys.modules)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The tests' own checkpoint: real classes, really trained."""
    return ROOT / "tests" / "models" / "sana-tiny"


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """The folder of a small CLIP with random weights."""
    from clips import save_clip

    folder = tmp_path_factory.mktemp("models") / "clip"
    save_clip(folder)
    return folder


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """ComfyUI, of which a process can hold one."""
    from in_process import Host

    return Host(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def spiece() -> bytes:
    """A sentencepiece model with Gemma's settings: BPE, byte fallback for unknown characters, no normalisation."""
    import sentencepiece

    from sana_core.model.reference import NVIDIA
    from sana_core.model.text import instruction_text

    prompts = [f"a {colour} {shape}" for colour in ("red", "blue", "green") for shape in ("circle", "square")]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*prompts, *instruction_text(NVIDIA).splitlines()]),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def one_thread():
    """The same bits need the same threads: kernels divide their sums among them."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_collector():
    """Python's collector of cycles is off, so only reference counting frees objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
