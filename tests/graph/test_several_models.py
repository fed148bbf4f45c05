"""Several models in one sampling, as nodes of other packs have them: each is computed as it is alone.

Refiners and autoguidance of public packs wrap the call of a MODEL by `set_model_unet_function_wrapper` and call another
MODEL in it, with the arguments of the first one. So do the nodes here.
"""

import itertools
import shutil

import pytest
import torch
from fake_cuda import pack
from safetensors.torch import load_file, save_file
from test_lora import ours, written

STEPS = 6
BOUND = 2e-5
MODELS = {"first": ["load", 0], "second": ["other", 0], "with a LoRA": ["lora", 0]}
KSAMPLER = {"steps": STEPS, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple"}


class Relay:
    """Calls the last of the models above each sigma of `above`, and `both` models where the first is to guide too."""

    RETURN_TYPES, FUNCTION = ("MODEL",), "patch"

    @classmethod
    def INPUT_TYPES(cls):
        next_models = {f"model{number}": ("MODEL",) for number in range(2)}
        return {
            "required": {"model": ("MODEL",), "above": ("*",)},
            "optional": {"both": ("BOOLEAN", {"default": False}), **next_models},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def patch(self, model, above, both=False, **next_models):
        from comfy.model_management import load_models_gpu

        models = [model, *next_models.values()]

        def call(number, a):
            load_models_gpu(models[number : number + 1])
            return models[number].model.apply_model(a["input"], a["timestep"], **a["c"])

        def wrapper(apply_model, a):
            number = sum(float(a["timestep"].max()) < sigma for sigma in above)
            if both:
                call(len(models) - 1, a)
            return call(number, a)

        patched = model.clone()
        patched.set_model_unet_function_wrapper(wrapper)
        return (patched,)


@pytest.fixture(scope="module")
def second(host):
    """The name of the bundled model with other weights."""
    folder = host.models / "diffusers" / "second"
    shutil.copytree(host.models / "diffusers" / "sana-tiny", folder)
    file = next((folder / "transformer").glob("*.safetensors"))
    noise = torch.Generator().manual_seed(0)
    tensors = {
        name: value + 0.3 * value.float().std().nan_to_num() * torch.randn(value.shape, generator=noise).to(value)
        for name, value in load_file(file).items()
    }
    save_file(tensors, file)
    yield folder.name
    shutil.rmtree(folder)


@pytest.fixture
def graph_of(base_graph, host, second, install, monkeypatch):
    """A function of nodes that gives the base graph with three models."""
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "Relay", Relay)
    name = install("loras", "third.safetensors", written("kohya"))

    def build(**nodes):
        graph = base_graph(steps=STEPS)
        graph = {key: graph[key] for key in ("load", "positive", "negative", "empty")}
        graph |= {"other": ("SanaNodesLoader", {"model": second}), "lora": ours(name)}
        return {**graph, **nodes, "catch": ("Catch", {"value": [list(nodes)[-1], 0], "name": "latent"})}

    return build


def part(model, latent, start, end):
    """Core's sampler for the steps from `start` to `end`."""
    links = {"model": model, "positive": ["positive", 0], "negative": ["negative", 0], "latent_image": latent}
    steps = {"start_at_step": start, "end_at_step": end, "noise_seed": 1}
    noise = {"add_noise": "disable" if start else "enable"}
    noise["return_with_leftover_noise"] = "disable" if end == STEPS else "enable"
    return ("KSamplerAdvanced", {**KSAMPLER, **links, **steps, **noise})


def together(models, above, **options):
    """A sampling that begins with the first of `models` and uses the next ones below the sigmas `above`."""
    first, *next_models = models
    links = {f"model{number}": link for number, link in enumerate(next_models)}
    return {
        "sigmas": ("AnyValue", {"value": tuple(above)}),
        "relay": ("Relay", {"model": first, "above": ["sigmas", 0], **links, **options}),
        "sample": part(["relay", 0], ["empty", 0], 0, STEPS),
    }


@pytest.fixture(scope="module")
def sigmas(host):
    model = host.output_of("SanaNodesLoader", model="sana-tiny")
    values = host.output_of("BasicScheduler", linked={"model": model}, scheduler="simple", steps=STEPS, denoise=1.0)
    return [float(value) for value in values]


@pytest.mark.parametrize("count", [2, 3])
def test_each_model_of_a_sampling_gives_what_it_gives_alone(host, graph_of, sigmas, count):
    for names in itertools.permutations(MODELS, count):
        models = [MODELS[name] for name in names]
        share = STEPS // count
        above = [sigmas[share * number] + 1e-4 for number in range(1, count)]
        got = host.run(graph_of(**together(models, above)), keep_cache=True)["latent"]["samples"]
        alone, latent = {}, ["empty", 0]
        for number, model in enumerate(models):
            alone[f"part {number}"] = part(model, latent, number * share, (number + 1) * share)
            latent = [f"part {number}", 0]
        expected = host.run(graph_of(**alone), keep_cache=True)["latent"]["samples"]
        assert (got - expected).abs().max() <= BOUND, names


def test_a_second_model_beside_the_first_changes_nothing(host, graph_of):
    """A worse model for autoguidance, here with weight 0."""
    for names in itertools.permutations(MODELS, 2):
        models = [MODELS[name] for name in names]
        got = host.run(graph_of(**together(models, [], both=True)), keep_cache=True)["latent"]["samples"]
        alone = {"sample": part(models[0], ["empty", 0], 0, STEPS)}
        expected = host.run(graph_of(**alone), keep_cache=True)["latent"]["samples"]
        assert (got - expected).abs().max() <= BOUND, names


def test_a_second_model_of_a_split_image_is_computed_without_the_first_ones_replicas(host, graph_of, sigmas):
    split = {"split": ("SanaNodesSplitPicture", {"model": ["load", 0], "devices": "cpu x 2"})}
    for name in ("second", "with a LoRA"):
        nodes = split | together([["split", 0], MODELS[name]], [sigmas[STEPS // 2] + 1e-4])
        got = host.run(graph_of(**nodes), keep_cache=True)["latent"]["samples"]
        first = part(MODELS["first"], ["empty", 0], 0, STEPS // 2)
        alone = {"first half": first, "last": part(MODELS[name], ["first half", 0], STEPS // 2, STEPS)}
        expected = host.run(graph_of(**alone), keep_cache=True)["latent"]["samples"]
        assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_each_input_of_the_cached_prompts_is_part_of_their_key(host, second):
    """Exchange one input after another. The result is the same as without a cache."""
    prompts = pack("nodes.host.sampling.model")
    perturbed = pack("sana_core.sampling.guidance").PerturbedAttention
    attention, further = perturbed(3.0, frozenset({1})), perturbed(3.0, frozenset({0, 1}))
    # Layers that cast their weights take inputs of any dtype.
    options = {"weight_dtype": "fp8_e5m2"}
    model, other = (host.output_of("SanaNodesLoader", model=name, **options) for name in ("sana-tiny", second))
    nvidia = host.output_of("SanaNodesLoader", model="sana-tiny", reference="nvidia", **options)
    numbers = torch.Generator().manual_seed(0)
    embeds = [torch.randn(1, 7, model.model.diffusion_model.config.caption_channels, generator=numbers) for _ in "ab"]
    short = torch.tensor([[1.0] * 4 + [0.0] * 3])

    def family(keep):
        """The prompts of one sampling. Each exists once, as in ComfyUI."""
        first, second = (prompts.Prompt("positive", values, None, keep) for values in embeds)
        masked = prompts.Prompt("positive", embeds[0], short, keep)
        return {
            "base": [first, second],
            "alone": [first],
            "other order": [second, first],
            "mask": [masked, second],
            "shared mask": [first, second.masked_like(masked)],
            "PAG": [first, second, first.perturb(attention)],
            "another PAG": [first, second, first.perturb(further)],
        }

    def result(batch, patcher=model, shape=(4, 4), dtype=torch.float32, weights=None):
        batch = prompts.PromptBatch(batch)
        batch.weights = weights
        x = torch.zeros(len(batch.prompts), 32, *shape, dtype=dtype)
        constants, perturbation = batch.constants(patcher.model.diffusion_model, x)
        return [*constants.keys, *constants.values, constants.bias, constants.position, perturbation]

    def same(got, expected):
        for one, two in zip(got, expected, strict=True):
            tensors = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
            equal = tensors and one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
            if not (equal or str(one) == str(two)):
                return False
        return True

    exchanged = {
        **{name: (name, {}) for name in family(True)},
        "model": ("base", {"patcher": other}),
        "reference": ("base", {"patcher": nvidia}),
        "size": ("base", {"shape": (4, 6)}),
        "dtype": ("base", {"dtype": torch.bfloat16}),
    }
    with torch.inference_mode():
        for first, second_input in itertools.permutations(exchanged, 2):
            cached, fresh = family(True), family(False)
            batch, options = exchanged[first]
            before = result(cached[batch], **options)
            assert same(before, result(cached[batch], **options))
            batch, options = exchanged[second_input]
            assert same(result(cached[batch], **options), result(fresh[batch], **options)), (first, second_input)
        # The keys follow weights that a LoRA has changed in place.
        cached, key = family(True)["base"], model.model.diffusion_model.caption_norm
        plain = result(cached, weights="plain")
        key.weight.data += 0.1
        changed = result(cached, weights="patched")
        assert not same(changed, plain) and same(changed, result(family(False)["base"]))
        key.weight.data -= 0.1
        assert same(result(cached, weights="plain"), plain)
