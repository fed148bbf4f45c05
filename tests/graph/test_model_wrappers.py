"""What core and other packs hang around the call of a model, on ours."""

import pytest
import torch
from loading import ksampler, through

STEPS = 16


@pytest.fixture
def calls(host, base_graph):
    """A list that grows by the shape of the latents whenever the transformer itself runs."""
    graph = {"load": base_graph()["load"], "catch": ("Catch", {"value": ["load", 0], "name": "model"})}
    transformer = host.run(graph)["model"].model.diffusion_model
    seen = []
    hook = transformer.patch_embed.proj.register_forward_pre_hook(
        lambda module, args: seen.append(tuple(args[0].shape))
    )
    yield seen
    hook.remove()


class PassThrough:
    """A wrapper that writes into its latents after the model has read them."""

    RETURN_TYPES, FUNCTION = ("MODEL",), "patch"
    arguments: list = []

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model):
        from comfy.patcher_extension import WrappersMP

        def wrapper(executor, *args, **kwargs):
            self.arguments.append((args, kwargs, executor.class_obj))
            velocity = executor(*args, **kwargs)
            args[0].zero_()
            return velocity

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", wrapper)
        return (model,)


def run(host, graph):
    """Run `graph` on the model that is loaded already; return its latents."""
    return host.run(graph, keep_cache=True)["latent"]["samples"]


def test_a_wrapper_sees_core_s_arguments_and_changes_nothing(host, base_graph, monkeypatch):
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "PassThrough", PassThrough)
    monkeypatch.setattr(PassThrough, "arguments", [])
    plain = host.run(base_graph())["latent"]["samples"]
    assert torch.equal(run(host, through(base_graph(), "PassThrough")), plain)
    assert len(PassThrough.arguments) == 8
    (x, timesteps, context, control, options), named, model = PassThrough.arguments[0]
    assert x.shape == (2, 32, 4, 4) and timesteps.shape == (2,) and context.shape[:2] == (2, 300) and control is None
    assert len(options["uuids"]) == 2 and options["sigmas"].shape == (1,) and {"prompt"} < set(named)
    assert type(model).__name__ == "SanaDiffusionModel"


@pytest.mark.parametrize("build", [dict, ksampler], ids=["SanaNodesSampler", "KSampler"])
@pytest.mark.parametrize("name", ["EasyCache", "LazyCache"])
def test_core_s_caches_skip_steps_on_a_similar_picture(host, base_graph, calls, name, build):
    settings = {"start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    plain = run(host, build(base_graph(steps=STEPS)))
    assert len(calls) == STEPS
    calls.clear()
    graph = build(through(base_graph(steps=STEPS), name, reuse_threshold=0.0, **settings))
    assert torch.equal(run(host, graph), plain) and len(calls) == STEPS
    calls.clear()
    graph = build(through(base_graph(steps=STEPS), name, reuse_threshold=0.2, **settings))
    fast = run(host, graph)
    assert STEPS // 3 < len(calls) < STEPS - 2
    # 0.05 to 0.15 of the spread here; 1.4 where EasyCache's result falls into the latents themselves
    assert 0 < (fast - plain).abs().mean() < 0.2 * plain.std()


def test_caches_can_tell_the_pass_with_perturbed_attention_from_the_plain_one(host, base_graph, monkeypatch):
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "PassThrough", PassThrough)
    monkeypatch.setattr(PassThrough, "arguments", [])
    host.run(through(through(base_graph(steps=STEPS), "PassThrough"), "SanaNodesPAG", "pag", scale=2.0, blocks="3"))
    passes = {tuple(args[-1]["uuids"]) for args, _, _ in PassThrough.arguments}
    assert len(PassThrough.arguments) == STEPS and len(passes) == 1 and len(set(*passes)) == 3


def test_easy_cache_and_perturbed_attention_together(host, base_graph, calls):
    graph = through(base_graph(steps=STEPS), "SanaNodesPAG", "pag", scale=2.0, blocks="3")
    plain = run(host, graph)
    calls.clear()
    settings = {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    fast = run(host, through(graph, "EasyCache", **settings))
    assert len(calls) < STEPS - 2 and {shape[0] for shape in calls} == {3}
    # 0.03 of the spread here, 0.07 where the pass with perturbed attention shares its place with another
    assert (fast - plain).abs().mean() < 0.05 * plain.std()
