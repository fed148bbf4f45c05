"""Cancel inside one undivided decode, encode or tile, and devices where one alone can work."""

import threading

import pytest
import torch
from decoders import noise
from test_decode_faults import Cancelled

from sana_core import decode_latents, encode_images
from sana_core.decode import Tiles
from sana_core.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")


def run(bundled, method, poll):
    if method == "encode":
        return encode_images(bundled, noise(1, 3, 128, 128).clamp(-1, 1), "whole", poll=poll)
    return decode_latents(bundled, noise(1, 32, 4, 4), method, tiles=Tiles(128, 32), poll=poll)


@pytest.mark.parametrize("method", ["whole", "tiles", "encode"])
def test_an_undivided_run_polls_before_every_layer_and_gives_the_librarys_bits(bundled, method):
    polls = []
    got = run(bundled, method, lambda: polls.append(threading.current_thread()))
    part = bundled.encoder if method == "encode" else bundled.decoder
    layers = [module for module in part.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(polls) > len(layers) > 20
    assert set(polls) == {threading.current_thread()}
    pixels = noise(1, 3, 128, 128).clamp(-1, 1).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = part(pixels if method == "encode" else noise(1, 32, 4, 4))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("method", ["whole", "tiles", "encode"])
def test_a_cancel_ends_it_before_the_next_layer(bundled, method):
    part = bundled.encoder if method == "encode" else bundled.decoder
    layers = [module for module in part.modules() if isinstance(module, torch.nn.Conv2d)]
    asked, ran_after = [], []

    def poll():
        if asked:
            raise Cancelled

    def note(*ignored):
        if asked:
            ran_after.append(1)

    hooks = [layers[len(layers) // 2].register_forward_pre_hook(lambda *ignored: asked.append(1))]
    hooks += [layer.register_forward_hook(note) for layer in layers]
    try:
        with pytest.raises(Cancelled):
            run(bundled, method, poll)
    finally:
        for hook in hooks:
            hook.remove()
    assert asked and not ran_after
    assert run(bundled, method, lambda: None).isfinite().all()


@pytest.mark.parametrize("method", ["whole", "tiles"])
def test_devices_are_refused_where_one_alone_works(bundled, method):
    message = f"^devices: got 2 for method {method}, which runs on the VAE's device; .* or no devices$"
    with pytest.raises(InputError, match=message):
        decode_latents(bundled, noise(1, 32, 4, 4), method, devices=["cpu", "cpu"])
    with pytest.raises(InputError, match=message.replace("got 2", "got 1")):
        decode_latents(bundled, noise(1, 32, 4, 4), method, devices=["meta"])
    # its own
    assert decode_latents(bundled, noise(1, 32, 4, 4), method, devices=["cpu"]).isfinite().all()
