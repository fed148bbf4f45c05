"""Random queues on one ComfyUI, of which many are cancelled or fail, on the CPU and on pretended GPUs.

`OMP_NUM_THREADS=1 python tests/soak/cancelled_queues.py --queues 1000` runs batches, split images, decodes, short
trainings, scorers, ControlNets and LoRAs. It interrupts some at a random moment or move, lets some fail, and
unloads models in between. After each queue, every model is where ComfyUI lists it. A queue that was left alone gives
the right image. Without models, no memory of a GPU is in use.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests/graph", "tests", "scripts", ".")]

import pytest  # noqa: E402
import torch  # noqa: E402
from host_cards import host_cards  # noqa: E402
from in_process import NodeError  # noqa: E402
from loaded_models import misplaced  # noqa: E402
from pretend_card import Cards  # noqa: E402
from test_several_gpus import batch_graph  # noqa: E402

from tests.soak.graphs import write_lora, write_models  # noqa: E402

GB = 10**9
# Rounding of fp32 on the CPU, between images computed in different places.
TOLERANCE = 2e-4
WAYS = ("sampler", "batch", "split")
STATES = ("NORMAL_VRAM", "LOW_VRAM", "NO_VRAM", "HIGH_VRAM")


class Spec(NamedTuple):
    """What decides on the image of a queue."""

    way: str
    lora: float
    control: bool
    seed: int
    # `devices` of SANA Decode. All devices decode maps in channels-last memory, and one device does not. For the four
    # positions of these images, MKL on Intel processors has another kernel for each layout: differences up to 3e-6.
    # SANA Batch Sampler decodes itself.
    decode: str


SPECS = [
    Spec(*values)
    for values in itertools.product(WAYS, (0.0, 1.0), (False, True), (1, 2), ("one", "all"))
    if values[0] != "batch" or values[-1] == "one"
]


def graph_of(spec: Spec, edges: torch.Tensor, on_cards: bool, random: Random, chunk: int = 1) -> dict:
    """Return the graph of `spec`. Settings that do not change the image are random."""
    graph = batch_graph(lora=spec.lora, control=edges if spec.control else None, seed=spec.seed, chunk=chunk)
    links = graph["batch"][1]
    links["devices"] = random.choice(("all", "default", "gpu:1" if on_cards else "cpu x 2"))
    if spec.way != "batch":
        # One prompt, and a decode by a node.
        graph["list"] = ("SanaNodesPromptList", {**graph["list"][1], "prompts": "a red circle on a blue background"})
        inputs = {name: links[name] for name in ("model", "positive", "negative", "latent_image", "seed")}
        inputs |= {name: links[name] for name in ("steps", "guidance", "sampler")}
        graph["batch"] = ("SanaNodesSampler", inputs)
        graph["decode"] = ("SanaNodesDecode", {"samples": ["batch", 0], "vae": ["load", 2], "devices": spec.decode})
        graph["catch image"] = ("Catch", {"value": ["decode", 0], "name": "image"})
    if spec.way == "split":
        graph["split"] = (
            "SanaNodesSplitPicture",
            {"model": inputs["model"], "devices": "all" if on_cards else "cpu x 2"},
        )
        inputs["model"] = ["split", 0]
    return graph


def with_scorer(graph: dict) -> dict:
    """Return the graph with a scorer that picks the best image."""
    links = {"samples": ["batch", 0], "vae": ["load", 2], "scorer": ["scorer", 0], "prompt": "a red circle", "best": 1}
    return {
        **graph,
        "scorer": ("SanaNodesScorerLoader", {"scorer_name": "sana-posters-scorer (bundled)"}),
        "pick": ("SanaNodesPickBest", links),
        "catch best": ("Catch", {"value": ["pick", 1], "name": "best"}),
    }


def training_graph(name: str) -> dict:
    """Return the graph of a training of two steps."""
    inputs = {"rank": 4, "steps": 2, "learning_rate": 1e-3, "batch_size": 1}
    return {
        "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
        "data": ("SanaNodesDataset", {"folder": "cyanotypes (bundled)", "resolution": 64}),
        "train": ("SanaNodesTrain", {"model": ["load", 0], "dataset": ["data", 0], "name": name, **inputs}),
    }


@contextmanager
def trouble(host: Any, random: Random, cards: Cards | None) -> Iterator[str]:
    """Interrupt the queue inside, or let it fail, or do neither. Yields the kind of trouble."""
    kind = random.choice(("none", "none", "none", "time", "time", "move", "move", "error"))
    with pytest.MonkeyPatch.context() as patch:
        timer = threading.Timer(random.uniform(0.0, 1.0), host.nodes.interrupt_processing)
        if kind == "time":
            timer.start()
        elif kind == "move":
            # Every move of a module's tensors passes here.
            countdown, real = itertools.count(random.randint(1, 3000), -1), torch.nn.Module._apply

            def apply(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
                if next(countdown) == 0:
                    host.nodes.interrupt_processing()
                    # The threads of a batch look at it now and then.
                    time.sleep(0.5)
                return real(module, *args, **options)

            patch.setattr(torch.nn.Module, "_apply", apply)
        elif kind == "error":
            countdown, convolution = itertools.count(random.randint(1, 400), -1), torch.nn.functional.conv2d
            failure = random.choice((RuntimeError, torch.OutOfMemoryError))

            def conv2d(*args: Any, **options: Any) -> torch.Tensor:
                if next(countdown) == 0:
                    # In a computation: ComfyUI itself does not survive an error while it moves a model.
                    raise failure("injected")
                return convolution(*args, **options)

            patch.setattr(torch.nn.functional, "conv2d", conv2d)
            patch.setattr(
                torch.nn.Conv2d,
                "_conv_forward",
                lambda layer, x, weight, bias: conv2d(
                    x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups
                ),
            )
        try:
            yield kind
        finally:
            timer.cancel()
            host.nodes.interrupt_processing(False)
            if cards is not None:
                cards.failures.clear()
                cards.broken.clear()


class Soak:
    """The queues on one ComfyUI, with the images that they should give."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.edges = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(6))
        self.ended: Counter[str] = Counter()
        host.executor.reset()
        # On the CPU, one thread each.
        random = Random(0)
        self.images = {
            spec: host.run(graph_of(spec, self.edges, False, random), keep_cache=True)["image"] for spec in SPECS
        }

    def run(
        self, queues: int, seed: int, cards: Cards | None, report: Callable[[str], None] = lambda line: None
    ) -> None:
        """Run `queues` queues. Raises AssertionError for the first fault, with the number of its queue."""
        import comfy.model_management as management

        random, free = Random(seed), management.free_memory
        for number in range(queues):
            spec = random.choice(SPECS)
            graph = graph_of(spec, self.edges, cards is not None, random, random.choice((0, 1, 2)))
            # Pretended GPUs take long to train.
            extra = random.choice(("", "", "", "", "", "scorer", "training" if cards is None else ""))
            if extra == "scorer":
                graph = with_scorer(graph)
            elif extra == "training":
                graph = training_graph(f"soak {number}")
            # Every load displaces every other model, as on a small GPU.
            is_tight = random.random() < 0.5
            with pytest.MonkeyPatch.context() as patch, trouble(self.host, random, cards) as kind:
                if is_tight:
                    patch.setattr(management, "free_memory", lambda _, *args, **options: free(GB**2, *args, **options))
                label = f"queue {number} of seed {seed}: {spec}, {extra or 'image'}, trouble {kind}, tight {is_tight}"
                started = time.monotonic()
                try:
                    caught = self.host.run(graph, keep_cache=True)
                    end = "finished"
                except InterruptedError:
                    caught, end = {}, "interrupted"
                except NodeError as error:
                    caught, end = {}, "failed"
                    assert kind == "error", f"{label}: {error}"
            self.ended[end] += 1
            report(f"{label}: {end} after {time.monotonic() - started:.1f} s")
            faults = misplaced()
            assert not faults, f"{label}, {end}: {faults[:5]}"
            # A graph whose outputs are cached catches nothing.
            if "image" in caught:
                difference = (caught["image"].cpu() - self.images[spec]).abs().max()
                # An encode or a decode that runs out of memory is repeated in other strips, which round differently.
                is_exact = cards is None and kind != "error"
                assert difference <= (0.0 if is_exact else TOLERANCE), f"{label}: {difference} from the right image"
            caught.clear()
            shutil.rmtree(self.host.output / "sana_training", ignore_errors=True)
            match random.randrange(20):
                case 0:
                    management.unload_all_models()
                    assert not misplaced(), label
                case 1 | 2:
                    # As the menu does: what ComfyUI keeps of earlier queues is gone.
                    self.free(cards, label)

    def free(self, cards: Cards | None, label: str) -> None:
        """Let ComfyUI forget everything, and check that nothing is left."""
        import comfy.model_management as management
        from in_process import Catch

        Catch.caught = {}
        self.host.executor.reset()
        gc.collect()
        remaining = [type(entry.real_model()).__name__ for entry in management.current_loaded_models]
        assert not remaining, f"{label}: {remaining} are left"
        if cards is not None:
            assert not +cards.alive, f"{label}: {dict(cards.alive)} bytes are left"


def main() -> None:
    from in_process import Host

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=20, help="queues on the same devices")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0, 1, 2], help="GPUs of each part, in turn; 0: the CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder))
        write_models(host.models)
        prepare(host)
        ended = run_parts(
            host, options.queues // options.part, options.part, options.seed, options.gpus, options.seconds
        )
    tell(f"{sum(ended.values())} queues: {dict(ended)}")


def run_parts(
    host: Any, parts: int, queues: int, seed: int, gpus: Sequence[int], seconds: float = float("inf")
) -> Counter[str]:
    """Run parts of `queues` queues, each on a number of `gpus` in turn, for `seconds` at most. Returns their ends.

    The host has the files of `prepare`.
    """
    soak, random, started = Soak(host), Random(seed), time.monotonic()
    for part in range(parts):
        if time.monotonic() - started > seconds:
            break
        count, state = gpus[part % len(gpus)], random.choice(STATES)
        tell(f"part {part}: {count} GPUs, {state}, {dict(soak.ended)}")
        with host_cards(host, count, state) if count else nullcontext() as cards:
            soak.run(queues, seed * 10**6 + part, cards, tell)
            soak.free(cards, f"end of part {part}")
    return soak.ended


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def prepare(host: Any) -> None:
    """Write the LoRA and the ControlNet of `batch_graph`."""
    write_lora(host.models / "loras" / "several.safetensors", 1)
    shutil.copy(host.models / "controlnet" / "control.safetensors", host.models / "controlnet" / "several.safetensors")


if __name__ == "__main__":
    main()
