"""A picture that processes share by gloo, against the same one drawn by one process."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from sana_core.batch.draw import Conditioning, Settings, load_models, resolve_settings, sample
from sana_core.batch.plan import Picture
from sana_core.cluster.worker import Job, Worker

# as each process has
pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)), torch.ones(1, 9, dtype=torch.long)
NEGATIVE = torch.zeros(1, 300, 64), torch.ones(1, 300, dtype=torch.long)


def settings_of(rows):
    return Settings(128, 32 * rows, 2, 4.5)


def member(rank, world, rows, port, checkpoint, folder):
    torch.set_num_threads(1)
    settings = resolve_settings(settings_of(rows), checkpoint)
    worker = Worker(Job(settings, {}, str(checkpoint)).pack())
    worker.load(1, {})
    worker.store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    drawn = worker.draw_rows(rank, [1, 2, 1][:world], ("127.0.0.1", port), Picture(0, 0, 3), TEXT, NEGATIVE)
    worker.leave()
    torch.save(drawn, f"{folder}/{rank}.pt")


def draw(world, rows, checkpoint, folder):
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    context = torch.multiprocessing.get_context("spawn")
    started = [
        context.Process(target=member, args=(i, world, rows, store.port, checkpoint, folder)) for i in range(world)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(250)
        assert process.exitcode == 0
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(world)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world, rows, heights", [(2, 5, [2, 3]), (3, 12, [3, 6, 3])])
def test_processes_draw_what_one_draws(checkpoint, tmp_path, world, rows, heights):
    parts = draw(world, rows, checkpoint, tmp_path)
    assert [part.shape[2] for part in parts] == heights
    settings = resolve_settings(settings_of(rows), checkpoint)
    models = load_models(checkpoint, torch.device("cpu"), settings)
    expected = sample(models, settings, (Picture(0, 0, 3),), Conditioning([TEXT], NEGATIVE))
    assert (torch.cat(parts, dim=2) - expected).abs().max() < 1e-5 * expected.abs().max()
