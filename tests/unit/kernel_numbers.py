"""The fused kernels on an accelerator, or in Triton's interpreter in a process that test_kernels.py starts.

The truth is plain torch in float64. What the kernels make is no farther from it than what plain torch makes in the same
type, but for 5 % and a rounding of float32, 6e-8, since they round elsewhere.
"""

import pytest
import torch
import torch.nn.functional as F
from decoders import decode_in_strips, f32c32, noise
from diffusers import SanaTransformer2DModel
from diffusers.models.normalization import RMSNorm

from sana_core.decode import attention, fused, streaming, workspace
from sana_core.kernels import support, trial
from sana_core.kernels.channels import add_bias, add_gated, add_then_norm, rms_norm
from sana_core.kernels.gated_depthwise import silu_depthwise_gate
from sana_core.kernels.linear_attention import relu_attention
from sana_core.model import block, forward, layers
from sana_core.runtime.accelerator import current_accelerator

DEVICE = current_accelerator()
if DEVICE is None:
    import interpreted

    interpreted.install()
else:
    torch.set_default_device(DEVICE)
    # float32 as float32
    torch.backends.cudnn.allow_tf32 = False
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLACK = 1.05
ALL = frozenset(trial.TRIALS)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def everywhere(monkeypatch):
    """As if the CPU were an accelerator that runs the kernels."""
    for module in (forward, fused, trial):
        monkeypatch.setattr(module, "kernels_on", lambda device, dtype: ALL)


def error(got, truth):
    assert got.isfinite().all()
    return ((got.double() - truth).norm() / truth.norm()).item()


def check(got, plain, truth):
    rounding = torch.finfo(torch.float32).eps / 2
    assert got.dtype == plain.dtype and got.shape == plain.shape
    assert error(got, truth) <= SLACK * error(plain, truth) + rounding


@pytest.mark.parametrize(
    "positions, channels", [(1, 128), (33, 128), (7, 512), (3, 1024), (5, 96), (2, 2240), (2, 1152)]
)
def test_rms_norm(dtype, positions, channels):
    x, residual = noise(positions, channels).to(dtype), noise(positions, channels, seed=1).to(dtype)
    norm = RMSNorm(channels, 1e-5, bias=True).requires_grad_(False)
    norm.weight.copy_(noise(channels, seed=2))
    norm.bias.copy_(noise(channels, seed=3))
    norm = norm.to(dtype)
    exact = rounded_norm(x.double(), norm.weight.double(), norm.bias.double()) + residual.double()
    got = rms_norm(x, norm.weight, norm.bias, 1e-5, residual)
    check(got, norm(x) + residual, exact)
    alone = rounded_norm(x.double(), norm.weight.double(), 0)
    check(rms_norm(x, norm.weight, None, 1e-5, out=x.clone()), norm(x) - norm.bias, alone)


def rounded_norm(x, weight, bias):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias


@pytest.mark.parametrize("name, activation", [("silu", F.silu), ("relu", F.relu), ("", torch.nn.Identity())])
def test_bias_and_activation_go_into_rows_of_another_map(dtype, name, activation):
    x, bias = noise(19, 128).to(dtype), noise(128, seed=1).to(dtype)
    window = torch.full((25, 128), 7.0, dtype=dtype)
    add_bias(x, bias, window[3:22], name)
    check(window[3:22], activation(x + bias), activation(x.double() + bias.double()))
    assert (window[:3] == 7).all() and (window[22:] == 7).all()


@pytest.mark.parametrize("width, positions", [(2240, 3), (1152, 5), (64, 1)])
def test_residual_gate_norm_and_modulation(dtype, width, positions):
    hidden, branch = noise(2, positions, width).to(dtype), noise(2, positions, width, seed=1).to(dtype)
    # A block reads slices of one table, which are not contiguous.
    shift, scale, gate = noise(2, 4, 3, 1, width, seed=2).to(dtype)[:, 1].unbind(1)

    def norm(x):
        return torch.addcmul(shift.to(x.dtype), F.layer_norm(x, (width,), eps=1e-6), scale.to(x.dtype)).to(x.dtype)

    check(add_then_norm(hidden, (None, None), shift, scale, 1e-6)[1], norm(hidden), norm(hidden.double()))
    exact = hidden.double() + gate.double() * branch.double()
    check(add_gated(hidden.clone(), branch, gate), torch.addcmul(hidden, gate, branch), exact)
    added, normed = add_then_norm(hidden.clone(), (branch, None), shift, scale, 1e-6)
    assert torch.equal(added, hidden + branch)
    check(normed, norm(hidden + branch), norm(hidden.double() + branch.double()))
    for residual_gate in (gate, gate[:1], noise(2, 1, width, 2, seed=3).to(dtype)[..., 0]):
        added, normed = add_then_norm(hidden.clone(), (branch, residual_gate), shift, scale, 1e-6)
        check(
            added,
            torch.addcmul(hidden, residual_gate, branch),
            hidden.double() + residual_gate.double() * branch.double(),
        )
        check(normed, norm(added), norm(added.double()))


@pytest.mark.parametrize("heads, size", [(2, 32), (3, 16), (1, 64)])
@pytest.mark.parametrize("positions", [1, 63, 300, 1030])
def test_linear_attention(dtype, positions, heads, size):
    query, key, value = noise(3, 2, positions, heads * size).to(dtype)

    def plain(dtype):
        q, k, v = (block.split_heads(part, heads).to(dtype) for part in (query, key, value))
        q, k = F.relu(q), F.relu(k)
        out = (q @ (k.transpose(2, 3) @ v)) / (q @ k.sum(2, keepdim=True).transpose(2, 3) + 1e-15)
        return out.transpose(1, 2).flatten(2)

    check(relu_attention(query, key, value, heads, 1e-15), plain(torch.float32).to(query.dtype), plain(torch.float64))


def test_a_picture_s_attention_does_not_depend_on_its_batch(dtype):
    states = noise(3, 4, 700, 64).to(dtype)
    together = relu_attention(*states, 2, 1e-15)
    assert all(torch.equal(together[i : i + 1], relu_attention(*states[:, i : i + 1], 2, 1e-15)) for i in range(4))


# programs=1: bands of up to 32 rows, as on large images. Small images have bands of one row.
@pytest.mark.parametrize(
    "shape, programs",
    [
        ((1, 1, 1, 8), 1024),
        ((2, 2, 9, 70), 1024),
        ((1, 9, 2, 64), 1024),
        ((1, 2, 3, 2 * 66), 1024),
        ((1, 33, 2, 8), 1),
        ((2, 9, 4, 64), 1),
    ],
)
@pytest.mark.parametrize(
    "edges", [(1, 1), *(pytest.param(sides, marks=pytest.mark.slow) for sides in ((0, 0), (0, 1), (1, 0)))]
)
def test_gated_depthwise(dtype, shape, programs, edges, monkeypatch):
    monkeypatch.setattr(support, "PROGRAMS", programs)
    x = noise(shape[0], shape[1] + sum(edges), *shape[2:]).to(dtype)
    weight, bias = noise(shape[3], 1, 3, 3, seed=1).to(dtype), noise(shape[3], seed=2).to(dtype)

    def plain(x, weight, bias):
        maps = F.silu(x).permute(0, 3, 1, 2)
        maps = F.pad(maps, (0, 0, 1 - edges[0], 1 - edges[1]))
        maps = F.conv2d(maps, weight, bias, padding=(0, 1), groups=shape[3])
        value, gate = maps.chunk(2, dim=1)
        return (value * F.silu(gate)).permute(0, 2, 3, 1)

    got = silu_depthwise_gate(x, weight, bias, edges)
    assert got.shape == (*shape[:3], shape[3] // 2)
    check(got, plain(x, weight, bias), plain(x.double(), weight.double(), bias.double()))
    check(
        silu_depthwise_gate(x, weight, None, edges),
        *(plain(x.to(t), weight.to(t), None) for t in (dtype, x.double().dtype)),
    )


@pytest.mark.parametrize("shape, edges", [((0, 3, 2, 8), (0, 0)), ((1, 2, 2, 8), (1, 1)), ((1, 3, 0, 8), (0, 0))])
def test_gated_depthwise_of_an_empty_tensor_is_empty(shape, edges):
    out = silu_depthwise_gate(torch.zeros(shape), torch.zeros(8, 1, 3, 3), None, edges)
    assert out.shape == (shape[0], shape[1] - sum(edges), shape[2], 4)


def narrow_transformer(qk_norm=None):
    torch.manual_seed(0)
    return SanaTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=32,
        cross_attention_dim=64,
        caption_channels=24,
        qk_norm=qk_norm,
    ).requires_grad_(False)


def predict(transformer, x, embeds, mask, perturbation=None):
    constants = forward.prepare(transformer, embeds, mask, *x.shape[-2:])
    return constants, forward.velocity(transformer, x, torch.full((len(x),), 500.0), constants, None, perturbation)


# In the interpreter, the largest size takes as long as a third of this file.
@pytest.mark.parametrize(
    "qk_norm, size",
    [
        (None, (1, 1)),
        ("rms_norm_across_heads", (2, 3)),
        pytest.param("rms_norm_across_heads", (3, 7), marks=pytest.mark.slow),
    ],
)
def test_a_step_is_as_near_the_truth_as_the_library_s(dtype, size, qk_norm, everywhere):
    transformer = narrow_transformer(qk_norm).to(dtype)
    x, embeds, mask = noise(2, 32, *size).to(dtype), noise(2, 10, 24, seed=1).to(dtype), torch.ones(2, 10)
    mask[0, 4:] = 0
    time = torch.full((2,), 500.0)
    constants, got = predict(transformer, x, embeds, mask)
    assert constants.kernels
    plain = transformer(x, embeds, time, encoder_attention_mask=mask).sample
    # the library has tables of its own in fp32
    exact = narrow_transformer(qk_norm).to(dtype).double()
    truth = exact(x.double(), embeds.double(), time.double(), encoder_attention_mask=mask.double()).sample
    # In a network, any different rounding changes the error by chance.
    assert error(got, truth) <= 1.15 * error(plain, truth) + torch.finfo(torch.float32).eps / 2


def test_perturbed_attention_through_the_kernels(everywhere, monkeypatch):
    transformer = narrow_transformer()
    x, embeds, mask = noise(2, 32, 3, 5), noise(2, 10, 24, seed=1), torch.ones(2, 10)
    perturbation = forward.Perturbation(torch.tensor([False, True])[:, None, None], frozenset({1}))
    fast = predict(transformer, x, embeds, mask, perturbation)[1]
    monkeypatch.setattr(forward, "kernels_on", lambda device, dtype: frozenset())
    torch.testing.assert_close(fast, predict(transformer, x, embeds, mask, perturbation)[1], atol=1e-5, rtol=0)


def test_every_layer_that_a_host_may_cast_or_patch_is_asked(everywhere):
    """A LoRA's layer is called; a host's gives its weights, cast and patched."""
    transformer = narrow_transformer("rms_norm_across_heads")
    asked = set()
    embeds, mask, x = noise(1, 10, 24), torch.ones(1, 10), noise(1, 32, 4, 4)

    class Patched:
        def with_weights(self, like, use):
            asked.add(names[self])
            return use(self.weight, self.bias)

        def forward(self, *arguments):
            asked.add(names[self])
            return super().forward(*arguments)

    plain = predict(transformer, x, embeds, mask)[1]
    names = {child: name for name, child in transformer.named_modules()}
    for child in names:
        if type(child) in (torch.nn.Linear, torch.nn.Conv2d, RMSNorm):
            child.__class__ = type("Host", (Patched, type(child)), {})
    torch.testing.assert_close(predict(transformer, x, embeds, mask)[1], plain, atol=0, rtol=0)
    assert asked == {
        name for child, name in names.items() if isinstance(child, torch.nn.Linear | torch.nn.Conv2d | RMSNorm)
    }


def test_a_layer_with_an_adapter_is_called():
    conv = torch.nn.Conv2d(8, 8, 1).requires_grad_(False)
    assert layers.with_weights(conv, noise(1), lambda weight, bias: weight) is conv.weight
    conv.register_forward_hook(lambda module, arguments, out: out * 2)
    assert layers.with_weights(conv, noise(1), lambda weight, bias: weight) is None
    states = noise(1, 6, 8)
    expected = 2 * F.linear(states, conv.weight.flatten(1), conv.bias)
    torch.testing.assert_close(layers.pointwise(conv, states, (2, 3)), expected)
    torch.testing.assert_close(layers.pointwise(torch.nn.Identity(), states, (2, 3)), states)


@pytest.fixture(scope="module")
def narrow():
    return f32c32(8)


def test_a_decode_in_strips_equals_the_library_s(narrow, everywhere, monkeypatch):
    """With strips of 32 px, of a picture of 96 x 64 px; in fp32 no farther than rounding."""
    monkeypatch.setattr(streaming, "norm_in_cache", lambda *options: fused.norm_into(*options, None))
    latents = noise(1, 32, 3, 2)
    undivided = narrow.decoder(latents)
    assert error(decode_in_strips(narrow, latents, 4, None, 2), undivided.double()) < 1e-5


def test_a_decode_in_16_bits_is_as_near_the_truth_as_the_library_s(narrow, everywhere, monkeypatch):
    monkeypatch.setattr(streaming, "norm_in_cache", lambda *options: fused.norm_into(*options, None))
    latents = noise(1, 32, 3, 2).bfloat16()
    half = f32c32(8).bfloat16()
    truth = f32c32(8).bfloat16().double().decoder(latents.double())
    assert error(decode_in_strips(half, latents, 8, None, 2), truth) <= 1.05 * error(half.decoder(latents), truth)


def test_norms_without_triton_need_no_copies_and_are_as_near(dtype):
    x, residual = noise(1, 64, 5, 3).to(dtype), noise(1, 64, 5, 3, seed=1).to(dtype)
    x, residual = (one.contiguous(memory_format=torch.channels_last) for one in (x, residual))
    norm = RMSNorm(64, 1e-5, bias=True).requires_grad_(False).to(dtype)
    norm.weight.copy_(noise(64, seed=2))
    norm.bias.copy_(noise(64, seed=3))
    library = norm(x.movedim(1, -1)).movedim(-1, 1) + residual
    exact = rounded_norm(x.double().movedim(1, -1), norm.weight.double(), norm.bias.double()).movedim(-1, 1)
    got, activated = torch.empty_like(x), torch.empty_like(x)
    fused.norm_into(got, x.clone(memory_format=torch.preserve_format), norm, residual, None)
    check(got, library, exact + residual.double())
    fused.norm_into(activated, x.clone(memory_format=torch.preserve_format), norm, residual, torch.nn.ReLU())
    assert torch.equal(activated, F.relu(got))


def test_scores_computed_together_are_those_of_the_pieces():
    maps = [noise(1, 2, 64, 70), noise(1, 2, 64, 70, seed=1)]
    apart = [
        torch.cat([attention.piece_scores(one[..., a:b], 32) for one in maps], dim=1)
        for a, b in workspace.chunks(70, 16)
    ]
    results = list(attention.batched_scores(maps, 16, 32))
    assert len(results) == len(apart)
    for got, expected in zip(results, apart, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_parts_of_a_block_are_those_of_the_plain_one_whichever_kernels_run(everywhere):
    transformer = narrow_transformer("rms_norm_across_heads")
    one, states = transformer.transformer_blocks[0], noise(2, 15, 64)
    plain = block.feed_forward(one.ff, states, (3, 5)), block.self_attention(one.attn1, states)
    for kernels_in_use in (ALL, *(frozenset({name}) for name in ALL)):
        got = (
            block.feed_forward(one.ff, states, (3, 5), kernels_in_use),
            block.self_attention(one.attn1, states, kernels=kernels_in_use),
        )
        torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-4)
