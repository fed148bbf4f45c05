"""Run the nodes for several GPUs in ComfyUI while GPUs fail at random calls, and check the images and leftovers.

`OMP_NUM_THREADS=1 python tests/soak/fail_canvas.py --minutes 10` runs SANA Batch Sampler, SANA Decode on all devices
and SANA Split Image on one, two and four pretended GPUs, with LoRA, ControlNet and VAE, in several states of ComfyUI's
memory. In most runs up to all GPUs but one fail: a driver fails, perhaps later than its numbers become garbage, memory
runs out, a call hangs, or numbers become NaN.

Each run has to end. While a GPU works, all images have to come, each once, equal to the CPU's images, from GPUs of the
run. Afterwards no thread and no memory of the run may be left. Each defect is a line with the number of its run, and
the status is 1. `--seed` and `--runs` repeat a run and the runs before it on the same GPUs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests/graph", "tests/unit", "tests", "scripts", ".")]

import torch  # noqa: E402
from fake_cuda import pack  # noqa: E402
from host_cards import host_cards  # noqa: E402
from in_process import Host, NodeError  # noqa: E402
from pretend_card import ERRORS, HANG, NAN, Cards, computed_on  # noqa: E402
from test_several_gpus import CARDS, batch_graph, save_files, split_graph  # noqa: E402

COUNT = 2
# Seconds until a GPU of the batch, and of a split or a decode, hangs.
BATCH_GRACE, GRACE = 3.0, 4.0
# Runs on the same pretended GPUs. Weights stay on them between the runs.
RUNS = 15
# Share of runs with a GPU that hangs, and with NaN. Both take long.
HANGS, NANS = 0.03, 0.04
# Share of the driver errors of a split or a decode that are reported late, and by how many calls at most.
LATE, LATEST = 0.5, 200


class Fresh:
    """A value that a new `number` keeps out of ComfyUI's cache."""

    RETURN_TYPES = ("*",)
    FUNCTION = "give"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("*",), "number": ("INT",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def give(self, value, number):
        return (value,)


class Machine(NamedTuple):
    """What ComfyUI runs on."""

    count: int
    state: str
    gpu_only: bool
    cpu_vae: bool
    # Bytes of each GPU. ComfyUI keeps about 1 GB free, so with as little it unloads a model to load another.
    total: int
    # Compute capability of each GPU. None: all images are computed in fp32.
    majors: tuple[int, ...] | None

    @contextmanager
    def cards(self, host: Host) -> Iterator[Cards]:
        options: dict[str, Any] = {} if self.majors is None else {"exact": False, "major": self.majors}
        flags = {"gpu_only": self.gpu_only, "cpu_vae": self.cpu_vae, "total": self.total}
        with host_cards(host, self.count, self.state, **flags, **options) as cards:
            yield cards


class Case(NamedTuple):
    """A run: the program, its options, and (GPU, kind, call) of what fails. A GPU without room fails as "full", and
    "late 5" is an error of the driver that is reported 5 calls later."""

    program: str
    lora: float
    control: bool
    vae: bool
    chunk: int
    failures: tuple[tuple[int, str, int], ...]


def random_machine(chance: Random) -> Machine:
    count = chance.choice((1, 2, 2, 4))
    state = chance.choice(("NORMAL_VRAM", "NORMAL_VRAM", "LOW_VRAM", "NO_VRAM", "HIGH_VRAM"))
    gpu_only = state == "HIGH_VRAM" and chance.random() < 0.7
    majors = tuple(chance.choice((7, 8)) for _ in range(count)) if chance.random() < 0.15 else None
    total = chance.choice((24 * 10**9, 24 * 10**9, 10**9))
    return Machine(count, state, gpu_only, chance.random() < 0.1, total, majors)


def random_case(chance: Random, count: int, calls: dict) -> Case:
    """Return a case in which all GPUs but one or more fail. `calls`: how many calls a clean run makes on each GPU."""
    program = chance.choice(("batch", "batch", "batch", "decode", "split"))
    lora, control = chance.choice((0.0, 0.0, 1.0, 0.5)), chance.random() < 0.25
    case = Case(program, lora, control, chance.random() < 0.8, chance.choice((0, 1, 1, 2, 3)), ())
    most = calls.get((count, program, control, case.vae))
    if most is None:
        # A clean run, whose calls are counted.
        return case
    kinds, lot, failures = list(ERRORS), chance.random(), []
    if count == 1:
        # Memory that runs out a few times costs no image.
        kind = chance.choice([kind for kind in ERRORS if "memory" in kind])
        ats = chance.sample(range(1, most[0]), chance.randint(0, 2)) if program == "batch" else []
        return case._replace(failures=tuple((0, kind, at) for at in ats))
    failing = chance.sample(range(count), chance.randint(0 if chance.random() < 0.1 else 1, count - 1))
    for number, index in enumerate(failing):
        kind = chance.choice([*kinds, "full"] if index else kinds)
        if number == 0 and lot < HANGS:
            kind = HANG
        elif number == 0 and lot < HANGS + NANS and program == "batch":
            kind = NAN
        late = kind == "driver" and program != "batch" and chance.random() < LATE
        kind = f"late {chance.randint(1, LATEST)}" if late else kind
        failures.append((index, kind, chance.randint(1, max(1, int(1.2 * most[index])))))
    return case._replace(failures=tuple(failures))


def graph_of(case: Case, number: int, files: Any) -> dict[str, Any]:
    """Return the graph of `case`. It is computed again for each `number`."""
    options = {"lora": case.lora, "control": files.edges if case.control else None}
    if case.program == "batch":
        graph = batch_graph(vae="load" if case.vae else "", count=COUNT, chunk=case.chunk, **options)
        graph["fresh"] = ("Fresh", {"value": "all", "number": number})
        graph["batch"][1]["devices"] = ["fresh", 0]
        return graph
    if case.program == "split":
        graph = split_graph(**options)
        graph["fresh"] = ("Fresh", {"value": "all", "number": number})
        graph["split"][1]["devices"] = ["fresh", 0]
        return graph
    inputs = {"samples": ["latents", 0], "vae": ["load", 2], "devices": ["fresh", 0]}
    return {
        "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
        "fresh": ("Fresh", {"value": "all", "number": number}),
        "latents": ("AnyValue", {"value": files.latents}),
        "decode": ("SanaNodesDecode", inputs),
        "catch image": ("Catch", {"value": ["decode", 0], "name": "image"}),
    }


class Files:
    """The inputs of the graphs, and the CPU's results."""

    def __init__(self, host: Host) -> None:
        self.edges = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(6))
        save_files(host)
        self.latents = {"samples": torch.randn(2, 32, 12, 3, generator=torch.Generator().manual_seed(5))}
        self.expected: dict[tuple, dict] = {}
        for program in ("batch", "decode", "split"):
            for lora in (0.0, 0.5, 1.0):
                for control in (False, True):
                    case = Case(program, lora, control, True, 1, ())
                    self.expected[self.key(case)] = host.run(graph_of(case, -1, self), keep_cache=True)

    def key(self, case: Case) -> tuple:
        return (case.program,) if case.program == "decode" else (case.program, case.lora, case.control)


class Defect(Exception):
    """A run left something that it must not leave."""


def check_images(got: dict, expected: dict, machine: Machine, case: Case) -> None:
    """Raise Defect for images that are not the CPU's, or that other devices have computed."""
    devices = set(CARDS[: machine.count])
    for name in ("image", "latent"):
        if name not in expected or (name == "image" and not case.vae and case.program == "batch"):
            continue
        rows, reference = (result[name] if name == "image" else result[name]["samples"] for result in (got, expected))
        if rows.shape != reference.shape:
            raise Defect(f"{name}: got {tuple(rows.shape)}, expected {tuple(reference.shape)}")
        where = computed_on(rows)
        # SANA Decode writes into a part of ComfyUI's buffer, which the pretended GPUs cannot follow.
        # Images of another process do not show where they were computed.
        if not where <= devices or not (where or case.program in ("batch", "decode") or machine.cpu_vae):
            raise Defect(f"{name}: computed on {where}")
        if any(kind == NAN for _, kind, _ in case.failures):
            # Images with NaN are reported, and nobody generates them again.
            finite = got["latent"]["samples"].cpu().flatten(1).isfinite().all(1)
            finite &= rows.cpu().flatten(1).isfinite().all(1)
            rows, reference = rows.cpu()[finite], reference[finite]
            if not len(rows):
                continue
        apart = [float((row.cpu().float() - other).abs().max()) for row, other in zip(rows, reference, strict=True)]
        average = float((rows.cpu().float() - reference).abs().mean() / reference.abs().mean())
        if (max(apart) > 2e-4 * max(1.0, float(reference.abs().max()))) if machine.majors is None else average > 0.15:
            raise Defect(f"{name}: differs by {apart} (on average {average})")


def check_memory(cards: Cards, outputs: dict) -> None:
    """Raise Defect for memory that is neither ComfyUI's nor part of the results."""
    import comfy.model_management as management

    management.unload_all_models()
    gc.collect()
    # A few numbers do not count.
    allowed = dict.fromkeys(cards.devices, 4096)
    if any(rows.device.type != "cpu" for rows in tensors(outputs)):
        allowed[CARDS[0]] = 10**7
    for device in cards.devices:
        # With --highvram, unloaded weights stay on the device.
        if management.vram_state != management.VRAMState.HIGH_VRAM and cards.alive[device] > allowed[device]:
            raise Defect(f"{device}: {cards.alive[device]} bytes are left")


def tensors(outputs: dict) -> list[torch.Tensor]:
    return [value["samples"] if isinstance(value, dict) else value for value in outputs.values()]


def check_threads(before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + 15
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("sana image"):
            # It stays for the next image of the model.
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise Defect(f"thread {thread.name} is left")


def run_case(host: Host, cards: Cards, machine: Machine, case: Case, number: int, files: Files) -> str:
    """Run `case`, and return how it ended. Raises Defect."""
    threads = set(threading.enumerate())
    cards.broken.clear(), cards.failures.clear(), cards.calls.clear(), cards.elsewhere.clear(), cards.released.clear()
    cards.hung.clear(), cards.unreported.clear(), cards.delays.clear(), cards.started.clear()
    full = [index for index, kind, _ in case.failures if kind == "full"]
    for index in full:
        cards.limit(CARDS[index], cards.alive[CARDS[index]] + 10**5)
    for index, kind, at in case.failures:
        if kind.startswith("late"):
            cards.fail(CARDS[index], "driver", at, late=int(kind.removeprefix("late ")))
        elif kind != "full":
            cards.fail(CARDS[index], kind, at)
    ended, got = "images", {}
    try:
        got = host.run(graph_of(case, number, files), keep_cache=True)
    except NodeError as error:
        ended = f"error: {str(error)[:150]}"
    calls = dict(cards.calls)
    cards.release()
    check_threads(threads)
    strays = {name: device for name, device in cards.elsewhere if name.startswith("sana cuda")}
    for index in full:
        cards.limit(CARDS[index])
    cards.broken.clear(), cards.failures.clear()
    if strays:
        raise Defect(f"calls on other devices: {strays}")
    if got:
        check_images(got, files.expected[files.key(case)], machine, case)
    held = sum(cards.alive.values())
    gc.collect()
    freed = held - sum(cards.alive.values())
    # What was freed only by the collector.
    run_case.freed[case.program] = max(run_case.freed[case.program], freed)
    if number % 5 == 0:
        check_memory(cards, got)
    run_case.calls = calls
    return ended


run_case.freed = Counter()


def may_fail(case: Case) -> bool:
    """Whether ComfyUI itself has work on a GPU that fails: the VAE, or the latents, are on the first GPU."""
    first = any(index == 0 for index, *_ in case.failures)
    return first and (case.program != "batch" or case.control)


def soak(host: Host, files: Files, seed: int, runs: range, minutes: float) -> dict[str, Any]:
    """Return the number of runs by program, kind of failure and end. The GPUs are new after a defect."""
    totals: dict[str, Counter] = {name: Counter() for name in ("programs", "kinds", "gpus", "ends")}
    begun, number, calls = time.monotonic(), runs.start, {}
    while number < runs.stop and time.monotonic() - begun < 60 * minutes:
        chance = Random(f"{seed} {number // RUNS}")
        machine = random_machine(chance)
        with machine.cards(host) as cards:
            for current in range(number // RUNS * RUNS, min(runs.stop, (number // RUNS + 1) * RUNS)):
                chance = Random(f"{seed} {current}")
                case = random_case(chance, machine.count, calls)
                faulthandler.dump_traceback_later(180, exit=True)
                try:
                    ended = run_case(host, cards, machine, case, current, files)
                    if ended != "images" and not may_fail(case):
                        raise Defect(ended)
                except Exception as error:
                    sys.stdout.write(f"run {current} of seed {seed}: {machine} {case}: {error!r:.400}\n")
                    sys.stdout.flush()
                    totals["ends"]["defect"] += 1
                    break
                finally:
                    faulthandler.cancel_dump_traceback_later()
                if not case.failures:
                    measured = [run_case.calls.get(device, 1) for device in cards.devices]
                    calls[machine.count, case.program, case.control, case.vae] = measured
                totals["programs"][case.program] += 1
                totals["gpus"][machine.count] += 1
                totals["ends"]["images" if ended == "images" else "error of the first GPU"] += 1
                kinds = ["late" if kind.startswith("late") else kind for _, kind, _ in case.failures]
                totals["kinds"].update(kinds or ["none"])
                if "late" in kinds:
                    # Weights that were loaded after the fault are garbage.
                    break
        number = (number // RUNS + 1) * RUNS
    return {name: dict(sorted(total.items())) for name, total in totals.items()} | {
        "freed by the collector": dict(run_case.freed)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", default="0:1000000", help="numbers of the runs, first:end")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first, end = map(int, arguments.runs.split(":"))
    with tempfile.TemporaryDirectory() as base, ExitStack() as stack:
        (Path(base) / "base").mkdir()
        host = Host(Path(base) / "base")
        host.nodes.NODE_CLASS_MAPPINGS["Fresh"] = Fresh
        logging.disable(logging.CRITICAL)
        run, limits = pack("nodes.host.batch.run"), pack("sana_core.runtime.limits").LIMITS
        team, decode = pack("sana_core.runtime.device_team"), pack("sana_core.decode.devices")
        for module, name, value in (
            (run, "LIMITS", limits._replace(first=2 * BATCH_GRACE, grace=BATCH_GRACE)),
            (team, "LIMITS", limits._replace(first=GRACE, grace=GRACE, patience=0.0, ending=1.0)),
            (decode, "FEW_POSITIONS", 1),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        files = Files(host)
        # The collector looks at the objects of the runs only.
        gc.collect()
        gc.freeze()
        begun = time.monotonic()
        totals = soak(host, files, arguments.seed, range(first, end), arguments.minutes)
        sys.stdout.write(f"{json.dumps(totals, indent=1)}\nin {time.monotonic() - begun:.0f} s\n")
    sys.exit(totals["ends"].get("defect", 0) > 0)


if __name__ == "__main__":
    main()
