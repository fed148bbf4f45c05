"""Previews of a run equal the images of the command and of diffusers with the published file."""

import numpy as np
import pytest
from by_diffusers import drawn_by
from checkpoints import CHECKPOINTS
from diffusers import DPMSolverMultistepScheduler
from pictures import write_pictures
from PIL import Image
from tiny import library_pipeline

import sana_core
from sana_core.runtime.image_files import levels
from sana_core.training.settings import Method, Phase, TrainingSettings, Validation
from sana_core.training.trainer import check_base, train

PROMPTS = ("a red circle on a blue background", "a watercolour of a red lighthouse on the sea at dusk")
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
        validation=Validation(every=4, prompts=PROMPTS, steps=STEPS),
    )
    assert check_base(settings) == shift
    file = train(settings)
    pipeline = library_pipeline(model)
    assert isinstance(pipeline.scheduler, DPMSolverMultistepScheduler) and pipeline.scheduler.config.flow_shift == shift
    pipeline.load_lora_weights(str(file))
    for number, prompt in enumerate(PROMPTS):
        seen = np.asarray(Image.open(tmp_path / f"out/pictures/step-0000004-{number:02d}.png")).astype(int)
        size = {"width": 128, "height": 128}
        drawn = sana_core.generate([prompt], model, seed=number, steps=STEPS, loras=[(file, 1.0)], **size)
        assert (levels(drawn[0]) == seen).all()
        plain = sana_core.generate([prompt], model, seed=number, steps=STEPS, **size)
        assert np.abs(levels(plain[0]) - seen).mean() > 0.3
        theirs = drawn_by(pipeline, prompt, seed=number, num_inference_steps=STEPS, output_type="pt")
        assert np.abs(levels(theirs[0] * 2 - 1) - seen).max() <= 1
