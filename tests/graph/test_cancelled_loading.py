"""Cancel, at every moment of ComfyUI's loading and unloading, leaves each model where ComfyUI lists it."""

import time

import pytest
import torch
from fake_cuda import pack
from host_cards import host_cards
from loaded_models import misplaced
from test_several_gpus import batch_graph, edges, files, loaded_on  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def interrupt_move(host, monkeypatch):
    """A function that makes the next move of a model of class `kind` to `target` interrupt the run.

    It does so when the move reaches the part `name`. The parts before have moved by then.
    """

    def prepare(kind, name, target):
        real, moves = torch.nn.Module.to, []

        def move(module, *args, **options):
            if moves or type(module).__name__ != kind or target not in args:
                return real(module, *args, **options)
            moves.append(target)
            part = module.get_submodule(name)
            inner = part._apply

            def interrupt(*args, **options):
                del part._apply
                host.nodes.interrupt_processing()
                # The batch's threads notice it.
                time.sleep(0.6)
                return inner(*args, **options)

            part._apply = interrupt
            return real(module, *args, **options)

        monkeypatch.setattr(torch.nn.Module, "to", move)

    yield prepare
    host.nodes.interrupt_processing(False)


@pytest.mark.parametrize(
    "kind, part, target",
    [
        ("SanaAutoencoder", "decoder", CPU),
        ("SanaAutoencoder", "decoder", GPU),
        ("SanaModel", "diffusion_model.transformer_blocks.2", CPU),
        ("SanaModel", "diffusion_model.transformer_blocks.2", GPU),
    ],
)
def test_a_batch_cancelled_while_a_model_moves_leaves_it_whole(host, monkeypatch, interrupt_move, kind, part, target):
    import comfy.model_management as management

    expected = host.run(batch_graph(), keep_cache=True)["image"]
    with host_cards(host, 1):
        # Model and VAE take each other's place, as on a GPU with memory for one.
        free = management.free_memory
        monkeypatch.setattr(management, "free_memory", lambda _, *args, **options: free(10**18, *args, **options))
        interrupt_move(kind, part, target)
        with pytest.raises(InterruptedError):
            host.run(batch_graph(), keep_cache=True)
        host.nodes.interrupt_processing(False)
        assert not misplaced()
        image = host.run(batch_graph(), keep_cache=True)["image"]
        torch.testing.assert_close(image.cpu(), expected, atol=2e-4, rtol=0)
        assert not misplaced()


def test_a_batch_cancelled_while_the_vae_loads_for_a_control_image(host, files, edges, interrupt_move):  # noqa: F811
    expected = host.run(batch_graph(control=edges), keep_cache=True)["image"]
    with host_cards(host, 1):
        interrupt_move("SanaAutoencoder", "decoder", GPU)
        with pytest.raises(InterruptedError):
            host.run(batch_graph(control=edges), keep_cache=True)
        assert not misplaced()
        assert "SanaAutoencoder" in {kind for kind, *_ in loaded_on()}
        image = host.run(batch_graph(control=edges), keep_cache=True)["image"]
        torch.testing.assert_close(image.cpu(), expected, atol=2e-4, rtol=0)


def test_a_batch_ends_after_a_load_that_outlasts_the_run(host, monkeypatch, interrupt_move):
    import comfy.model_management as management

    thread = pack("sana_core.engine.local")
    with host_cards(host, 1):
        free = management.free_memory
        monkeypatch.setattr(management, "free_memory", lambda _, *args, **options: free(10**18, *args, **options))
        monkeypatch.setattr(thread, "LIMITS", thread.LIMITS._replace(ending=0.0))
        interrupt_move("SanaModel", "diffusion_model.transformer_blocks.2", GPU)
        with pytest.raises(InterruptedError):
            host.run(batch_graph(), keep_cache=True)
        assert not misplaced()
        assert "SanaModel" in {kind for kind, *_ in loaded_on()}
