"""The images of validations, which the command and diffusers generate too, and the sheet with all of them."""

from dataclasses import replace

import numpy as np
import pytest
from by_diffusers import drawn_by
from checkpoints import CHECKPOINTS
from diffusers import DPMSolverMultistepScheduler
from pictures import write_pictures
from PIL import Image
from tiny import library_pipeline

import sana_core
from sana_core.errors import ExistingFileError, OutputError
from sana_core.runtime.image_files import levels
from sana_core.training import trainer
from sana_core.training.dataset import SHEET
from sana_core.training.previews import BEST, COLUMNS, GAP, HEAD, columns_of
from sana_core.training.settings import Method, Phase, TrainingSettings, Validation
from sana_core.training.states import read_log
from sana_core.training.trainer import check_base, train

PROMPTS = ("a red circle", "a blue square")


@pytest.fixture
def settings(tmp_path, checkpoint):
    write_pictures(tmp_path / "pictures", 4)
    phase = Phase((str(tmp_path / "pictures"),), 128, steps=4, learning_rate=1e-3)
    validation = Validation(every=2, share=0.3, prompts=PROMPTS, steps=1)
    run_settings = TrainingSettings(
        str(checkpoint), str(tmp_path / "out"), (phase,), dtype="float32", method=Method(rank=2)
    )
    return replace(run_settings, validation=validation)


def test_a_column_for_each_validation_and_a_row_for_each_prompt(settings, tmp_path):
    train(settings)
    lines = read_log(tmp_path / "out")
    best = min(
        (line["validation_loss"], line["step"]) for line in lines if line.get("validation_loss") and line["step"]
    )[1]
    with Image.open(tmp_path / "out" / SHEET) as image:
        sheet = np.asarray(image.convert("RGB")).astype(int)
    for row in range(2):
        for column, step in enumerate((0, 2, 4)):
            with Image.open(tmp_path / "out" / "pictures" / f"step-{step:07d}-{row:02d}.png") as image:
                picture = np.asarray(image.convert("RGB")).astype(int)
            height, width = picture.shape[:2]
            top, left = HEAD + row * (height + GAP), GAP + column * (width + GAP)
            cell = sheet[top : top + height, left : left + width]
            assert (cell[2:-2, 2:-2] == picture[2:-2, 2:-2]).all()
            framed = tuple(sheet[top - 1, left + 5]) == tuple(bytes.fromhex(BEST[1:]))
            assert framed == (step == best)
    # a longer run replaces its own
    before = (tmp_path / "out" / SHEET).read_bytes()
    train(replace(settings, phase=(replace(settings.phase[0], steps=6),)))
    assert (tmp_path / "out" / SHEET).read_bytes() != before


@pytest.mark.parametrize("out", ["pictures/runs/first", "pictures"])
def test_a_run_that_writes_into_its_data_can_be_resumed(settings, tmp_path, out):
    settings = replace(settings, out=str(tmp_path / out))
    train(settings)
    assert len(list((tmp_path / out / "pictures").glob("*.png"))) == 6
    train(replace(settings, phase=(replace(settings.phase[0], steps=6),)))
    losses = [line["step"] for line in read_log(tmp_path / out) if "loss" in line]
    assert losses == [1, 2, 3, 4, 5, 6]


def test_a_sheet_of_others_stays(settings, tmp_path):
    file = tmp_path / "out" / SHEET
    file.parent.mkdir()
    Image.new("RGB", (8, 8)).save(file)
    before = file.read_bytes()
    with pytest.raises(ExistingFileError, match="is not of this run"):
        train(settings)
    assert file.read_bytes() == before


def test_a_folder_of_its_name_stays(settings, tmp_path):
    (tmp_path / "out" / SHEET).mkdir(parents=True)
    with pytest.raises(ExistingFileError, match="is not of this run"):
        train(settings)


def test_a_sheet_that_cannot_be_read_is_one_line(settings, tmp_path):
    file = tmp_path / "out" / SHEET
    file.parent.mkdir()
    file.symlink_to(file)
    with pytest.raises(OutputError, match=rf"^out: cannot write into .*{SHEET} .*; see its rights and its disk"):
        train(settings)


def test_of_many_validations_the_first_the_last_and_the_best_have_columns():
    steps = list(range(0, 10_000, 100))
    columns = columns_of(steps, 700)
    assert len(columns) <= COLUMNS and {0, 700, 9900} <= set(columns) and columns == sorted(columns)
    assert columns_of(steps[:5], None) == steps[:5]


def test_the_best_of_the_last_phase_is_marked_and_published(settings, tmp_path, monkeypatch):
    """The validation after the last step of a phase measures the images of the next phase. Here it is the best one."""
    steps, marked = [0, 2, 4], []
    losses = iter([0.5, 0.3, 0.4])
    monkeypatch.setattr(trainer.Trainer, "validation_loss", lambda run: next(losses))
    monkeypatch.setattr(trainer, "write_sheet", lambda out, parts, best: marked.append(best))
    phase = replace(settings.phase[0], steps=2)
    file = train(replace(settings, phase=(phase, phase)))
    assert [line["step"] for line in read_log(tmp_path / "out") if "validation_loss" in line] == steps
    assert marked == [None, 2, 2]
    assert (
        file.read_bytes() == next((tmp_path / "out" / "steps" / "step-0000002").glob("sana.safetensors")).read_bytes()
    )


SCENES = ("a red circle on a blue background", "a watercolour of a red lighthouse on the sea at dusk")
STEPS = 6


# The second model has shift 1.5, which no released model has. At the rate of a LoRA, a DoRA moves a model so far that
# the last bits of the text embeddings become visible levels.
@pytest.mark.parametrize("name, shift", [("sana-tiny", 3.0), pytest.param("sana-posters", 1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind, rate", [("lora", 1e-2), pytest.param("dora", 2e-3, marks=pytest.mark.slow)])
def test_the_pictures_of_a_run_are_those_of_its_file(tmp_path, name, shift, kind, rate):
    model = CHECKPOINTS[name]
    settings = TrainingSettings(
        str(model),
        str(tmp_path / "out"),
        (Phase((write_pictures(tmp_path / "pictures", 3),), 128, batch=3, steps=4, learning_rate=rate),),
        dtype="float32",
        method=Method(kind, rank=4, alpha=3.0, targets="both"),
        validation=Validation(every=4, prompts=SCENES, steps=STEPS),
    )
    assert check_base(settings) == shift
    file = train(settings)
    pipeline = library_pipeline(model)
    assert isinstance(pipeline.scheduler, DPMSolverMultistepScheduler) and pipeline.scheduler.config.flow_shift == shift
    pipeline.load_lora_weights(str(file))
    for number, prompt in enumerate(SCENES):
        seen = np.asarray(Image.open(tmp_path / f"out/pictures/step-0000004-{number:02d}.png")).astype(int)
        size = {"width": 128, "height": 128}
        drawn = sana_core.generate([prompt], model, seed=number, steps=STEPS, loras=[(file, 1.0)], **size)
        assert (levels(drawn[0]) == seen).all()
        plain = sana_core.generate([prompt], model, seed=number, steps=STEPS, **size)
        assert np.abs(levels(plain[0]) - seen).mean() > 0.3
        theirs = drawn_by(pipeline, prompt, seed=number, num_inference_steps=STEPS, output_type="pt")
        assert np.abs(levels(theirs[0] * 2 - 1) - seen).max() <= 1
