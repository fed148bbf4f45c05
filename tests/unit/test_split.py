"""A picture that several devices share, against the library's forward and against itself on other numbers of them."""

import gc
import weakref
from threading import Barrier, Event, Timer, current_thread
from threading import enumerate as enumerate_threads

import pytest
import torch
from pretend_card import pretend_cards
from test_forward import guidance_of, theirs
from tiny import VARIANTS, random_prompt, tiny_transformer

from sana_core import generate
from sana_core.decode import devices as decode_devices
from sana_core.decode import oom
from sana_core.errors import InputError
from sana_core.model.block import Perturbation
from sana_core.model.forward import prepare, velocity
from sana_core.model.row_shards import check_splittable, find_groups, shard_constants, split_rows
from sana_core.sampling.guidance import PerturbedAttention, ShardedModel, denoiser
from sana_core.split import generate as sharing
from sana_core.split.generate import Split

CPU = torch.device("cpu")
# a row of 16 cells is the least, and 4 its step: some CPUs' libraries multiply matrices of fewer rows, and those that
# are left of each 4, in another order of additions.
# speeds that give 1, 2, 3, 5 and 8 shards rows of very different numbers
SPEEDS = {1: [1], 2: [1, 2], 3: [4, 1, 2], 5: [1, 5, 2, 1, 1], 8: [1, 1, 2, 1, 3, 1, 1, 9]}


def shared(transformer, x, timestep, constants, speeds, guidance=None, perturbation=None, control=()):
    """The velocity at `x` as members of those `speeds` make it."""
    split = Split([CPU] * len(speeds), speeds)

    def work(shard):
        rows = slice(shard.spec.span.start * x.shape[3], shard.spec.span.stop * x.shape[3])
        rows_of_control = [None if one is None else one[:, rows] for one in control]
        part = shard_constants(constants, shard)
        return velocity(transformer, shard.x, timestep, part, guidance, perturbation, rows_of_control, shard.ops)

    return split.run(x, work)


def relative(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("size", [(8, 16), (23, 20), (23, 17)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_number_of_shards_equals_the_library_and_each_other(variant, size):
    transformer = tiny_transformer(variant)
    embeds, mask = random_prompt(2)
    mask[1, 6:] = 0
    x, timestep = torch.randn(2, 32, *size), torch.tensor([900.0, 250.0])
    guidance = guidance_of(transformer, 2)
    constants = prepare(transformer, embeds, mask, *size)
    undivided = velocity(transformer, x, timestep, constants, guidance)
    expected = theirs(transformer, x, timestep, embeds, mask, guidance)
    one = shared(transformer, x, timestep, constants, SPEEDS[1], guidance)
    assert relative(one, undivided) < 1e-6 and relative(one, expected) < 1e-6
    for count in (2, 3, 5, 8):
        result = shared(transformer, x, timestep, constants, SPEEDS[count], guidance)
        assert relative(result, one) < 1e-6 if size[1] % 4 else torch.equal(result, one)


@pytest.mark.parametrize("variant", ["sana", "sana-1.5"])
def test_perturbed_attention_and_residuals_are_shared_too(variant):
    transformer = tiny_transformer(variant, layers=4)
    embeds, mask = random_prompt(2)
    x, timestep = torch.randn(4, 32, 9, 16), torch.full((4,), 500.0)
    constants = prepare(transformer, embeds, mask, 9, 16)
    perturbation = Perturbation(torch.tensor([False, False, True, True])[:, None, None], frozenset({1, 3}))
    control = (None, *(torch.randn(4, 9 * 16, 32) for _ in range(2)))
    undivided = velocity(transformer, x, timestep, constants, None, perturbation, control)
    one = shared(transformer, x, timestep, constants, SPEEDS[1], None, perturbation, control)
    assert relative(one, undivided) < 1e-6
    for count in (2, 5):
        assert torch.equal(shared(transformer, x, timestep, constants, SPEEDS[count], None, perturbation, control), one)
    assert relative(shared(transformer, x, timestep, constants, SPEEDS[3]), undivided) > 1e-3


def test_the_two_exchanges_of_a_block_are_all_that_shards_hand_each_other():
    transformer = tiny_transformer(layers=3)
    embeds, mask = random_prompt(2)
    x, timestep = torch.randn(2, 32, 9, 16), torch.full((2,), 500.0)
    constants = prepare(transformer, embeds, mask, 9, 16)
    split = Split([CPU] * 3)
    split.run(x, lambda shard: velocity(transformer, shard.x, timestep, constants, ops=shard.ops))
    sums, row = 2 * 4 * 8 * 9 * 8, 2 * 16 * 32 * 4
    for exchange, neighbours in zip(split.exchanges, (1, 2, 1), strict=True):
        assert exchange.messages == 2 * 3
        assert exchange.sum_bytes == 3 * sums and exchange.row_bytes == 3 * neighbours * row


def test_members_as_many_as_the_prompts_meet_once_a_step_and_draw_the_same_bits():
    """The positive and the negative prompt apart, and perturbed attention's pass where there is one."""
    transformer = tiny_transformer("sana-1.5")
    (embeds, mask), x = random_prompt(2), torch.randn(1, 32, 9, 16)
    mask[1, 6:] = 0
    cond, uncond = (embeds[:1], mask[:1]), (embeds[1:], mask[1:])

    def draw(model, perturbed=None):
        return denoiser(model, cond, uncond, 4.5, perturbed=perturbed)(x, 0.7)

    def together(count, perturbed=None, speeds=None):
        split = Split([CPU] * count, speeds)
        got = draw(ShardedModel(split.run, [transformer] * count), perturbed)
        return got, split.exchanges[-1]

    undivided, (rows, _) = draw(transformer), together(5)
    assert relative(rows, undivided) < 2e-6
    # Groups of one, of two, and rows only: (members, their speeds, bytes of rows that a member receives).
    row = 3 * 16 * 32 * 4
    for count, speeds, row_bytes in ((2, None, 0), (4, None, row), (2, [1, 3], 2 * row)):
        got, exchange = together(count, speeds=speeds)
        assert torch.equal(got, rows) and exchange.row_bytes == row_bytes
    attention = PerturbedAttention(3.0, frozenset({1}))
    (got, exchange), (rows, _) = together(3, attention), together(2, attention)
    assert relative(got, draw(transformer, attention)) < 2e-6 and torch.equal(got, rows)
    assert exchange.row_bytes == 0


def test_groups_are_as_many_as_divide_prompts_and_members_unless_one_would_wait():
    assert [find_groups(2, [1] * count) for count in (2, 3, 4, 6)] == [2, 1, 2, 2]
    assert [find_groups(1, [1, 1]), find_groups(4, [1, 1]), find_groups(3, [1] * 3)] == [1, 2, 3]
    assert [find_groups(2, [1, 1.1]), find_groups(2, [1, 2]), find_groups(2, [1, 2, 2, 1])] == [2, 1, 2]


def test_rows_follow_the_speeds_and_nobody_is_without():
    assert split_rows(10, [1, 1]) == [slice(0, 5), slice(5, 10)]
    assert split_rows(10, [3, 1]) == [slice(0, 8), slice(8, 10)]
    assert split_rows(5, [1000, 1, 1, 1, 1]) == [slice(i, i + 1) for i in range(5)]
    with pytest.raises(InputError, match="devices: got 3 for an image of 2 rows"):
        split_rows(2, [1, 1, 1])


def test_members_of_different_dtypes_generate_the_image_to_within_rounding():
    """A GPU without bf16 computes its rows in float32."""
    models = [tiny_transformer(), tiny_transformer().bfloat16()]
    (embeds, mask), x, time = random_prompt(2), torch.randn(2, 32, 9, 16), torch.full((2,), 500.0)
    dtypes = torch.float32, torch.bfloat16
    constants = [prepare(model, embeds.to(dtype), mask, 9, 16) for model, dtype in zip(models, dtypes, strict=True)]
    expected = velocity(models[0], x, time, constants[0])

    def work(shard):
        part = shard_constants(constants[shard.member], shard)
        return velocity(models[shard.member], shard.x.to(dtypes[shard.member]), time, part, ops=shard.ops)

    image = Split([CPU] * 2).run(x, work)
    assert image.dtype == torch.float32 and relative(image, expected) < 3e-2


class Failing:
    """Work that fails in the second exchange of a member's first step, as memory that runs out in its midst."""

    def __init__(self, transformer, timestep, constants, failing, error):
        self.arguments = transformer, timestep, constants
        self.failing, self.error = failing, error

    def __call__(self, shard):
        if shard.member in self.failing:
            shard.ops.exchange.halo = self.fail
        transformer, timestep, constants = self.arguments
        return velocity(transformer, shard.x, timestep, constants, ops=shard.ops)

    def fail(self, *rows):
        raise self.error


@pytest.fixture
def step():
    transformer = tiny_transformer()
    embeds, mask = random_prompt(2)
    x, timestep = torch.randn(2, 32, 9, 16), torch.full((2,), 500.0)
    constants = prepare(transformer, embeds, mask, 9, 16)
    return x, (transformer, timestep, constants), shared(transformer, x, timestep, constants, SPEEDS[1])


@pytest.mark.parametrize("failing", [{0}, {2}, {0, 1}])
def test_a_member_that_fails_is_left_out_and_the_picture_is_the_same(step, failing, caplog):
    x, arguments, expected = step
    split = Split([CPU] * 3, [1, 2, 3])
    got = split.run(x, Failing(*arguments, failing, torch.OutOfMemoryError("out of memory")))
    assert torch.equal(got, expected)
    assert split.living == sorted({0, 1, 2} - failing)
    assert caplog.text.count("its rows go to the others") == len(failing)


def test_a_failed_step_s_tensors_are_gone_when_it_begins_again():
    held, both = [], Barrier(2)

    def work(shard):
        if len(split.living) == 1:
            assert all(item() is None for item in held)
            return shard.x
        mine = torch.zeros(1000)
        held.append(weakref.ref(mine))
        both.wait()
        if shard.member == 0:
            raise torch.OutOfMemoryError("out of memory")
        # This raises after the other member has failed.
        return shard.ops.exchange.all_reduce(mine)

    split, x = Split([CPU] * 2), torch.randn(1, 32, 9, 16)
    assert torch.equal(split.run(x, work), x) and len(held) == 2


def test_the_last_member_says_why_it_failed_and_a_mistake_is_no_failure_of_a_device(step):
    x, arguments, _ = step
    split = Split([CPU] * 2)
    with pytest.raises(torch.OutOfMemoryError):
        split.run(x, Failing(*arguments, {0, 1}, torch.OutOfMemoryError("out of memory")))
    split = Split([CPU] * 2)
    with pytest.raises(ValueError, match="a mistake"):
        split.run(x, Failing(*arguments, {1}, ValueError("a mistake")))
    assert split.living == [0, 1]


def image_threads():
    return [thread for thread in enumerate_threads() if thread.name.startswith("sana image")]


def test_cancel_ends_a_step_in_its_midst(step):
    x, arguments, _ = step

    class Cancelled(BaseException):
        pass

    def poll():
        raise Cancelled

    begun = Event()

    def work(shard):
        begun.wait(5)
        return Failing(*arguments, set(), None)(shard)

    with pytest.raises(Cancelled):
        Timer(0.2, begun.set).start()
        Split([CPU] * 2).run(x, work, poll=poll)
    # Threads end without their Split. Errors of earlier tests refer to theirs.
    gc.collect()
    for thread in image_threads():
        thread.join(10)
        assert not thread.is_alive()


def test_models_of_patches_are_refused():
    transformer = tiny_transformer()
    transformer.register_to_config(patch_size=2)
    with pytest.raises(InputError, match="model: got patch_size 2, expected 1"):
        check_splittable("model", transformer)


def drawn(checkpoint, count=3, **where):
    return generate(["a red circle"], checkpoint, count, steps=2, width=512, height=160, **where)


def test_generate_draws_the_same_picture_on_any_number_of_devices(checkpoint):
    two = drawn(checkpoint, devices=["cpu"] * 2, split=True)
    assert relative(two, drawn(checkpoint)) < 1e-5
    assert torch.equal(drawn(checkpoint, devices=["cpu"] * 5, split=True), two)


def test_one_thread_for_each_gpu_samples_and_decodes_all_images(checkpoint):
    with pretend_cards(3) as cards:
        drawn(checkpoint, devices=[str(device) for device in cards.devices], split=True, count=2)
        threads = {name: number for name, number in cards.started.items() if name.startswith("sana image")}
    assert threads == {f"sana image {device} #1": 1 for device in cards.devices}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: device lost")])
def test_a_sampled_image_is_decoded_on_the_cpu_if_no_device_can(checkpoint, monkeypatch, caplog, error):
    expected = drawn(checkpoint, devices=["cpu"] * 2, split=True)

    real = decode_devices.pixel_rows

    def fail(*arguments):
        if current_thread().name.startswith("sana image"):
            raise error
        return real(*arguments)

    for module in (decode_devices, oom):
        monkeypatch.setattr(module, "pixel_rows", fail)
    assert relative(drawn(checkpoint, devices=["cpu"] * 2, split=True), expected) < 1e-5
    assert "no device could decode the image" in caplog.text


@pytest.mark.parametrize(
    "where, message",
    [
        ({"devices": ["cpu"]}, "devices: got cpu to share an image, expected two or more"),
        ({"devices": ["cpu"] * 6}, "devices: got 6 for an image of 5 rows"),
        ({"devices": ["cpu"] * 2, "chunk": 2}, "chunk: got 2 with split, expected 1"),
        ({"devices": ["cpu"] * 2, "compiled": True}, "compiled: got true with split, expected false"),
    ],
)
def test_what_cannot_be_shared_is_named_before_anything_is_loaded(checkpoint, monkeypatch, where, message):
    monkeypatch.setattr(sharing, "load_encoder", None)
    monkeypatch.setattr(sharing, "load_models", None)
    with pytest.raises(InputError, match=message):
        drawn(checkpoint, split=True, **where)


def test_an_accelerator_is_named_once():
    cards = [torch.device("cuda", 0), torch.device("cuda", 1)]
    sharing.check_devices(cards)
    with pytest.raises(InputError, match="devices: got cuda:1 twice, expected each once"):
        sharing.check_devices([*cards, cards[1]])
