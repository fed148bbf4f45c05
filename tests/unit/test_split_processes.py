"""A picture that processes share by gloo, against the same one drawn by one process."""

import multiprocessing

import psutil
import pytest
import torch
import torch.distributed as dist
from setup import ROOT

from sana_core.batch.pipeline import Conditioning, SamplingSettings, load_models, resolve_settings, sample
from sana_core.batch.plan import ImageSpec
from sana_core.cluster.worker import Job, Worker

# as each process has
pytestmark = pytest.mark.usefixtures("one_thread")

TINY, POSTERS = ROOT / "tests" / "models" / "sana-tiny", ROOT / "demo" / "sana-posters"
PICTURE = ImageSpec(0, 0, 3)
SETTINGS = SamplingSettings(128, 160, 3, 4.5)
HALF = SETTINGS._replace(height=384, guidance_interval=(0.0, 0.5))
PERTURBED = SETTINGS._replace(pag_scale=2.0, pag_blocks="1")
# models, speeds, settings, and the sizes of the groups that members were in, that of all among them
CASES = {
    "a prompt each": (TINY, [1.0, 1.0], SETTINGS, {1, 2}),
    "rows alone": (TINY, [1.0, 2.0, 1.0], HALF, {3}),
    "a prompt for two, then rows of all": (TINY, [1.0] * 4, HALF, {2, 4}),
    "a perturbed pass each": (TINY, [1.0] * 3, PERTURBED, {1, 3}),
    "a prompt each of another model": (POSTERS, [1.0, 1.0], SETTINGS._replace(width=96), {1, 2}),
}


def texts_of(width):
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(1, 9, width, generator=generator), torch.ones(1, 9, dtype=torch.long)
    return text, (torch.zeros(1, 300, width), torch.ones(1, 300, dtype=torch.long))


def be_member(rank, speeds, settings, port, checkpoint, results):
    torch.set_num_threads(1)
    worker = Worker(Job(settings, {}, str(checkpoint)).pack())
    worker.load(1, {})
    worker.store = dist.TCPStore("127.0.0.1", port, len(speeds), is_master=False)
    texts = texts_of(worker.models.transformer.config.caption_channels)
    drawn = worker.generate_sharded(rank, speeds, ("127.0.0.1", port), PICTURE, *texts)
    sizes = set(worker.split.groups)
    worker.leave()
    results.put((rank, None if drawn is None else drawn.numpy(), sizes))


def draw(speeds, settings, checkpoint):
    """Return what each member of a picture returns, in processes of their own."""
    store = dist.TCPStore("127.0.0.1", 0, len(speeds), is_master=True, wait_for_workers=False)
    # a fork of the tests' own process would have its locks without the threads that hold them
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusers.models.transformers.sana_transformer", "torch._dynamo"])
    results = context.SimpleQueue()
    members = [
        context.Process(target=be_member, args=(rank, speeds, settings, store.port, checkpoint, results), daemon=True)
        for rank in range(len(speeds))
    ]
    for process in members:
        process.start()
    found = sorted((results.get() for _ in members), key=lambda each: each[0])
    for process in members:
        process.join(60)
        assert process.exitcode == 0
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checkpoint, speeds, settings, groups", CASES.values(), ids=CASES)
def test_processes_draw_what_one_draws(checkpoint, speeds, settings, groups):
    settings = resolve_settings(settings, checkpoint)
    first, *others = draw(speeds, settings, checkpoint)
    models = load_models(checkpoint, torch.device("cpu"), settings)
    text, negative = texts_of(models.transformer.config.caption_channels)
    expected = sample(models, settings, (PICTURE,), Conditioning([text], negative))
    assert (torch.from_numpy(first[1]) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert all(drawn is None for _, drawn, _ in others) and all(sizes == groups for *_, sizes in (first, *others))


def test_the_store_listens_only_on_the_address_that_the_members_get():
    pytest.importorskip("ray")
    worker = Worker(Job(SETTINGS, {}, str(TINY)).pack())
    host, port = worker.open_store(2)
    connections = psutil.Process().net_connections("tcp")
    listening = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == [host]
    member = dist.TCPStore(host, port, 2, is_master=False)
    member.set("greeting", "hello")
    assert worker.store.get("greeting") == b"hello"
