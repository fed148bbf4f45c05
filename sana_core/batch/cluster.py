"""Batches on every GPU of a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from .draw import Settings, complete
from .fingerprint import fingerprint
from .hold import Hold
from .loop import GRACE, carry_out
from .painter import Order
from .plan import Picture, auto_chunk, cut
from .queue import Queue
from .ray_pool import WAIT_FOR_ACTORS, RayPool
from .windows import check_prompts


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
    shared: Hold | None = None,
) -> Generator[tuple[Picture, Any], None, None]:
    """Yield each of `pictures` that is not in `done` as it finishes, drawn on the GPUs of a Ray cluster.

    They come as tensors [3, H, W] in [-1, 1]; with the settings `described`, as the PNG files of `encode_png`, made
    where they are drawn. Into a folder `shared` by all machines, which this run holds, they are written there, by the
    names of `file_name`, and come as the digests of the files; a machine that cannot write there is left out.
    `checkpoint` is the path on every machine. The rest is as in `carry_out_order`.

    Raises as `check_prompts`, `complete` and `carry_out_order` do.
    """
    check_prompts(prompts)
    path = str(Path(checkpoint).absolute())
    order = Order(complete(settings, path), {path: fingerprint(path)}, path, path, path, described=described)
    if shared is not None:
        order = order._replace(shared=(str(shared.folder.absolute()), shared.run.name))
    drawing = carry_out_order(order, prompts, pictures, address, chunk, done, grace, wait, report)
    with closing(drawing) as drawn:
        for picture, result in drawn:
            yield picture, torch.from_numpy(result.copy()) if described is None else result


def carry_out_order(
    order: Order,
    prompts: Sequence[Any],
    pictures: Sequence[Picture],
    address: str = "auto",
    chunk: int | None = None,
    done: frozenset[int] = frozenset(),
    grace: float = GRACE,
    wait: float = WAIT_FOR_ACTORS,
    report: dict[str, Any] | None = None,
    changed: Mapping[str, torch.Tensor] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Generator[tuple[Picture, Any], None, None]:
    """Yield each of `pictures` that is not in `done` as it finishes, in the form that `order` wants.

    `prompts` are text, or encoded where the order has no encoder. A machine without the checkpoint, or with other
    weights there, is left out with a log. `report` gets "drawn", the pictures of each worker. `changed` are weights of
    the transformer that are not those of the file. `poll`, called at least twice a second, cancels by raising; that,
    and closing the iterator, stops all actors at once.

    Raises ValueError without ray, ConnectionError where no cluster or no GPU of it can be reached, and what a machine
    said where none is left.
    """
    left = sum(picture.number not in done for picture in pictures)
    if not left:
        return
    settings = order.settings
    with connected(address) as ray:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        size = chunk or auto_chunk(settings.width, settings.height, left, max(1, gpus))
        queue = Queue(cut(pictures, size, done))
        if report is not None:
            report["drawn"] = queue.drawn
        with closing(RayPool(order, prompts, wait, changed, poll)) as pool:
            if not chunk:
                queue.limits = pool.largest
            yield from carry_out(queue, pool, grace)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A context with ray, connected to the cluster; whoever was connected before it stays so."""
    ray = import_ray()
    before = ray.is_initialized()
    connect(address)
    try:
        yield ray
    finally:
        # a process that stays, as a server does, would die with the cluster
        if not before:
            ray.shutdown()


def import_ray() -> Any:
    """Return ray. Raises ValueError where it is not installed."""
    try:
        import ray
    except ImportError:
        raise ValueError("cluster: ray is not installed on this machine; pip install '.[cluster]'") from None
    return ray


def connect(address: str) -> Any:
    """Return ray, connected to the cluster, whose machines get this very code. Raises ConnectionError."""
    ray = import_ray()
    if not ray.is_initialized():
        if ":" in address and "://" not in address:
            try:
                # ray.init itself would go on trying for twelve minutes
                ray._raylet.GcsClient(address=address)
            except ray.exceptions.RayError as error:
                raise ConnectionError(
                    f"cluster: nobody answers at {address} ({error}); is Ray running there?"
                ) from None
        package = Path(__file__).parents[1]
        environment = {"py_modules": [str(package)], "excludes": ["**/__pycache__"]}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
    return ray
