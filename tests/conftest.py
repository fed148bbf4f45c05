"""Paths. The project is last on sys.path, because its `nodes` must not hide ComfyUI's nodes.py."""

import gc
import io
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]


def pytest_collection_modifyitems(items):
    """Unit tests first: some fork, and a fork dies where a test of a cluster has left threads of gRPC."""
    items.sort(key=lambda item: ROOT / "tests" / "unit" not in item.path.parents)


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
def frozen_heap():
    """Collections look at what comes from here on; all that was imported would take them half a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector():
    """Python's collector of cycles is off, so only reference counting frees objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
