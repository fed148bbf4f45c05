"""Every optimizer in every arrangement: a run on several ranks that is killed and resumed ends as one process ends."""

import random
import time
from pathlib import Path

import psutil
import pytest
import torch
from launched import OLD, results_of, start_ranks
from pictures import write_pictures
from safetensors.torch import load_file

from sana_core import load_transformer
from sana_core.training import optimizers, trainer
from sana_core.training.settings import Method, Optimizer, Parallel, Phase, TrainingSettings, check_settings
from sana_core.training.states import find_states

pytestmark = [pytest.mark.slow, pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")]
STEPS = 6
# The largest mean difference from one process, as a share of the mean change of a weight. In 8 bits, the blocks of a
# shard are other blocks than those of the whole weight.
TOLERANCES = {"came8bit": 0.05, "adamw8bit": 0.05}
RATES = {"prodigy": 1.0, "schedulefree": 1e-3}
CASES = [
    (kind, name, count)
    for name, row in optimizers.OPTIMIZERS.items()
    for kind in row.parallel
    for count in ((2, 3, 5, 8) if kind == "fsdp" and "8bit" in name else (2, 5))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    write_pictures(folder / "pictures", 9)
    return folder


@pytest.fixture(autouse=True)
def without_compiler():
    """torchao's step is compiled, which takes a minute in each process."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make(folder, checkpoint, out, name, kind="ddp"):
    phase = Phase(
        (str(folder / "pictures"),), 128, batch=2, accumulate=4, steps=STEPS, learning_rate=RATES.get(name, 1e-4)
    )
    paths = {"model": str(checkpoint), "out": str(out), "cache": str(folder / "cache")}
    options = {"dtype": "float32", "save_every": 1, "keep": 2, "method": Method("full"), "optimizer": Optimizer(name)}
    return check_settings(TrainingSettings(phase=(phase,), parallel=Parallel(kind), **paths, **options))


def weights(path):
    files = sorted(path.glob("*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}


def kill_one(run_settings, count):
    """Train on `count` ranks until a state is there, kill one of them, and wait for the others."""
    processes, _ = start_ranks(count, lambda ranks: trainer.train(run_settings, ranks=ranks))
    end = time.monotonic() + 300
    while (
        not find_states(Path(run_settings.out))
        and time.monotonic() < end
        and all(process.is_alive() for process in processes)
    ):
        time.sleep(0.02)
    time.sleep(random.Random(count).random())
    psutil.Process(processes[count // 2].pid).kill()
    for process in processes:
        process.join(90)
    alive = [process.is_alive() for process in processes]
    for process in processes:
        process.kill()
    assert not any(alive) and find_states(Path(run_settings.out))


@pytest.mark.parametrize(("kind", "name", "count"), CASES)
def test_a_killed_run_resumes_and_ends_as_one_process(kind, name, count, folder, tmp_path, checkpoint):
    if name in ("prodigy", "schedulefree"):
        pytest.importorskip("pytorch_optimizer")
    if name == "adamw8bit":
        pytest.importorskip("torchao.optim")
    alone = folder / f"alone-{name}"
    expected = weights(trainer.train(make(folder, checkpoint, alone, name)))
    run_settings = make(folder, checkpoint, tmp_path / "out", name, kind)
    kill_one(run_settings, count)
    paths = results_of(count, lambda ranks: trainer.train(run_settings, ranks=ranks), 300)
    result, started = weights(paths[0]), load_transformer(checkpoint).state_dict()
    assert result.keys() == expected.keys()
    differs = sum(float((result[key] - weight).abs().sum()) for key, weight in expected.items())
    changed = sum(float((started[key] - weight).abs().sum()) for key, weight in expected.items())
    assert changed > 0 and differs < TOLERANCES.get(name, 0.01) * changed, (differs, changed)
