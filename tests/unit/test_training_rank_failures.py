"""One rank of a run fails alone: all end soon, name that rank and the cause, and save where all know of the failure."""

import os
import time
from pathlib import Path

import pytest
import torch
from launched import OLD, results_of, start_ranks
from pictures import write_pictures
from trained import lines_of

from sana_core.errors import InputError, MissingFileError, ReadError
from sana_core.training import cache, optimizers, ranks, schedule, sharding, states, trained_model, trainer
from sana_core.training.settings import Method, Parallel, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import find_states
from sana_core.training.trainer import Trainer

pytestmark = pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")
# Seconds in which all ranks have to end.
LIMIT = 60
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    write_pictures(folder / "pictures", 7)
    return folder


@pytest.fixture
def settings(folder, tmp_path, checkpoint):
    def make(kind, out="out"):
        phase = Phase((str(folder / "pictures"),), 64, batch=2, accumulate=2, steps=STEPS, learning_rate=1e-3)
        prompts = Validation(every=2, share=0.3, prompts=("a red circle",), steps=1, width=64, height=32)
        paths = {"model": str(checkpoint), "out": str(tmp_path / out), "cache": str(folder / "cache")}
        options = {"dtype": "float32", "save_every": 100, "method": Method(rank=2), "validation": prompts}
        return check_settings(TrainingSettings(phase=(phase,), parallel=Parallel(kind), **paths, **options))

    return make


class Failing:
    """A failure in `module.name` after `calls` calls. Only calls whose arguments satisfy `when` are counted."""

    def __init__(
        self, module, name, error, calls=0, saved=None, victims=(0, 1), when=lambda *arguments: True, saved_by_ddp=None
    ):
        self.module, self.name, self.error, self.calls, self.victims = module, name, error, calls, victims
        self.when = when
        # The step of the last state. None: it does not matter.
        self.saved = saved
        self.saved_by_ddp = saved if saved_by_ddp is None else saved_by_ddp

    def install(self, monkeypatch, victim):
        real, called = getattr(self.module, self.name), []

        def fail(*arguments, **named):
            if int(os.environ.get("RANK", -1)) == victim and self.when(*arguments):
                called.append(1)
                if len(called) == self.calls + 1:
                    raise self.error
            return real(*arguments, **named)

        monkeypatch.setattr(self.module, self.name, fail)


MEMORY = torch.OutOfMemoryError("CUDA out of memory in this test")
DISK = OSError(28, "No space left on device")
# Validations are before step 0 and after steps 2 and 4, each of which saves the best. Each of two ranks computes one
# microbatch of each step, and in a validation its image.
PHASES = {
    "device": Failing(ranks, "choose_device", InputError("device: got cuda:1 in this test")),
    "settings": Failing(trainer, "check_base", MissingFileError("model: not here in this test")),
    "data": Failing(schedule, "read_samples", ReadError("broken.png: in this test")),
    "encoding": Failing(schedule, "prepare_phase", MEMORY),
    "loading": Failing(Trainer, "load_base", MEMORY),
    "dividing": Failing(trainer, "lay_out", MEMORY),
    "step": Failing(Trainer, "microbatch_loss", MEMORY, calls=2),
    "optimizer": Failing(optimizers, "step_optimizer", MEMORY, calls=1),
    "log": Failing(states.RunLog, "add", DISK, calls=2, victims=(0,)),
    # One image is loaded by each validation, and by steps 2 and 4, which have the fifth image of an epoch.
    "image of a validation": Failing(
        cache.Cache, "load", ReadError("cache: gone in this test"), 4, 4, when=lambda _, indices: len(indices) == 1
    ),
    "validation": Failing(Trainer, "image_loss", MEMORY, calls=2, saved=2, saved_by_ddp=4),
    "image of a preview": Failing(trainer, "generate_validation", MEMORY, calls=2, saved=4, victims=(0,)),
    "gathering for a preview": Failing(trainer, "gather", MEMORY),
    "values of a state": Failing(states, "check_finite", MEMORY),
    "parts of a state": Failing(sharding, "divide_tensor", MEMORY),
    "disk of a state": Failing(sharding, "sync", DISK),
    "moving a state": Failing(states, "write_document", DISK, victims=(0,)),
    "export": Failing(trained_model, "write_adapter", DISK, victims=(0,)),
    "gathering for an export": Failing(trainer, "gather", MEMORY, calls=1),
    "result": Failing(states, "publish", DISK, victims=(0,)),
}
# These run in parts that FSDP alone has.
DIVIDED = {"gathering for a preview", "gathering for an export"}
QUICK = [("step", 1), ("validation", 0)]


def run_failing(count, function, capfd):
    """Run `function` on `count` ranks. Returns the results by rank, the text of stderr, and the seconds."""
    began = time.monotonic()
    processes, results = start_ranks(count, function)
    for process in processes:
        process.join(max(0.1, began + LIMIT - time.monotonic()))
    seconds, alive = time.monotonic() - began, [process.is_alive() for process in processes]
    for process in processes:
        process.kill()
    results_of_ranks = {}
    while not results.empty():
        rank, outcome = results.get()
        results_of_ranks[rank] = outcome
    said = capfd.readouterr().err
    assert not any(alive), (alive, results_of_ranks, said[-2000:])
    return results_of_ranks, said, seconds


def check_ends(phase, victim, kind, count, settings, monkeypatch, capfd):
    failing, run_settings = PHASES[phase], settings(kind)
    failing.install(monkeypatch, victim)
    results_of_ranks, said, _ = run_failing(count, lambda ranks: trainer.train(run_settings, ranks=ranks), capfd)
    monkeypatch.undo()
    cause = str(failing.error)[-20:] if failing.error is not DISK else "No space left"
    for rank in range(count):
        # A rank that waits in a collective ends with a line on stderr instead of an exception.
        words = results_of_ranks[rank][1] if rank in results_of_ranks else said
        assert rank not in results_of_ranks or results_of_ranks[rank][0] != "done", (rank, results_of_ranks)
        assert cause in words, (rank, results_of_ranks, said[-2000:])
        assert rank == victim or f"rank {victim}" in words, (rank, words)
    saved = failing.saved_by_ddp if kind == "ddp" else failing.saved
    if saved is not None:
        assert find_states(Path(run_settings.out))[-1][0] == saved
    return run_settings


@pytest.mark.parametrize(("phase", "victim"), QUICK)
def test_a_rank_that_fails_alone_ends_all_soon(phase, victim, settings, monkeypatch, capfd):
    check_ends(phase, victim, "fsdp", 2, settings, monkeypatch, capfd)


def test_a_rank_that_fails_alone_in_a_validation_loses_no_step_under_ddp(settings, monkeypatch, capfd):
    check_ends("validation", 1, "ddp", 2, settings, monkeypatch, capfd)


def cases():
    for kind in ("ddp", "fsdp", "fsdp_offload"):
        for phase, failing in PHASES.items():
            for victim in failing.victims:
                if not (kind == "ddp" and phase in DIVIDED):
                    yield phase, victim, kind


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "victim", "kind"), list(cases()))
def test_each_phase_of_each_kind_ends_and_resumes(phase, victim, kind, settings, monkeypatch, capfd):
    run_settings = check_ends(phase, victim, kind, 2, settings, monkeypatch, capfd)
    results_of(2, lambda ranks: trainer.train(run_settings, ranks=ranks))
    steps = [line["step"] for line in lines_of(run_settings.out) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["validation", "step", "parts of a state", "gathering for an export"])
def test_one_of_four_ranks_that_fails_ends_all(phase, settings, monkeypatch, capfd):
    other = Failing(*[getattr(PHASES[phase], name) for name in ("module", "name", "error")])
    monkeypatch.setitem(PHASES, phase, other)
    check_ends(phase, 2, "fsdp", 4, settings, monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_end_by_themselves_where_the_backend_waits_for_the_failed_one(victim, settings, monkeypatch, capfd):
    """NCCL waits for the others in the end of a process group, and never hears that a process has failed."""
    run_settings = settings("fsdp")
    PHASES["validation"].install(monkeypatch, victim)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: time.sleep(2 * LIMIT))
    _, said, seconds = run_failing(2, lambda ranks: trainer.train(run_settings, ranks=ranks), capfd)
    assert said.count(f"training: rank {victim} on ") == 2 and said.count("CUDA out of memory in this test") == 2
    assert seconds < LIMIT
