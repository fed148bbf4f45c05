"""The scenes of the bundled model: what training never shows, what captions say, and who judges."""

import importlib
import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from setup import ROOT

from demo.autoencoder import build
from demo.dataset import write_dataset
from demo.scenes import beside, judge, scorer, world
from demo.scenes.autoencoder import CHANNELS, LAYERS
from demo.scenes.captions import SAID, prompt, random_caption
from demo.scenes.painting import paint
from sana_core.batch.scorer import load_scorer
from sana_core.checkpoints import load_text_encoder
from sana_core.model.text import encode_prompts
from sana_core.training.dataset import check_controls, read_dataset
from sana_core.training.settings_file import read_settings


@pytest.fixture(scope="module")
def scenes():
    return world.training_scenes(random.Random(0), 300)


def test_training_never_shows_a_held_out_combination(scenes):
    train, held_out = world.combinations()
    assert len(held_out) == 288 and not set(train) & set(held_out)
    assert not set(held_out) & {each for scene in scenes for each in world.combinations_of(scene)}
    # each word of each kind is among what is shown, and among what is held out
    for part in (train, held_out):
        assert [len(set(words)) for words in zip(*part, strict=True)] == [4, 5, 3, 7, 8]


def test_a_caption_names_every_subject_with_its_colour(scenes):
    rng = random.Random(1)
    for scene in scenes:
        caption = random_caption(rng, scene)
        for what in scene.subjects:
            assert any(f"{what.colour} {noun}" in caption for noun in SAID[what.kind]), (caption, what)
        others = [kind for kind in world.KINDS if kind not in {what.kind for what in scene.subjects}]
        assert not any(f" {kind}" in caption for kind in others if kind != "house"), caption


def test_the_prompt_of_a_combination():
    combination = world.Combination("dusk", "sea", "watercolour", "boat", "orange")
    assert prompt(combination) == "a watercolour of an orange boat on the sea at dusk"


def test_a_scene_is_painted_the_same_each_time_and_another_seed_moves_it(scenes):
    scene = scenes[0]
    assert np.array_equal(paint(scene), paint(scene))
    assert not np.array_equal(paint(scene), paint(scene._replace(seed=scene.seed + 1)))
    assert paint(scene, 128, 128).shape == (128, 128, 3)


def test_a_wide_picture_has_things_of_their_own_form():
    scene = world.Scene("noon", "sea", "clear", "flat", (world.Subject("balloon", "red", "right", "near"),), 1)
    square, wide = paint(scene, 256, 256), paint(scene, 512, 256)
    assert wide.shape == (256, 512, 3)

    def extent(picture):
        red = (picture[..., 0] > 180) & (picture[..., 1:] < 100).all(-1)
        rows, columns = np.nonzero(red)
        return np.ptp(columns), np.ptp(rows), columns.mean() / picture.shape[1]

    assert np.allclose(extent(square), extent(wide), atol=2)
    assert abs(extent(square)[2] - extent(wide)[2]) < 0.01


def test_the_data_set_is_one_for_the_trainer_and_goes_on(tmp_path):
    def write():
        rng = random.Random(1)
        write_dataset(tmp_path, world.training_scenes(rng, 3), rng, paint, random_caption)

    write()
    listed = (tmp_path / "metadata.jsonl").read_bytes()
    samples = read_dataset(tmp_path)
    assert [(sample.name, sample.size) for sample in samples] == [(f"00000{i}.png", (256, 256)) for i in range(3)]
    assert all(sample.caption for sample in samples)
    kept = (tmp_path / "000001.png").read_bytes()
    for name in ("000001.png", "metadata.jsonl"):
        (tmp_path / name).unlink()
    write()
    assert (tmp_path / "000001.png").read_bytes() == kept and (tmp_path / "metadata.jsonl").read_bytes() == listed


def test_beside_the_model_stand_edges_and_a_style(tmp_path):
    beside.write_edges(tmp_path / "edges", 2)
    (line, *_) = map(json.loads, (tmp_path / "edges/metadata.jsonl").read_text().splitlines())
    edges = np.asarray(Image.open(tmp_path / "edges" / line["control"]))
    check_controls(read_dataset(tmp_path / "edges"))
    assert edges.shape == (256, 256, 3) and set(np.unique(edges)) == {0, 255} and 0.01 < (edges > 0).mean() < 0.5
    beside.write_style(tmp_path / "style")
    lines = [json.loads(line) for line in (tmp_path / "style/metadata.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and all(line["text"].startswith("a cyanotype of a") for line in lines)
    coloured = {f"{colour} {SAID[kind][0]}" for colour in world.COLOURS for kind in world.KINDS}
    assert not any(words in line["text"] for line in lines for words in coloured)
    red, _, blue = np.asarray(Image.open(tmp_path / "style" / lines[0]["file_name"])).reshape(-1, 3).mean(0)
    assert blue > red + 40
    files = {"edges.toml": "controlnet", "style.toml": "lora", "train.toml": "full"}
    runs = [read_settings(beside.HERE / name) for name in files]
    assert [run.method.kind for run in runs] == list(files.values()) and len({run.out for run in runs}) == 3
    assert all(run.phase[0].resolution == world.PIXELS for run in runs)


def test_the_scorer_prefers_the_caption_that_is_right():
    rng, scenes = random.Random("scored"), []
    for combination in rng.sample(world.all_combinations(world.KINDS, world.COLOURS), 40):
        scenes.append(world.scene_of(rng, combination))
    clip = load_scorer(ROOT / "demo" / "sana-scenes-scorer")
    images = torch.stack([torch.from_numpy(paint(scene).copy()).movedim(-1, 0) / 127.5 - 1 for scene in scenes])
    said = scorer.captions(rng, scenes)
    right, wrong = (
        torch.cat([clip.score(image[None], caption) for image, caption in zip(images, part, strict=True)])
        for part in (said[:40], said[40:])
    )
    assert (right > wrong).float().mean() >= 0.8


def test_the_judge_knows_paintings_that_training_never_shows():
    rng = random.Random(4)
    wanted = rng.sample(world.combinations()[1], 60)
    pictures = np.stack([paint(world.scene_of(rng, each)) for each in wanted])
    model = judge.load()
    assert min(judge.score(model, pictures, wanted).values()) >= 0.95
    others = wanted[1:] + wanted[:1]
    assert judge.score(model, pictures, others)["all"] <= 0.05


def test_the_text_encoder_tells_facts_of_captions_that_training_never_saw():
    encoder = load_text_encoder(importlib.import_module("demo.scenes.recipe").CHECKPOINT / "text_encoder")

    def states(combinations):
        embeds, mask = encode_prompts(encoder, [prompt(each) for each in combinations], False, 40)
        return (embeds * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    known, held_out = world.combinations()
    seen, unseen = random.Random(5).sample(known, 600), held_out[:100]
    found, asked = states(seen), states(unseen)
    for index, words in enumerate((world.TIMES, world.PLACES, world.STYLES, world.KINDS, tuple(world.COLOURS))):
        answers = torch.eye(len(words))[[words.index(each[index]) for each in seen]]
        guessed = (asked @ torch.linalg.lstsq(found, answers).solution).argmax(1).tolist()
        assert np.mean([words[guess] == each[index] for guess, each in zip(guessed, unseen, strict=True)]) >= 0.97


def test_the_recipes_find_all_that_they_build_on():
    recipe, older = importlib.import_module("demo.scenes.recipe"), importlib.import_module("demo.recipe")
    assert recipe.read_settings(recipe.HERE / "train.toml").phase[0].resolution == world.PIXELS
    assert older.CHECKPOINT.is_dir()
    # 25 MB in bfloat16 in all
    parts = (
        recipe.build(recipe.SIZE.hidden, heads=recipe.HEADS, layers=recipe.LAYERS, pixels=world.PIXELS),
        build(CHANNELS, LAYERS),
    )
    assert sum(each.numel() for part in parts for each in part.parameters()) < 12e6
