"""Any numbers as sizes, steps, seeds and budgets, through sana_core and the nodes: they work, or one line is ours."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noise import noise_like

import sana_core
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.batch.plan import batch_images, default_chunk_size, split_into_chunks
from sana_core.decode import Tiles
from sana_core.memory import DTYPES
from sana_core.model import known_models as released
from sana_core.model.known_models import DECODERS, VARIANTS
from sana_core.model.latents import latent_shape
from sana_core.sampling import samplers as sampling
from sana_core.sampling import schedules
from sana_core.sampling.guidance import perturbed_attention

SPECIAL = [0, 1, 2, 31, 32, 33, 64, 4096, 16384, 16416, 2**31, 2**63, 2**64 - 1, 2**64, 10**30, 10**400]
SPECIAL += [-n for n in SPECIAL] + [0.5, 32.0, 64.5, 1e308, 5e-324, -0.0, math.inf, -math.inf, math.nan, True]
NUMBERS = st.sampled_from(SPECIAL) | st.integers() | st.integers(1, 40) | st.floats() | st.floats(0, 1)
LARGEST = {"width": 64, "height": 64, "steps": 2, "count": 2, "batch_size": 2}
TEXTS = st.text(max_size=8) | st.sampled_from([*VARIANTS, *DTYPES, *DECODERS, *sampling.SAMPLERS, "1024", "1.0"])


@pytest.fixture(scope="module")
def models(small):
    """Functions that give transformer and autoencoder, whose own words for themselves fill pages."""
    transformer, autoencoder = sana_core.load_transformer(small), sana_core.load_autoencoder(small)
    return lambda: transformer, lambda: autoencoder


@given(NUMBERS, NUMBERS, NUMBERS)
@example(math.nan, 32, 1)
@example(10**400, 32, 1)
@example(32.0, 32, 1)
@example(32, 32, 1.5)
def test_shapes(survives, width, height, count):
    shape = survives(lambda: latent_shape(width, height, count))
    if shape is not None:
        # The empty latent has this shape. On "meta" no size is too large.
        torch.empty(shape, device="meta")


@given(st.sampled_from(list(VARIANTS)) | TEXTS, NUMBERS, NUMBERS, NUMBERS, TEXTS, TEXTS)
def test_plans(survives, variant, width, height, batch, dtype, vae):
    dtype, vae = dtype if dtype in DTYPES else "bfloat16", vae if vae in DECODERS else "dc-ae-f32c32"
    survives(lambda: sana_core.plan_memory(variant, width, height, batch, dtype, vae=vae))


@given(st.sampled_from(list(sampling.SAMPLERS)), NUMBERS, st.sampled_from([3.0, 1.0, 6.0]), NUMBERS, NUMBERS)
def test_schedules(survives, name, steps, shift, denoise, strength):
    def sample():
        flow = sampling.find_sampler(name)
        line = schedules.trim_schedule(lambda steps_in_all: flow.sigmas(steps_in_all, shift), steps, denoise)
        if len(line):
            line = schedules.last_steps(line, strength)
        if len(line):
            flow.sample(lambda x, sigma: 0.5 * x, torch.ones(1, 1, 2, 2), line[:20])

    survives(sample)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_angles(survives, steps, highest, between):
    survives(lambda: schedules.scm_sigmas(steps, highest, between))


@given(st.lists(st.floats(width=32), max_size=6), st.sampled_from(list(sampling.SAMPLERS)))
def test_sigmas(survives, line, name):
    sample = sampling.find_sampler(name).sample
    survives(lambda: sample(lambda x, sigma: 0.5 * x, torch.ones(1, 1, 2, 2), torch.tensor(line)))


@given(st.integers(0, 3), NUMBERS, NUMBERS, NUMBERS)
def test_batches(survives, prompts, count, seed, size):
    # fewer pictures, which are listed as those are
    count = count if not 1000 < count < 100_001 else 1000

    def plan():
        pictures = batch_images(prompts, count, seed)
        assert len({picture.number for picture in pictures}) == len(pictures)
        noise_like(torch.empty(1, 2, 2, 2), seed)
        assert default_chunk_size(32, 32, len(pictures), 2) >= 1
        split_into_chunks(pictures, size)

    survives(plan)


@given(TEXTS, TEXTS)
def test_resolutions(survives, size, ratio):
    survives(lambda: released.read_size(size))
    survives(lambda: released.image_size(1024, ratio))


OPTIONS = {
    "width": NUMBERS,
    "height": NUMBERS,
    "steps": NUMBERS,
    "guidance": NUMBERS,
    "pag_scale": NUMBERS,
    "pag_blocks": TEXTS,
    "guidance_interval": st.tuples(NUMBERS, NUMBERS),
    "sampler": TEXTS,
    "dtype": TEXTS,
    "reference": TEXTS,
}


def some(options):
    """Strategy: up to two of these options; with more of them wrong at once one would hide the others."""
    names = st.sets(st.sampled_from(sorted(options)), max_size=2)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: options[name] for name in chosen}))


@given(options=some(OPTIONS))
def test_settings(survives, small, options):
    survives(lambda: resolve_settings(SamplingSettings(**options), small))


def affordable(options):
    """The same, without pictures that take long, which are as right as small ones."""
    options = dict(options)
    for name, most in LARGEST.items():
        if most < options.get(name, 0) <= 100_000:
            options[name] = most
    return options


# Each accepted example generates an image, so there are fewer.
@settings(max_examples=max(1, settings().max_examples // 10))
@given(some({**OPTIONS, "seed": NUMBERS, "count": NUMBERS, "chunk": NUMBERS}))
def test_generate(survives, small, options):
    options = affordable({"width": 32, "height": 32, "steps": 1, **options})
    images = survives(lambda: sana_core.generate(["a red circle"], small, **options))
    if images is not None:
        assert images.shape == (options.get("count", 1), 3, options["height"], options["width"])


@given(
    st.lists(st.integers(0, 3), max_size=5) | st.tuples(st.just(1), st.just(32), st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from(["auto", "strips", "tiles", "whole"]) | TEXTS,
    st.none() | NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from([0.0, 1e30, math.inf, math.nan]),
)
@example((1, 32, 1, 2), "tiles", None, 32.0, 0, 0.0)
def test_decode(survives, models, shape, method, budget, tile, overlap, value):
    latents = torch.full(tuple(shape), value)
    survives(
        lambda: sana_core.decode_latents(models[1](), latents, method, budget, tiles=Tiles(tile, overlap)),
    )


@given(
    st.lists(st.integers(0, 3), max_size=5)
    | st.tuples(st.just(1), st.just(3), st.sampled_from([0, 31, 32, 64]), st.sampled_from([0, 1, 32])),
    st.sampled_from(["auto", "strips", "whole"]) | TEXTS,
    st.none() | NUMBERS,
    st.sampled_from([0.0, 1e30, math.inf, math.nan]),
)
@example((1, 3, 32, 32), "auto", -math.inf, 0.0)
def test_encode(survives, models, shape, method, budget, value):
    survives(lambda: sana_core.encode_images(models[1](), torch.full(tuple(shape), value), method, budget))


@given(NUMBERS, TEXTS | st.lists(NUMBERS, max_size=3).map(lambda blocks: ", ".join(map(str, blocks))))
def test_perturbed_attention(survives, models, scale, blocks):
    survives(lambda: perturbed_attention(models[0]().config, scale, blocks))


SAMPLING = {"seed": NUMBERS, "steps": NUMBERS, "guidance": NUMBERS}
NODES = {
    "SanaNodesEmptyLatent": {"width": NUMBERS, "height": NUMBERS, "batch_size": NUMBERS},
    "SanaNodesPlan": {"width": NUMBERS, "height": NUMBERS, "batch_size": NUMBERS},
    "SanaNodesResolution": {"size": TEXTS, "ratio": TEXTS},
    "SanaNodesScheduler": {"sampler": TEXTS, "steps": NUMBERS, "denoise": NUMBERS},
    "SanaNodesSamplerSelect": {"sampler": TEXTS},
    "SanaNodesPAG": {"scale": NUMBERS, "blocks": TEXTS},
    "SanaNodesGuidanceInterval": {"start": NUMBERS, "end": NUMBERS},
    "SanaNodesSampler": {**SAMPLING, "sampler": TEXTS, "denoise": NUMBERS},
    "SanaNodesSprint": {**SAMPLING, "strength": NUMBERS, "max_timestep": NUMBERS, "intermediate_timestep": NUMBERS},
    "SanaNodesDecode": {"method": TEXTS, "budget_gb": NUMBERS, "devices": TEXTS},
}
USUAL = {"seed": 0, "steps": 1, "guidance": 1.0, "sampler": "flow_euler", "width": 32, "height": 32, "batch_size": 1}
OWN = {"SanaNodesPlan": {"vae": "dc-ae-f32c32"}}
USUAL |= {"size": "1024", "ratio": "1.0", "variant": "1.6B", "scale": 1.0, "start": 0.0, "end": 1.0}


@pytest.fixture(scope="module")
def links(loaded, host):
    """What comes to the nodes through links, by the names of their inputs."""
    model, clip, vae = loaded
    caught = host.run(
        {
            "clip": ("AnyValue", {"value": clip}),
            "text": ("SanaNodesTextEncode", {"clip": ["clip", 0], "text": "a red circle", "instruction": False}),
            "empty": ("SanaNodesEmptyLatent", {"width": 32, "height": 32, "batch_size": 1}),
            "catch text": ("Catch", {"value": ["text", 0], "name": "text"}),
            "catch empty": ("Catch", {"value": ["empty", 0], "name": "empty"}),
        }
    )
    text, empty = caught["text"], caught["empty"]
    return {"model": model, "vae": vae, "positive": text, "negative": text, "latent_image": empty, "samples": empty}


def executed(host, links, name, options):
    """What the node of that name gives for the usual numbers, but for `options`."""
    node = host.nodes.NODE_CLASS_MAPPINGS[name]
    arguments = {**links, **USUAL, **OWN.get(name, {}), **options}
    # The executor runs nodes in inference mode too.
    with torch.inference_mode():
        return node.execute(
            **{item.id: arguments[item.id] for item in node.GET_SCHEMA().inputs if item.id in arguments}
        )


@pytest.mark.parametrize("name", sorted(set(NODES) - {"SanaNodesSprint"}))
def test_the_usual_numbers_work(links, host, name):
    executed(host, links, name, {})


@given(data=st.data(), name=st.sampled_from(sorted(NODES)))
def test_nodes(survives, links, host, name, data):
    options = affordable(data.draw(some(NODES[name])))
    survives(lambda: executed(host, links, name, options))
