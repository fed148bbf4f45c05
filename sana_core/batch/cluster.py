"""Every GPU of a Ray cluster: one actor each, which loads the checkpoint once.

Ray restarts nothing here: the loop knows what each actor had, and this pool puts a new one where a GPU has none, be it
because an actor died or because a machine has joined.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ..decode.faults import is_out_of_memory
from .draw import Settings, Text, complete, draw, encode_text, load_encoder, load_models
from .folder import encode_png, fingerprint
from .loop import GRACE, Outcome, carry_out
from .plan import Chunk, Picture, auto_chunk, cut
from .queue import Queue

logger = logging.getLogger(__name__)

# seconds between two looks at the cluster's machines, and at who hangs
LOOK_AROUND = 3.0
LOOK = 0.5
# how long a run waits for a first actor, or for another after the last one died
WAIT_FOR_ACTORS = 300.0
# tries to start an actor on one machine whose processes die before they are ready
LARGEST_TRIES = 5


class Painter:
    """The actor: one GPU, or the CPU of a machine without one, with a checkpoint on it."""

    def __init__(self, checkpoint: str, settings: Settings, described: dict[str, Any] | None) -> None:
        self.checkpoint, self.settings, self.described = checkpoint, settings, described
        self.texts: dict[str, Text] = {}

    def load(self, weights: str, neighbours: int) -> None:
        """Load everything, to share the machine's cores with so many actors, this one included.

        Raises ValueError if the checkpoint of this machine is not the one of that fingerprint.
        """
        torch.set_num_threads(max(1, torch.get_num_threads() // neighbours))
        own = fingerprint(self.checkpoint)
        if own != weights:
            raise ValueError(f"{self.checkpoint}: got other weights than the driver has; copy the same files there")
        available = torch.accelerator.is_available()
        self.device = torch.accelerator.current_accelerator() if available else torch.device("cpu")
        assert self.device is not None
        self.encoder = load_encoder(self.checkpoint, self.device, self.settings.dtype)
        self.models = load_models(self.checkpoint, self.device, self.settings.dtype)
        self.negative = encode_text(self.encoder, self.settings.negative_prompt, instruction=False)

    def draw(self, chunk: Chunk, prompts: list[str]) -> list[Any]:
        """Return the pictures of `chunk`, whose prompts are `prompts`: PNG files where settings are `described`."""
        # only those of the last chunks: the queue hands the pictures of a prompt out one after another
        known = {prompt: self.texts[prompt] for prompt in prompts if prompt in self.texts}
        for prompt in prompts:
            if prompt not in known:
                known[prompt] = encode_text(self.encoder, prompt, instruction=True)
        self.texts = known
        pictures = draw(self.models, self.settings, chunk, [known[prompt] for prompt in prompts], self.negative)
        if self.described is None:
            return [pixels.numpy() for pixels in pictures]
        return [
            encode_png(pixels, prompt, picture.seed, self.described)
            for picture, prompt, pixels in zip(chunk, prompts, pictures, strict=True)
        ]


class RayPool:
    """The GPUs of the cluster that this process is connected to."""

    # the second chunk is on its way while the first is drawn
    depth = 2

    def __init__(
        self,
        prompts: Sequence[str],
        checkpoint: str,
        settings: Settings,
        described: dict[str, Any] | None,
        wait: float,
    ) -> None:
        import ray

        self.ray, self.prompts, self.longest_wait = ray, prompts, wait
        self.weights = fingerprint(checkpoint)
        self.arguments = (checkpoint, settings, described)
        self.actor_class: Any = ray.remote(Painter)
        self.actors: dict[str, Any] = {}  # those that are ready, by name
        self.machines: dict[str, tuple[str, str]] = {}  # actor: its node's id and the machine's name
        self.starting: dict[Any, tuple[str, Any]] = {}  # the call of load: name and actor
        self.flying: dict[Any, tuple[str, Chunk]] = {}
        self.tries: dict[str, int] = {}
        self.refused: dict[str, BaseException] = {}  # nodes that cannot draw
        self.started = 0
        self.looked = self.seen = time.monotonic()
        self.look_around()

    def look_around(self) -> None:
        """Start an actor for every GPU that has none, forget those whose machine has gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.looked = time.monotonic()
        alive = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        for name, (node_id, _) in list(self.machines.items()):
            if node_id not in alive:
                self.forget(name)
        for node_id, node in alive.items():
            present = sum(of == node_id for of, _ in self.machines.values())
            if node_id in self.refused:
                continue
            gpus = int(node["Resources"].get("GPU", 0))
            for _ in range(gpus - present):
                self.started += 1
                name = f"{node['NodeManagerHostname']} ({node_id[:6]}, actor {self.started})"
                place = NodeAffinitySchedulingStrategy(node_id, soft=False)
                options = {"num_gpus": 1, "num_cpus": 0, "scheduling_strategy": place}
                actor: Any = self.actor_class.options(**options).remote(*self.arguments)
                self.machines[name] = (node_id, name)
                self.starting[actor.load.remote(self.weights, gpus)] = (name, actor)

    def forget(self, name: str) -> None:
        """Take an actor out; the loop gives its chunks to others."""
        self.machines.pop(name, None)
        self.actors.pop(name, None)
        self.starting = {call: entry for call, entry in self.starting.items() if entry[0] != name}

    def workers(self) -> list[str]:
        """Raises ConnectionError when no actor came up in time, and what a machine said where all refuse."""
        now = time.monotonic()
        if now - self.looked > LOOK_AROUND:
            self.look_around()
        if self.actors or self.flying:
            self.seen = now
        elif self.refused and not self.starting:
            raise next(iter(self.refused.values()))
        elif now - self.seen > self.longest_wait:
            raise ConnectionError(
                f"cluster: no GPU of it could be had for {self.longest_wait:.0f} s; "
                "see ray status for what its machines have, and what others use"
            )
        return list(self.actors)

    def submit(self, worker: str, chunk: Chunk) -> None:
        prompts = [self.prompts[picture.prompt] for picture in chunk]
        self.flying[self.actors[worker].draw.remote(chunk, prompts)] = (worker, chunk)

    def wait(self) -> list[Outcome[Any]]:
        calls = [*self.flying, *self.starting]
        if not calls:
            time.sleep(LOOK)
            return []
        ready, _ = self.ray.wait(calls, num_returns=1, timeout=LOOK)
        outcomes = []
        for call in ready:
            if call in self.starting:
                self.settle_start(call)
            elif call in self.flying:
                outcomes += self.settle(call)
        return outcomes

    def settle_start(self, call: Any) -> None:
        """Take an actor in that is ready, or note why it is not."""
        name, actor = self.starting.pop(call)
        node_id = self.machines[name][0]
        try:
            self.ray.get(call)
            self.actors[name] = actor
        except self.ray.exceptions.RayTaskError as error:
            # the machine itself is well, but cannot draw: another try would end the same
            cause = error.cause
            kind = type(cause) if isinstance(cause, ValueError | OSError) else ConnectionError
            self.refused[node_id] = kind(f"{name}: {cause}")
            logger.error("batch: %s cannot draw: %s", name, cause)
            self.forget(name)
            self.ray.kill(actor)
        except self.ray.exceptions.RayError as error:
            self.tries[node_id] = self.tries.get(node_id, 0) + 1
            if self.tries[node_id] >= LARGEST_TRIES:
                self.refused[node_id] = ConnectionError(f"{name}: its processes die before they are ready: {error}")
            logger.warning("batch: %s died before it was ready", name)
            self.forget(name)

    def settle(self, call: Any) -> list[Outcome[Any]]:
        """Return how a chunk ended; nothing where its actor died, for then the loop gives it to another."""
        worker, chunk = self.flying.pop(call)
        try:
            return [Outcome(worker, chunk, self.ray.get(call))]
        except self.ray.exceptions.RayTaskError as error:
            if is_out_of_memory(error.cause):
                return [Outcome(worker, chunk, error=error.cause)]
            if isinstance(error.cause, torch.AcceleratorError):
                self.drop(worker, error.cause)
                return []
            return [Outcome(worker, chunk, error=ValueError(f"{worker}: {error.cause}"))]
        except self.ray.exceptions.RayError as error:
            self.drop(worker, error)
            return []

    def drop(self, worker: str, reason: BaseException) -> None:
        """Kill the actor; a new one starts on its GPU, if the machine is still there."""
        if worker not in self.actors:
            return
        logger.warning("batch: lost %s: %s", worker, str(reason).splitlines()[0])
        self.ray.kill(self.actors[worker])
        self.forget(worker)
        self.looked = 0.0

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """End all actors, in the middle of a step if need be."""
        for actor in [*self.actors.values(), *(actor for _, actor in self.starting.values())]:
            self.ray.kill(actor)


def draw_on_cluster(
    prompts: Sequence[str],
    checkpoint: str | Path,
    settings: Settings,
    pictures: Sequence[Picture],
    address: str = "auto",
    chunk: int | None = None,
    done: frozenset[int] = frozenset(),
    described: dict[str, Any] | None = None,
    grace: float = GRACE,
    wait: float = WAIT_FOR_ACTORS,
    report: dict[str, Any] | None = None,
) -> Generator[tuple[Picture, Any], None, None]:
    """Yield each of `pictures` that is not in `done` as it finishes, drawn on the GPUs of a Ray cluster.

    They come as tensors [3, H, W] in [-1, 1]; with the settings `described`, as the PNG files of `encode_png`, made
    where they are drawn. `checkpoint` is the path on every machine; one without it, or with other weights there, is
    left out with a log. `report` gets "drawn", the pictures of each worker.

    Raises ValueError without ray, ConnectionError where no cluster or no GPU of it can be reached, what the machines
    say where none has the checkpoint, and as `complete` does.
    """
    settings = complete(settings, checkpoint)
    left = sum(picture.number not in done for picture in pictures)
    if not left:
        return
    ray = connect(address)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    size = chunk or auto_chunk(settings.width, settings.height, left, max(1, gpus))
    queue = Queue(cut(pictures, size, done))
    if report is not None:
        report["drawn"] = queue.drawn
    path = str(Path(checkpoint).absolute())
    with closing(RayPool(prompts, path, settings, described, wait)) as pool:
        for picture, pixels in carry_out(queue, pool, grace):
            yield picture, torch.from_numpy(pixels.copy()) if described is None else pixels


def connect(address: str) -> Any:
    """Return ray, connected to the cluster, whose machines get this very code. Raises ConnectionError."""
    try:
        import ray
    except ImportError:
        raise ValueError("cluster: ray is not installed on this machine; pip install '.[cluster]'") from None
    if not ray.is_initialized():
        package = Path(__file__).parents[1]
        environment = {"py_modules": [str(package)], "excludes": ["**/__pycache__"]}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
    return ray
