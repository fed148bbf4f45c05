"""A picture that processes share by gloo, against the same one drawn by one process."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from sana_core.batch.draw import Settings, decode, load_models, resolve_settings, sample
from sana_core.batch.plan import Picture
from sana_core.split.processes import connect
from sana_core.split.rows import share_rows
from sana_core.split.worker import draw_rows

# as each process has
pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)), torch.ones(1, 9, dtype=torch.long)
NEGATIVE = torch.zeros(1, 300, 64), torch.ones(1, 300, dtype=torch.long)


def settings_of(rows):
    return Settings(128, 32 * rows, 2, 4.5)


def member(rank, world, rows, port, checkpoint, folder):
    torch.set_num_threads(1)
    settings = resolve_settings(settings_of(rows), checkpoint)
    models = load_models(checkpoint, torch.device("cpu"), "float32", checkpoint)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    spans = share_rows(rows, [1, 2, 1][:world])
    exchange = connect(store, rank, world, torch.device("cpu"))
    drawn = draw_rows(models, settings, Picture(0, 0, 3), TEXT, NEGATIVE, exchange, spans)
    dist.destroy_process_group()
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
    parts = [torch.load(f"{folder}/{rank}.pt") for rank in range(world)]
    return parts[0][0], [pixels for _, pixels in parts]


# rows of the latents that are too few for bands of the decoder's attention, and as many as three processes need
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world, rows, heights", [(2, 5, [2, 3]), (3, 12, [4, 4, 4])])
def test_processes_draw_what_one_draws(checkpoint, tmp_path, world, rows, heights):
    latents, parts = draw(world, rows, checkpoint, tmp_path)
    assert [part.shape[1] for part in parts] == [32 * height for height in heights]
    settings = resolve_settings(settings_of(rows), checkpoint)
    models = load_models(checkpoint, torch.device("cpu"), "float32", checkpoint)
    expected = sample(models, settings, (Picture(0, 0, 3),), [TEXT], NEGATIVE)
    assert (latents - expected[0]).abs().max() < 1e-5 * expected.abs().max()
    whole = decode(models.autoencoder, latents[None])[0]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=0 if rows == 5 else 1e-5, rtol=0)
