"""Many drafts, of which the best are kept: the same images that each seed gives alone."""

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
from sana_core.batch import best, pipeline
from sana_core.batch.best import Best, Rounds, find_best
from sana_core.batch.pipeline import SamplingSettings
from sana_core.batch.plan import Workload, batch_images
from sana_core.batch.scorer import load_scorer
from sana_core.errors import InputError
from sana_core.sampling.samplers import find_sampler

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
SIZE = {"width": 64, "height": 64, "steps": 3}
# one process draws what another has drawn
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def drafts(checkpoint):
    """Six drafts of each prompt, by the call that knows nothing of a scorer."""
    return sana_core.generate(PROMPTS, checkpoint, seed=5, count=6, **SIZE).unflatten(0, (2, 6))


@pytest.fixture(scope="module")
def ranks(clip, drafts):
    """Scores of all drafts [2, 6], and the places of the best first."""
    scores = torch.stack([load_scorer(clip).score(each, prompt) for each, prompt in zip(drafts, PROMPTS, strict=True)])
    return scores, scores.argsort(1, descending=True)


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
def test_the_best_are_the_drafts_that_score_most(checkpoint, clip, drafts, ranks, devices):
    report = {}
    images = sana_core.generate(
        PROMPTS, checkpoint, seed=5, best=2, of=6, scorer=clip, report=report, devices=devices, **SIZE
    )
    scores, order = ranks
    wanted = [drafts[prompt, order[prompt, rank]] for prompt in range(2) for rank in range(2)]
    assert torch.equal(images, torch.stack(wanted))
    seeds = [5 + int(order[prompt, rank]) for prompt in range(2) for rank in range(2)]
    assert [(pick["prompt"], pick["seed"], pick["rank"]) for pick in report["picked"]] == [
        (number // 2, seed, 1 + number % 2) for number, seed in enumerate(seeds)
    ]
    best = [scores[prompt, order[prompt, rank]] for prompt in range(2) for rank in range(2)]
    assert [pick["score"] for pick in report["picked"]] == pytest.approx([float(score) for score in best], abs=1e-3)
    again = sana_core.generate(PROMPTS[:1], checkpoint, seed=seeds[0], **SIZE)
    assert torch.equal(images[:1], again)


def test_the_best_come_with_their_scores_and_a_wrong_call_is_refused(checkpoint, clip, drafts, ranks):
    own = {"seed": 5, "best": 2, "of": 6, "scorer": clip, **SIZE}
    picks = sana_core.generate_best(PROMPTS[:1], checkpoint, **own)
    scores, order = (each[0] for each in ranks)
    assert [pick.rank for pick in picks] == [1, 2]
    for pick, place in zip(picks, order[:2], strict=True):
        assert pick.image.seed == 5 + int(place) and torch.equal(pick.pixels, drafts[0, place])
        assert pick.score == pytest.approx(float(scores[place]), abs=1e-3)
    for wrong, message in (
        ({"best": None, "of": None, "scorer": None}, "best: got none, expected best, of and scorer"),
        ({"scorer": None}, "best: got only a part of best, of and scorer"),
        ({"stpes": 3}, "stpes: no option of generate; the nearest is steps"),
        ({"latents": drafts}, "latents: got it with best"),
    ):
        with pytest.raises(InputError, match=message):
            sana_core.generate_best(PROMPTS, checkpoint, **own | wrong)


@pytest.mark.parametrize("sampler", ["flow_dpmpp_2m", "flow_dpmpp_3m", "flow_euler"])
def test_in_rounds_half_of_the_drafts_go_and_no_step_is_drawn_twice(checkpoint, clip, monkeypatch, sampler):
    """Scores after one and two of five steps are those of what the sampler itself expects there, undisturbed."""
    own = {**SIZE, "steps": 5, "sampler": sampler}
    expected = []

    def watched(name):
        flow = find_sampler(name)

        def sample(model, x, sigmas, callback, **more):
            seen = []
            drawn = flow.sample(model, x, sigmas, callback=lambda state: seen.append(state["denoised"]), **more)
            expected.append(seen)
            return drawn

        return flow._replace(sample=sample)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "find_sampler", watched)
        whole = sana_core.generate(PROMPTS[:1], checkpoint, seed=5, count=6, **own)
    models = pipeline.load_models(checkpoint, torch.device("cpu"), SamplingSettings(), checkpoint)
    scorer = load_scorer(clip)

    def scores(step, drafts):
        pictures = torch.cat([torch.stack(pipeline.decode(models.autoencoder, expected[i][step - 1])) for i in drafts])
        return scorer.score(pictures, PROMPTS[0])

    three = sorted(scores(1, range(6)).argsort(descending=True)[:3].tolist())
    two = sorted(three[i] for i in scores(2, three).argsort(descending=True)[:2])
    first = two[int(scorer.score(whole[two], PROMPTS[0]).argmax())]
    calls = []
    denoiser = pipeline.denoiser

    def counted(*args):
        model = denoiser(*args)
        return lambda x, sigma: calls.append(float(sigma)) or model(x, sigma)

    monkeypatch.setattr(pipeline, "denoiser", counted)
    for devices in (None, ["cpu", "cpu"]):
        report = {}
        best = {"best": 1, "of": 6, "after": 1, "scorer": clip, "report": report, "devices": devices}
        images = sana_core.generate(PROMPTS[:1], checkpoint, seed=5, **best, **own)
        assert torch.equal(images, whole[first][None]) and report["picked"][0]["seed"] == 5 + first
    # a chunk may be drawn by two at the end of a round
    alone = calls[: 6 + 3 + 2 * 3]
    assert [alone.count(sigma) for sigma in sorted(set(alone), reverse=True)] == [6, 3, 2, 2, 2]


@pytest.mark.parametrize("of, after, expected", [(8, 1, [(1, 4), (2, 2)]), (3, 2, [(2, 2)]), (2, 1, []), (8, 5, [])])
def test_half_go_each_time_until_twice_as_many_as_are_kept_are_left(of, after, expected):
    assert find_best(1, of, "clip", after).looks(5) == expected


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
    assert {name: each["rank"] for name, each in manifest["pictures"].items()} == {
        f"{prompt:05d}_{5 + int(ranks[1][prompt, rank])}.png": rank + 1 for prompt in range(2) for rank in range(2)
    }
    assert all(entry(path)["score"] == manifest["pictures"][name]["score"] for name, path in pngs.items())
    # of one prompt an image is gone, the other prompt is whole, and the list is lost
    lost = f"00001_{5 + int(ranks[1][1, 0])}.png"
    whole, kept = pngs[lost].read_bytes(), {name: path.stat().st_mtime_ns for name, path in pngs.items()}
    pngs[lost].unlink()
    Path("out/manifest.json").unlink()
    capsys.readouterr()
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 2, "--report") == 0
    said = capsys.readouterr().out
    assert "2 of 4 images are there already" in said and "6 images in" in said
    assert {path.name for path in Path("out").glob("*.png")} == pngs.keys() and pngs[lost].read_bytes() == whole
    assert all(path.stat().st_mtime_ns == kept[name] for name, path in pngs.items() if name != lost)
    assert json.loads(Path("out/manifest.json").read_text())["pictures"] == manifest["pictures"]
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 2) == 0
    assert "4 of 4 images are there already" in capsys.readouterr().out


def test_a_batch_with_an_early_look_ends_at_the_same_images_however_often_it_stops(
    checkpoint, clip, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    options = ("batch", "prompts.txt", checkpoint, clip, "--best", 1, "--after", 1)
    assert command(*options) == 0
    whole = {path.name: path.read_bytes() for path in Path("out").glob("*.png")}
    assert len(whole) == 2 and json.loads(Path("out/manifest.json").read_text())["settings"]["after"] == 1
    Path("out", max(whole)).unlink()
    assert command(*options) == 0
    assert {path.name: path.read_bytes() for path in Path("out").glob("*.png")} == whole
    assert command(*options[:-1], 4, "--out", "other") == 1
    assert "after: got 4, expected a whole number from 1 to 3" in capsys.readouterr().err


def valid(text):
    """The content of `text`, which must be JSON by its standard: without NaN and infinity."""

    def refuse(name):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def nan_for(monkeypatch):
    """A function after whose call the scorer gives NaN for the pixels of `drafts`, as a model in float16 may."""

    def spoil(drafts):
        def spoilt(folder, *where):
            scorer = load_scorer(folder, *where)

            def score(images, prompt):
                bad = any(torch.equal(images[0], draft) for draft in drafts)
                return scorer.score(images, prompt) * (float("nan") if bad else 1)

            return scorer._replace(score=score)

        monkeypatch.setattr(best, "load_scorer", spoilt)

    return spoil


def test_a_draft_without_a_number_ranks_last_and_is_named(checkpoint, clip, drafts, ranks, nan_for, caplog):
    order = ranks[1][0].tolist()
    nan_for([drafts[0, order[0]], drafts[0, order[3]]])
    picks = sana_core.generate_best(PROMPTS[:1], checkpoint, seed=5, best=6, of=6, scorer=clip, **SIZE)
    numbers = [place for place in order if place not in (order[0], order[3])]
    assert [pick.image.seed - 5 for pick in picks] == numbers + sorted([order[0], order[3]])
    assert [pick.describe()["score"] is None for pick in picks] == [False] * 4 + [True] * 2
    said = f"scorer: clip gave nan for prompt 0, seed {5 + order[0]}, expected a number; this draft ranks last"
    assert said in caplog.messages and len(caplog.messages) == 2


def test_one_bad_score_does_not_end_a_batch_and_its_json_is_valid(
    checkpoint, clip, drafts, ranks, nan_for, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    worst = ranks[1][:, -1].tolist()
    nan_for([drafts[0, worst[0]], *drafts[1]])
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 6) == 0
    manifest = valid(Path("out/manifest.json").read_text())["pictures"]
    assert len(manifest) == 12 and manifest[f"00000_{5 + worst[0]}.png"]["score"] is None
    assert [image["score"] for image in manifest.values()].count(None) == 7
    for path in Path("out").glob("*.png"):
        assert valid(Image.open(path).text["sana"])["score"] == manifest[path.name]["score"]
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 6) == 0
    assert "12 of 12 images are there already" in capsys.readouterr().out


@pytest.mark.parametrize("after", [None, 1])
def test_a_scorer_that_never_gives_a_number_ends_the_batch(checkpoint, clip, tmp_path, monkeypatch, capsys, after):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    broken = shutil.copytree(clip, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    # exp(200) is infinite in float32.
    save_file({**tensors, "logit_scale": torch.tensor(200.0)}, broken / "model.safetensors")
    options = ["--best", 1, *([] if after is None else ["--after", after])]
    assert command("batch", "prompts.txt", checkpoint, broken, *options) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert re.match(r"scorer: broken gave -?inf for prompt \d, seed \d+, and no number for any draft before; use", line)
    assert not list(Path("out").glob("*.png"))


def test_early_looks_drop_drafts_without_a_finite_score_first():
    workload = Workload(PROMPTS[:1], batch_images(1, 6, 5))
    rounds = Rounds(workload, 6, [(1, 3)], 4, "clip")
    rounds.begin(list(workload.images), 1)
    for image, score in zip(workload.images, (1.0, float("nan"), 3.0, float("inf"), 2.0, 0.5), strict=True):
        rounds.note(image, score, torch.zeros(1, 32, 2, 2), added=True)
    assert [image.seed - 5 for image in rounds.better(5)] == [0, 1, 2, 4, 5]
    assert [image.seed - 5 for image in rounds.better(3)] == [0, 2, 4]


def test_a_manifest_with_nan_of_an_earlier_version_becomes_valid_json(checkpoint, clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    assert command("batch", "prompts.txt", checkpoint, clip, "--best", 1) == 0
    file = Path("out/manifest.json")
    for number in ("NaN", "-Infinity", "1e999"):
        file.write_text(re.sub(r'"score": [^,]+', f'"score": {number}', file.read_text()))
        assert command("batch", "prompts.txt", checkpoint, clip, "--best", 1) == 0
        assert len(valid(file.read_text())["pictures"]) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"best": 1, "of": 4}, "best: got only a part of best, of and scorer"),
        ({"of": 4}, "best: got only a part of best, of and scorer"),
        ({"best": 5, "of": 4, "scorer": "clip"}, "best: got 5, expected a whole number from 1 to 4"),
        ({"best": 1, "of": 4, "scorer": "clip", "count": 2}, "count: got 2 with best"),
        ({"after": 2}, "best: got only a part of best, of and scorer"),
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
