"""Verifiers: the states that they read beside the library's own forward, and drafts that go by them."""

import json

import pytest
import torch

import sana_core
from demo.verifier import Drafts, order_of, read, save, train
from demo.verifier import gather as gather_draft
from sana_core.batch import pipeline
from sana_core.batch.verifier import Shape, Verifier, load_verifier
from sana_core.checkpoints import load_transformer
from sana_core.errors import CheckpointError, InputError, MissingFileError

PROMPT = "a red circle on a blue background"
SIZE = {"width": 64, "height": 64, "steps": 4}
BLOCK = 2
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(4)
    made = tmp_path_factory.mktemp("models") / "verifier"
    save(Verifier(Shape(BLOCK, 160, 64, 96, 4, 2, 3, 100)), made)
    return made


def generate(checkpoint, folder, **options):
    report = {}
    how = {"seed": 5, "best": 1, "of": 6, "after": 1, "scorer": folder, "report": report, **SIZE, **options}
    return sana_core.generate([PROMPT], checkpoint, **how), report["picked"]


def library_states(checkpoint, trail_x, timestep, text):
    """The states behind the block in the forward of diffusers itself."""
    transformer, seen = load_transformer(checkpoint, reference="diffusers"), []
    block = transformer.transformer_blocks[BLOCK]
    block.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        transformer(trail_x, text[0], timestep, encoder_attention_mask=text[1])
    return seen[0]


def test_a_look_sees_the_states_of_the_prompt_s_own_pass(checkpoint, folder, monkeypatch):
    inputs = []
    denoiser = pipeline.denoiser

    def noted(*args):
        model = denoiser(*args)
        return lambda x, sigma: inputs.append((x, sigma, args[1])) or model(x, sigma)

    seen = []
    monkeypatch.setattr(pipeline, "denoiser", noted)
    monkeypatch.setattr(Verifier, "score", lambda self, states, *text: seen.append(states) or torch.zeros(len(states)))
    generate(checkpoint, folder, of=2, reference="diffusers", sampler="flow_euler")
    x, sigma, text = inputs[0]
    expected = library_states(checkpoint, x, 1000 * sigma[None], text)
    torch.testing.assert_close(seen[0], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
def test_the_draft_that_it_likes_best_is_the_one_of_its_seed(checkpoint, folder, devices):
    image, picked = generate(checkpoint, folder, devices=devices)
    alone = sana_core.generate([PROMPT], checkpoint, seed=picked[0]["seed"], **SIZE)
    assert torch.equal(image, alone) and picked[0]["rank"] == 1 and picked[0]["score"] < 0


def test_it_looks_after_the_last_step_too(checkpoint, folder):
    image, picked = generate(checkpoint, folder, after=4, of=3)
    assert torch.equal(image, sana_core.generate([PROMPT], checkpoint, seed=picked[0]["seed"], **SIZE))


def test_it_learns_which_drafts_a_judge_will_like(checkpoint, tmp_path):
    drafts = Drafts(checkpoint, 64, BLOCK)
    for number in range(40):
        gather_draft(drafts, tmp_path, number, PROMPT, lambda picture: [bool(picture[..., 0].mean() > 96)])
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    gather_draft(drafts, tmp_path, 0, PROMPT, None)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == kept
    losses = []
    verifier, found = train(tmp_path, drafts.encode, BLOCK, lambda step, loss: losses.append(loss), 60)
    assert found["drafts"] == 40 and losses[-1] < losses[0]
    assert order_of(verifier, read(sorted(tmp_path.iterdir()), drafts.encode)) > 0.6


def test_it_is_read_as_it_was_written(folder):
    states, embeds, mask = torch.randn(2, 9, 160), torch.randn(1, 7, 64), torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    scores = load_verifier(folder).score(states, embeds, mask)
    assert torch.equal(scores, load_verifier(folder).score(states, embeds[:, :4], mask[:, :4])) and scores.shape == (2,)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"block": True}, "block: got True in .*/config.json, expected a whole number up to 255"),
        ({"width": 97}, "width: got no multiple of heads"),
        ({"width": 64}, "its weights are of another verifier"),
    ],
)
def test_a_broken_one_is_named(folder, tmp_path, changed, message):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        load_verifier(tmp_path)


def test_missing_weights_and_a_verifier_of_another_model_are_named(checkpoint, folder, tmp_path):
    save(Verifier(Shape(BLOCK, 192, 64, 96, 4, 2, 3, 100)), tmp_path / "other")
    with pytest.raises(InputError, match="scorer: got a verifier of states of width 192 behind block 2"):
        generate(checkpoint, tmp_path / "other")
    with pytest.raises(InputError, match="after: got none with a verifier"):
        generate(checkpoint, folder, after=None)
    (tmp_path / "other" / "model.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"model\.safetensors"):
        load_verifier(tmp_path / "other")
