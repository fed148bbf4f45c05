"""The posters that the bundled model learns: held-out scenes, captions, and painting."""

import itertools
import json
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import ROOT, TINY
from diffusers import AutoencoderDC
from PIL import Image
from safetensors.torch import load_file
from scipy.ndimage import label

import sana_core
from demo import autoencoder, beside, evaluate, judge, recipe, scorer, world
from demo.captions import NUMBERS, SAID, prompt, random_caption
from demo.dataset import write_dataset
from demo.layout import apart, lay_out
from demo.painting import paint, paint_placed
from sana_core.batch.best import load_scorer
from sana_core.checkpoints import find_part, inspect_checkpoint, load_text_encoder
from sana_core.checkpoints.generation import shift_of
from sana_core.model.text import encode_prompts
from sana_core.runtime.image_files import levels
from sana_core.training.dataset import check_controls, read_dataset
from sana_core.training.settings import read_settings


@pytest.fixture(scope="module")
def scenes():
    return list(itertools.islice(world.training_scenes(random.Random(0)), 300))


def test_training_never_shows_a_held_out_combination(scenes):
    train, held_out = world.combinations()
    assert len(held_out) == 288 and not set(train) & set(held_out)
    assert not set(held_out) & {item for scene in scenes for item in world.combinations_of(scene)}
    for part in (train, held_out):
        assert [len(set(words)) for words in zip(*part, strict=True)] == [4, 5, 3, 7, 8]


def test_a_caption_counts_every_group_and_names_its_colour(scenes):
    rng = random.Random(1)
    for scene in scenes:
        caption = random_caption(rng, scene)
        for group in scene.groups:
            number, plural = (NUMBERS[group.count], "s") if group.count > 1 else ("an?", "")
            nouns = "|".join(SAID[group.kind])
            assert re.search(rf"\b{number} {group.colour} ({nouns}){plural}\b", caption), (caption, group)
        assert sum(caption.count(f"{word} ") for word in NUMBERS.values()) == sum(g.count > 1 for g in scene.groups)


def test_the_prompt_of_a_combination():
    combination = world.Combination("dusk", "sea", "watercolour", "boat", "orange")
    assert prompt(combination) == "a watercolour of an orange boat on the sea at dusk"
    assert prompt(combination, 3) == "a watercolour of three orange boats on the sea at dusk"


@pytest.mark.parametrize("size", world.SIZES)
def test_every_subject_stands_apart_from_the_others_on_the_side_that_is_said(scenes, size):
    wide = size[0] / size[1]
    for scene in scenes:
        things = lay_out(scene, wide, random.Random(scene.seed))
        assert len(things) == sum(group.count for group in scene.groups)
        assert all(apart(one, other) for one, other in itertools.combinations(things, 2))
        sided = {group.side: group.kind for group in scene.groups if group.side}
        across = {subject.kind: subject.x / wide for subject in things}
        assert "left" not in sided or across[sided["left"]] < 0.5
        assert "right" not in sided or across[sided["right"]] > 0.5


@pytest.mark.parametrize("style", world.STYLES)
def test_a_scene_is_painted_the_same_each_time_and_another_seed_moves_it(scenes, style):
    scene = scenes[0]._replace(style=style)
    assert np.array_equal(paint(scene), paint(scene))
    assert not np.array_equal(paint(scene), paint(scene._replace(seed=scene.seed + 1)))
    assert [paint(scene, *size).shape for size in world.SIZES] == [(512, 512, 3), (384, 640, 3), (640, 384, 3)]


@pytest.mark.parametrize("count", (1, 2, 3))
def test_as_many_subjects_are_painted_as_are_counted(count):
    alone = ("left", "near") if count == 1 else ()
    scene = world.Scene("noon", "snow", "clear", "flat", (world.Group("balloon", "red", count, *alone),), count)
    picture = paint(scene).astype(int)
    _, result = label((picture[..., 0] > 120) & (picture[..., 1:] < 70).all(-1))
    assert result == count


@pytest.mark.slow
def test_the_autoencoder_trains_on_as_if_it_had_not_stopped(tmp_path, monkeypatch):
    torch.manual_seed(0)
    autoencoder.build((16, 32, 32, 64, 64, 128)).save_pretrained(tmp_path / "start")
    monkeypatch.setattr(autoencoder, "START", tmp_path / "start")
    monkeypatch.setattr(autoencoder, "MEASURED", 1)
    monkeypatch.setattr(autoencoder, "CROPS", 1)
    for folder, stops in (("once", (3,)), ("twice", (2, 3))):
        for stop in stops:
            autoencoder.train(tmp_path / folder, lambda step, stop=stop: float(step < stop))
    once, twice = (torch.load(tmp_path / folder / "state.pt", weights_only=True) for folder in ("once", "twice"))
    assert once["step"] == twice["step"] == 3
    start = AutoencoderDC.from_pretrained(tmp_path / "start").state_dict()
    for part in ("model", "averaged"):
        assert all(torch.equal(tensor, twice[part][name]) for name, tensor in once[part].items())
        assert not all(torch.equal(tensor, start[name]) for name, tensor in once[part].items())


@pytest.mark.slow
def test_the_judge_counts_by_what_it_sees_where():
    torch.manual_seed(0)
    model = judge.Judge()
    scenes = list(itertools.islice(judge.scenes_to_judge(random.Random(3)), 12))
    painted = [paint_placed(scene, 384, 640) for scene in scenes]
    pictures = np.stack([picture for picture, _ in painted])
    scene_labels, numbers, colours = judge.targets(scenes)
    middles = torch.stack([judge.cells(things, 384, 640) for _, things in painted])
    assert (numbers.sum(1) == torch.tensor([sum(g.count for g in s.groups) for s in scenes])).all()
    assert ((colours >= 0) == (numbers > 0)).all() and scene_labels.shape == (12, 3)
    # No cell has two subjects of one kind, and the numbers at the positions of the subjects are right.
    assert (middles.sum((2, 3)) == numbers).all() and middles.shape == model(judge.shrink(pictures))[1].shape
    expected = (scene_labels, numbers, colours, middles)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    few = slice(4)
    for _ in range(100):
        optimizer.zero_grad()
        judge.judge_loss(model, judge.shrink(pictures[few]), tuple(part[few] for part in expected)).backward()
        optimizer.step()
    assert judge.score(model, pictures[few], scenes[few])["number"] == 1.0


def test_the_distance_of_features_is_that_of_normal_distributions():
    rng = np.random.default_rng(0)
    one, other, far = (rng.normal(shift, 1, (20_000, 4)) for shift in (0, 0, 2))
    assert judge.distance(one, other) == pytest.approx(0, abs=1e-3)
    # 4 dimensions with a difference of 2 each, over a variance of 4
    assert judge.distance(one, far) == pytest.approx(4, rel=0.03)


@pytest.mark.slow
def test_the_recipe_goes_on_to_a_model_of_its_own_size(tmp_path, monkeypatch):
    def small_settings(folder, name):
        settings = whole_settings(folder, name)
        (phase,) = settings.phase
        validation = replace(settings.validation, every=0, prompts=())
        return replace(settings, phase=(replace(phase, batch=2, steps=2, warmup=1),), validation=validation)

    whole_settings = recipe.settings_in
    monkeypatch.setattr(recipe, "settings_in", small_settings)
    monkeypatch.setattr(recipe, "STAGES", {name: stage._replace(count=6) for name, stage in recipe.STAGES.items()})
    monkeypatch.setattr(recipe.text, "SIZE", recipe.text.SIZE._replace(steps=2))
    evaluated = []
    monkeypatch.setattr(recipe, "evaluate", lambda *paths: evaluated.append(paths))
    monkeypatch.setattr(recipe, "ENCODED", 2)
    monkeypatch.setattr(autoencoder, "MEASURED", 1)
    monkeypatch.setattr(recipe, "CHECKPOINT", tmp_path / "nothing")
    shutil.copytree(TINY / "vae", tmp_path / "autoencoder" / "vae")
    with pytest.raises(recipe.OutOfTime):
        recipe.make(tmp_path, until=0.0, first="256")
    recipe.make(tmp_path, until=float("inf"), first="256")
    assert evaluated == [(tmp_path / "sana-posters", tmp_path / "report")]
    info = inspect_checkpoint(tmp_path / "sana-posters")
    assert find_part(info, "transformer").resolution == 512 and shift_of(info) == 1.5
    (image,) = sana_core.generate(["two red boats"], tmp_path / "sana-posters", steps=1, width=128, height=128)
    assert image.isfinite().all()
    # In another folder it starts from the bundled model, at the named stage.
    monkeypatch.setattr(recipe, "CHECKPOINT", tmp_path / "sana-posters")
    later = tmp_path / "later"
    recipe.make(later, until=float("inf"), first="counting")
    assert not (later / "start-512").exists()
    saved, started = (
        load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        for folder in (recipe.CHECKPOINT, later / "start-counting")
    )
    assert all(torch.equal(started[name], tensor.float()) for name, tensor in saved.items())


def test_the_data_set_is_one_for_the_trainer_and_goes_on(tmp_path, scenes):
    def write():
        write_dataset(tmp_path, scenes[:3], random.Random(1), paint, random_caption)

    write()
    listed = (tmp_path / "metadata.jsonl").read_bytes()
    samples = read_dataset(tmp_path)
    assert [(sample.name, sample.size) for sample in samples] == [(f"00000{i}.png", (512, 512)) for i in range(3)]
    assert all(sample.caption for sample in samples)
    saved = (tmp_path / "000001.png").read_bytes()
    for name in ("000001.png", "metadata.jsonl"):
        (tmp_path / name).unlink()
    write()
    assert (tmp_path / "000001.png").read_bytes() == saved and (tmp_path / "metadata.jsonl").read_bytes() == listed


def test_beside_the_model_stand_edges_and_a_style(tmp_path):
    beside.write_edges(tmp_path / "edges", 2)
    (line, *_) = map(json.loads, (tmp_path / "edges/metadata.jsonl").read_text().splitlines())
    edges = np.asarray(Image.open(tmp_path / "edges" / line["control"]))
    check_controls(read_dataset(tmp_path / "edges"))
    assert edges.shape == (256, 256, 3) and set(np.unique(edges)) == {0, 255} and 0.01 < (edges > 0).mean() < 0.5
    beside.write_style(tmp_path / "style")
    lines = [json.loads(line) for line in (tmp_path / "style/metadata.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and all(line["text"].startswith("a cyanotype of ") for line in lines)
    # Captions name the colours of the drawing, because the model was never trained on a subject without a colour.
    coloured = {f"{colour} {SAID[kind][0]}" for colour in world.COLOURS for kind in world.KINDS}
    assert all(any(words in line["text"] for words in coloured) for line in lines)
    red, _, blue = np.asarray(Image.open(tmp_path / "style" / lines[0]["file_name"])).reshape(-1, 3).mean(0)
    assert blue > red + 40
    runs = [read_settings(beside.HERE / name) for name in ("edges.toml", "style.toml")]
    assert [run.method.kind for run in runs] == ["controlnet", "lora"] and runs[0].out != runs[1].out
    assert [run.phase[0].resolution for run in runs] == [beside.SIDE, world.SIZES[0][0]]


def test_the_scorer_prefers_the_caption_that_is_right():
    rng = random.Random("scored")
    scenes = list(itertools.islice(judge.scenes_to_judge(rng), 40))
    clip = load_scorer(ROOT / "demo" / "sana-posters-scorer")
    images = torch.stack([torch.from_numpy(paint(scene).copy()).movedim(-1, 0) / 127.5 - 1 for scene in scenes])
    said = scorer.captions(rng, scenes)
    right, wrong = (
        torch.cat([clip.score(image[None], caption) for image, caption in zip(images, part, strict=True)])
        for part in (said[:40], said[40:])
    )
    assert (right > wrong).float().mean() >= 0.8


def test_the_judge_knows_paintings_that_training_never_shows():
    expected = evaluate.held_out_scenes(5)[:60]
    pictures = np.stack([paint(scene) for scene in expected])
    model = judge.load()
    assert min(judge.score(model, pictures, expected).values()) >= 0.9
    assert judge.score(model, pictures, expected[1:] + expected[:1])["all"] <= 0.05


def test_each_image_that_is_scored_has_noise_of_its_own(monkeypatch):
    monkeypatch.setattr(evaluate, "STEPS", 2)
    words = "a watercolour of a blue boat on the sea at dusk"
    drawn = evaluate.draw(recipe.CHECKPOINT, [words] * 3, 7, (64, 96), guidance=2.0)
    options = {"width": 64, "height": 96, "steps": 2, "guidance": 2.0}
    alone = [sana_core.generate([words], recipe.CHECKPOINT, seed=7 + k, **options)[0] for k in range(3)]
    assert drawn.shape == (3, 96, 64, 3) and np.array_equal(drawn, np.stack([levels(image) for image in alone]))
    assert len({image.tobytes() for image in drawn}) == 3


def test_the_text_encoder_tells_facts_of_captions_that_training_never_saw():
    encoder = load_text_encoder(recipe.CHECKPOINT / "text_encoder")

    def states(combinations):
        embeds, mask = encode_prompts(encoder, [prompt(combination) for combination in combinations], False, 40)
        return (embeds * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    seen_captions, held_out = world.combinations()
    seen, unseen = random.Random(5).sample(seen_captions, 600), held_out[:100]
    result, asked = states(seen), states(unseen)
    for index, words in enumerate((world.TIMES, world.PLACES, world.STYLES, world.KINDS, tuple(world.COLOURS))):
        answers = torch.eye(len(words))[[words.index(combination[index]) for combination in seen]]
        guessed = (asked @ torch.linalg.lstsq(result, answers).solution).argmax(1).tolist()
        assert (
            np.mean([words[guess] == combination[index] for guess, combination in zip(guessed, unseen, strict=True)])
            >= 0.97
        )
