"""GPUs as Intel makes them: some have no float64 (Arc A), and some do not tell how much of their memory is free.

They are pretended CUDA GPUs. `has_fp64` is what torch.xpu.get_device_properties has.
"""

import contextlib
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pictures import write_pictures
from pretend_card import pretend_cards
from test_training_sprint import sprint  # noqa: F401
from tiny import random_prompt, tiny_transformer

import sana_core
from sana_core import decode_latents, load_autoencoder
from sana_core.doctor.machine import describe_card
from sana_core.model.forward import prepare, shard_velocity, velocity
from sana_core.model.row_shards import sum_dtype
from sana_core.runtime.accelerator import free_bytes, has_float64, memory_info
from sana_core.split.generate import Split
from sana_core.training import trainer
from sana_core.training.settings import Loss, Method, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import read_losses

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SIZE = {"width": 128, "height": 128, "steps": 2}
TOTAL = 16 * 10**9
GPU = torch.device("cuda", 0)


@contextlib.contextmanager
def intel_gpus(patch, count=1):
    """Pretended GPUs that have no float64 and do not tell their free memory."""
    with pretend_cards(count, total=TOTAL) as cards:
        real = cards.put

        def put(tensor, *place):
            if tensor.dtype in (torch.float64, torch.complex128):
                raise RuntimeError("Required aspect fp64 is not supported on the device")
            return real(tensor, *place)

        def mem_get_info(device=None):
            raise RuntimeError("The device (Intel(R) UHD) doesn't support querying the available free memory.")

        def properties(device=None):
            return SimpleNamespace(has_fp64=False, total_memory=TOTAL, major=8, minor=0, name="Intel", gcnArchName="")

        patch.setattr(cards, "put", put)
        patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        patch.setattr(torch.cuda, "get_device_properties", properties)
        yield cards


@pytest.fixture
def gpus(monkeypatch):
    """A function that returns a context with that number of Intel GPUs."""
    return lambda count=1: intel_gpus(monkeypatch, count)


def test_a_gpu_that_hides_its_free_memory_has_what_this_process_does_not_use(gpus, caplog):
    caplog.set_level(logging.INFO)
    with gpus():
        assert memory_info(GPU) == (TOTAL, TOTAL)
        held = torch.zeros(1000, device=GPU)
        assert (free_bytes(GPU), held.device) == (TOTAL - 4000, GPU)
    assert "cuda:0: its driver does not report free memory" in caplog.text


def test_a_broken_gpu_is_not_taken_for_one_that_hides_its_free_memory():
    with pretend_cards() as cards:
        cards.fail(GPU, "driver")
        with pytest.raises(RuntimeError):
            torch.ones(1, device=GPU)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            memory_info(GPU)


def test_who_has_float64(gpus):
    assert has_float64(torch.device("cpu")) and not has_float64(torch.device("mps"))
    with pretend_cards():
        assert has_float64(GPU)
    with gpus():
        assert not has_float64(GPU) and sum_dtype(GPU) is torch.float32
        with pytest.raises(RuntimeError, match="fp64"):
            torch.ones(1, device=GPU).double()


@pytest.mark.parametrize("size", [(4, 4), (6, 8)])
def test_position_embeddings_of_2k_and_4k_need_no_float64(gpus, size):
    transformer = tiny_transformer("sana-4k")
    embeds, mask = random_prompt(2)
    x, timestep = torch.randn(2, 32, *size), torch.full((2,), 500.0)
    expected = velocity(transformer, x, timestep, prepare(transformer, embeds, mask, *size))
    with gpus(), torch.no_grad():
        transformer.to(GPU)
        constants = prepare(transformer, embeds.to(GPU), mask.to(GPU), *size)
        got = velocity(transformer, x.to(GPU), timestep.to(GPU), constants)
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("count", [2, 3])
def test_a_split_adds_its_sums_without_float64(gpus, count):
    transformer = tiny_transformer("sana-4k")
    embeds, mask = random_prompt(2)
    x, timestep = torch.randn(2, 32, 9, 16), torch.full((2,), 500.0)
    expected = velocity(transformer, x, timestep, prepare(transformer, embeds, mask, 9, 16))
    with gpus(count) as cards, torch.no_grad():
        models = [tiny_transformer("sana-4k").to(device) for device in cards.devices]
        constants = [
            prepare(model, embeds.to(device), mask.to(device), 9, 16)
            for model, device in zip(models, cards.devices, strict=True)
        ]

        def work(shard):
            def forward(*arguments):
                return velocity(models[shard.member], *arguments)

            return shard_velocity(forward, shard, timestep, constants[shard.member], None, None, [])

        got = Split(cards.devices).run(x, work)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_batch_is_generated_on_every_gpu(gpus, checkpoint):
    expected = sana_core.generate(PROMPTS, checkpoint, count=2, chunk=1, devices=["cpu"], **SIZE)
    with gpus(2):
        got = sana_core.generate(PROMPTS, checkpoint, count=2, **SIZE)
        shared = sana_core.generate(PROMPTS[:1], checkpoint, split=True, **SIZE)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(shared[0], expected[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("devices", [None, ["cuda:0", "cuda:1"]])
def test_a_decode_plans_with_the_memory_of_the_gpu(gpus, checkpoint, devices):
    latents = torch.randn(1, 32, 8, 4)
    expected = decode_latents(load_autoencoder(checkpoint), latents)
    with gpus(2):
        got = decode_latents(load_autoencoder(checkpoint).to(GPU), latents, devices=devices)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["flow", "consistency"])
def test_training_needs_neither(gpus, checkpoint, sprint, tmp_path, kind):  # noqa: F811
    write_pictures(tmp_path / "pictures", 3)
    settings = TrainingSettings(
        str(checkpoint if kind == "flow" else sprint),
        str(tmp_path / "out"),
        (Phase((str(tmp_path / "pictures"),), 32, steps=2),),
        dtype="float32",
        device="cuda:0",
        method=Method(rank=2),
        loss=Loss(kind),
        validation=Validation(2, prompts=("a red circle",), steps=2, width=32, height=32),
        cache=str(tmp_path / "cache"),
    )
    trainer.train(check_settings(replace(settings, device="cpu", out=str(tmp_path / "cpu"))))
    with gpus():
        trainer.train(check_settings(settings))
    assert read_losses(tmp_path / "out") == pytest.approx(read_losses(tmp_path / "cpu"), rel=1e-3)


def test_the_doctor_examines_the_gpu(gpus):
    with gpus():
        assert "16.0 GB, 16.0 free" in describe_card(GPU)
