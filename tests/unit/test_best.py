"""Best of N: the best images are kept, and each is the image that its seed generates alone."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from bounded import bounded
from clips import save_clip
from PIL import Image
from safetensors.torch import load_file, save_file

import sana_core
from sana_core.__main__ import main
from sana_core.batch import best
from sana_core.batch.best import Best, load_scorer
from sana_core.errors import InputError

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SIZE = {"width": 64, "height": 64, "steps": 3}
# Results are the same bits only with the same number of threads.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images(checkpoint):
    """Six images of each prompt [2, 6, 3, H, W], generated without a scorer."""
    return sana_core.generate(PROMPTS, checkpoint, seed=5, count=6, **SIZE).unflatten(0, (2, 6))


@pytest.fixture(scope="module")
def ranks(clip, images):
    """Scores of all images [2, 6], and the index of each image, the best first."""
    score = load_scorer(clip).score
    scores = torch.stack([score(images[number], prompt) for number, prompt in enumerate(PROMPTS)])
    return scores, scores.argsort(1, descending=True)


def test_the_best_are_the_images_with_the_highest_scores(checkpoint, clip, images, ranks):
    report = {}
    picked = sana_core.generate(PROMPTS, checkpoint, seed=5, best=2, of=6, scorer=clip, report=report, **SIZE)
    scores, order = ranks
    expected = [images[prompt, order[prompt, rank]] for prompt in range(2) for rank in range(2)]
    assert torch.equal(picked, torch.stack(expected))
    seeds = [5 + int(order[prompt, rank]) for prompt in range(2) for rank in range(2)]
    assert [(pick["prompt"], pick["seed"], pick["rank"]) for pick in report["picked"]] == [
        (number // 2, seed, 1 + number % 2) for number, seed in enumerate(seeds)
    ]
    best = [scores[prompt, order[prompt, rank]] for prompt in range(2) for rank in range(2)]
    assert [pick["score"] for pick in report["picked"]] == pytest.approx([float(score) for score in best], abs=1e-3)
    again = sana_core.generate(PROMPTS[:1], checkpoint, seed=seeds[0], **SIZE)
    assert torch.equal(picked[:1], again)


def test_the_best_come_with_their_scores_and_a_wrong_call_is_refused(checkpoint, clip, images, ranks):
    options = {"seed": 5, "best": 2, "of": 6, "scorer": clip, **SIZE}
    picks = sana_core.generate_best(PROMPTS[:1], checkpoint, **options)
    scores, order = (by_prompt[0] for by_prompt in ranks)
    assert [pick.rank for pick in picks] == [1, 2]
    for pick, place in zip(picks, order[:2], strict=True):
        assert pick.image.seed == 5 + int(place) and torch.equal(pick.pixels, images[0, place])
        assert pick.score == pytest.approx(float(scores[place]), abs=1e-3)
    for wrong, message in (
        ({"best": None, "of": None, "scorer": None}, "best: got none, expected best, of and scorer"),
        ({"scorer": None}, "best: got only a part of best, of and scorer"),
        ({"stpes": 3}, "stpes: no option of generate; the nearest is steps"),
        ({"latents": images}, "latents: got it with best"),
    ):
        with pytest.raises(InputError, match=message):
            sana_core.generate_best(PROMPTS, checkpoint, **options | wrong)


def command(name, what, checkpoint, clip, *options):
    words = [name, what, "--checkpoint", checkpoint, "--width", 64, "--height", 64, "--steps", 3, "--seed", 5]
    return main([str(word) for word in (*words, "--of", 6, "--scorer", clip, "--out", "out", *options)])


def entry(path):
    return json.loads(Image.open(path).text["sana"])


def names(ranks, keep, prompts=2):
    return {f"{prompt:05d}_{5 + int(place)}.png" for prompt in range(prompts) for place in ranks[1][prompt, :keep]}


def test_generate_writes_score_and_rank(checkpoint, clip, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("generate", PROMPTS[0], checkpoint, clip, "--best", 2) == 0
    assert {path.name for path in Path("out").iterdir()} == names(ranks, 2, 1)
    first = entry(f"out/00000_{5 + int(ranks[1][0, 0])}.png")
    assert first["rank"] == 1 and first["prompt"] == PROMPTS[0]
    assert first["score"] == pytest.approx(float(ranks[0].max(1)[0][0]), abs=1e-3)


def test_a_batch_keeps_the_best_and_resumes(checkpoint, clip, ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 2, "--report") == 0
    pngs = {path.name: path for path in Path("out").glob("*.png")}
    assert pngs.keys() == names(ranks, 2)
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert {name: image["rank"] for name, image in manifest["images"].items()} == {
        f"{prompt:05d}_{5 + int(ranks[1][prompt, rank])}.png": rank + 1 for prompt in range(2) for rank in range(2)
    }
    assert all(entry(path)["score"] == manifest["images"][name]["score"] for name, path in pngs.items())
    # One prompt lacks an image, the other prompt is complete, and the manifest is lost.
    lost = f"00001_{5 + int(ranks[1][1, 0])}.png"
    content, saved = pngs[lost].read_bytes(), {name: path.stat().st_mtime_ns for name, path in pngs.items()}
    pngs[lost].unlink()
    Path("out/manifest.json").unlink()
    capsys.readouterr()
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 2, "--report") == 0
    said = capsys.readouterr().out
    assert "2 of 4 images exist" in said and "6 images in" in said
    assert {path.name for path in Path("out").glob("*.png")} == pngs.keys() and pngs[lost].read_bytes() == content
    assert all(path.stat().st_mtime_ns == saved[name] for name, path in pngs.items() if name != lost)
    assert json.loads(Path("out/manifest.json").read_text())["images"] == manifest["images"]
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 2) == 0
    assert "4 of 4 images exist" in capsys.readouterr().out


def valid(text):
    """The content of `text`, which must be JSON by its standard: without NaN and infinity."""

    def refuse(name):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def nan_for(monkeypatch):
    """A function: from its call on, the scorer gives NaN for the pixels of `bad`, as a model in float16 may."""

    def spoil(bad):
        def spoilt(folder, *where):
            scorer = load_scorer(folder, *where)

            def score(pixels, prompt):
                is_bad = any(torch.equal(pixels[0], image) for image in bad)
                return scorer.score(pixels, prompt) * (float("nan") if is_bad else 1)

            return scorer._replace(score=score)

        monkeypatch.setattr(best, "load_scorer", spoilt)

    return spoil


def test_an_image_without_a_number_ranks_last_and_is_named(checkpoint, clip, images, ranks, nan_for, caplog):
    order = ranks[1][0].tolist()
    nan_for([images[0, order[0]], images[0, order[3]]])
    picks = sana_core.generate_best(PROMPTS[:1], checkpoint, seed=5, best=6, of=6, scorer=clip, **SIZE)
    numbers = [place for place in order if place not in (order[0], order[3])]
    assert [pick.image.seed - 5 for pick in picks] == numbers + sorted([order[0], order[3]])
    assert [pick.describe()["score"] is None for pick in picks] == [False] * 4 + [True] * 2
    said = f"scorer: clip gave nan for prompt 0, seed {5 + order[0]}, expected a number; this image ranks last"
    assert said in caplog.messages and len(caplog.messages) == 2


def test_one_bad_score_does_not_end_a_batch_and_its_json_is_valid(
    checkpoint, clip, images, ranks, nan_for, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    worst = ranks[1][:, -1].tolist()
    nan_for([images[0, worst[0]], *images[1]])
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 6) == 0
    manifest = valid(Path("out/manifest.json").read_text())["images"]
    assert len(manifest) == 12 and manifest[f"00000_{5 + worst[0]}.png"]["score"] is None
    assert [image["score"] for image in manifest.values()].count(None) == 7
    for path in Path("out").glob("*.png"):
        assert valid(Image.open(path).text["sana"])["score"] == manifest[path.name]["score"]
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 6) == 0
    assert "12 of 12 images exist" in capsys.readouterr().out


def test_a_scorer_that_never_gives_a_number_ends_the_batch(checkpoint, clip, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    broken = shutil.copytree(clip, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    # exp(200) is infinite in float32.
    save_file({**tensors, "logit_scale": torch.tensor(200.0)}, broken / "model.safetensors")
    assert command("batch", "prompts.txt", checkpoint, broken, "--best", 1) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert re.match(r"scorer: broken gave -?inf for prompt \d, seed \d+, and no number for any image before; use", line)
    assert not list(Path("out").glob("*.png"))


def test_a_manifest_with_nan_of_an_earlier_version_becomes_valid_json(checkpoint, clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 1) == 0
    file = Path("out/manifest.json")
    for number in ("NaN", "-Infinity", "1e999"):
        file.write_text(re.sub(r'"score": [^,]+', f'"score": {number}', file.read_text()))
        assert command("batch", "prompts.txt", checkpoint, clip, "--best", 1) == 0
        assert len(valid(file.read_text())["images"]) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"best": 1, "of": 4}, "best: got only a part of best, of and scorer"),
        ({"of": 4}, "best: got only a part of best, of and scorer"),
        ({"best": 5, "of": 4, "scorer": "clip"}, "best: got 5, expected a whole number from 1 to 4"),
        ({"best": 1, "of": 4, "scorer": "clip", "count": 2}, "count: got 2 with best"),
        ({"scorer": "clip"}, "best: got only a part of best, of and scorer"),
        ({"after": 2}, "after: no option of generate"),
    ],
)
def test_what_cannot_be_chosen_is_named(checkpoint, options, message):
    with pytest.raises(InputError, match=message):
        sana_core.generate(PROMPTS, checkpoint, **options)


def shard(folder):
    """Store the weights of the CLIP in `folder` as one shard with an index."""
    name = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / name)
    weight_map = dict.fromkeys(load_file(folder / name), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_choice_depends_on_all_files_of_the_scorer(tmp_path):
    save_clip(tmp_path / "clip")
    choice = Best(1, 2, tmp_path / "clip")
    before = choice.describe()
    shard(tmp_path / "clip")
    assert choice.describe().keys() == before.keys()
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        last = choice.describe()["scorer_weights"]
        with (tmp_path / "clip" / name).open("a") as file:
            file.write(" ")
        assert choice.describe()["scorer_weights"] != last, name


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pipe_in_a_scorers_folder_is_not_waited_for(tmp_path, name):
    save_clip(tmp_path / "clip")
    (tmp_path / "clip" / name).unlink()
    os.mkfifo(tmp_path / "clip" / name)
    with bounded():
        assert Best(1, 2, tmp_path / "clip").describe()["scorer"] == "clip"
