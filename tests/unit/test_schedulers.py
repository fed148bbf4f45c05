"""The scheduler of a diffusers folder: followed where this package has it, and named where it has not."""

import json

import pytest
import torch
from by_diffusers import drawn_by
from safetensors.torch import load_file
from tiny import library_pipeline

import sana_core
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.checkpoints.generation import LOWER_CASE, checkpoint_notes, shift_of

EULER, DPM = "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"
HEUN = "FlowMatchHeunDiscreteScheduler"


def set_scheduler(folder, name, **settings):
    file = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    shift = config.get("flow_shift", config.get("shift"))
    plain = {"shift": shift} if name in (EULER, HEUN) else {**config, "flow_shift": shift}
    file.write_text(json.dumps({**plain, "_class_name": name, **settings}))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", name]}))


def notes_of(folder):
    notes = checkpoint_notes(sana_core.inspect_checkpoint(folder))
    return [note for note in notes if note != LOWER_CASE]


FOLLOWED = [
    (EULER, {}, "flow_euler"),
    (EULER, {"shift": 5.0}, "flow_euler"),
    (HEUN, {}, "flow_heun"),
    (HEUN, {"shift": 5.0}, "flow_heun"),
    (DPM, {"solver_order": 1}, "flow_dpmpp_1"),
    (DPM, {"solver_order": 1, "solver_type": "heun"}, "flow_dpmpp_1"),
    (DPM, {"solver_order": 2}, "flow_dpmpp_2m"),
    (DPM, {"solver_order": 3}, "flow_dpmpp_3m"),
    (DPM, {"solver_order": 3, "flow_shift": 5.0}, "flow_dpmpp_3m"),
    # diffusers reads one of the two shifts.
    (EULER, {"shift": 5.0, "flow_shift": 2.0}, "flow_euler"),
    (DPM, {"shift": 5.0, "flow_shift": 2.0}, "flow_dpmpp_2m"),
]


@pytest.mark.parametrize("name, settings, sampler", FOLLOWED)
def test_images_of_a_folder_are_those_of_diffusers_with_its_scheduler(copy, name, settings, sampler):
    set_scheduler(copy, name, **settings)
    assert resolve_settings(SamplingSettings(), copy).sampler == sampler
    pipeline = library_pipeline(copy)
    assert type(pipeline.scheduler).__name__ == name
    theirs = drawn_by(pipeline, "a red circle", num_inference_steps=6, output_type="pt")
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 32, 4, 4, generator=generator)
    options = {"steps": 6, "width": 128, "height": 128, "dtype": "float32"}
    ours = sana_core.generate("a red circle", copy, latents=latents, devices=["cpu"], **options)
    assert ((ours + 1) / 2 - theirs).abs().max() < 2e-3
    lines = notes_of(copy)
    assert len(lines) == (sampler != "flow_dpmpp_2m") and all(f"saved with {sampler};" in line for line in lines)


@pytest.mark.parametrize(
    "name, settings, words",
    [
        (DPM, {"solver_type": "heun"}, "solver_type heun"),
        (DPM, {"solver_type": "heun", "solver_order": 3}, "solver_type heun"),
        (DPM, {"final_sigmas_type": "sigma_min"}, "final_sigmas_type sigma_min"),
        (DPM, {"num_train_timesteps": 500}, "num_train_timesteps 500"),
        (DPM, {"algorithm_type": "sde-dpmsolver++"}, "algorithm_type sde-dpmsolver++"),
        (DPM, {"lower_order_final": False, "solver_order": 3}, "lower_order_final False"),
        (DPM, {"use_karras_sigmas": True}, "use_karras_sigmas True"),
        (DPM, {"thresholding": True}, "thresholding True"),
        (DPM, {"solver_order": 4}, "solver_order 4"),
        (DPM, {"solver_order": []}, "solver_order []"),
        (DPM, {"solver_order": None}, "solver_order None"),
        (EULER, {"shift_terminal": 0.1}, "shift_terminal 0.1"),
        (EULER, {"num_train_timesteps": 500}, "num_train_timesteps 500"),
        (EULER, {"use_dynamic_shifting": True}, "use_dynamic_shifting True"),
        (EULER, {"stochastic_sampling": True}, "stochastic_sampling True"),
        (HEUN, {"num_train_timesteps": 500}, "num_train_timesteps 500"),
        ("UniPCMultistepScheduler", {}, "UniPCMultistepScheduler"),
        (["x"], {}, "['x']"),
    ],
)
def test_what_is_not_available_is_named_in_one_line(copy, name, settings, words):
    set_scheduler(copy, name, **settings)
    (line,) = [line for line in notes_of(copy) if "not available" in line]
    assert line == f"scheduler: {words} not available; images differ from diffusers' images"
    sana_core.load_transformer(copy)


def test_the_usual_scheduler_and_a_file_alone_have_no_line(copy):
    assert notes_of(copy) == []
    file = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    alone = copy.parent / "alone"
    alone.mkdir()
    for path in (file, file.with_name("config.json")):
        path.rename(alone / path.name)
    assert load_file(alone / file.name) and notes_of(alone) == []


@pytest.mark.parametrize("name, other", [(DPM, "shift"), (EULER, "flow_shift")])
def test_the_shift_of_another_class_is_ignored_as_by_diffusers(copy, name, other):
    set_scheduler(copy, name)
    file = copy / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    config.pop("shift" if name == EULER else "flow_shift")
    file.write_text(json.dumps({**config, other: 5.0}))
    scheduler = library_pipeline(copy).scheduler
    theirs = scheduler.config["shift" if name == EULER else "flow_shift"]
    assert shift_of(sana_core.inspect_checkpoint(copy)) == theirs == 1.0


def test_order_3_of_diffusers_depends_on_the_type_of_its_steps_of_order_2(copy):
    images = []
    for kind in ("midpoint", "heun"):
        set_scheduler(copy, DPM, solver_order=3, solver_type=kind)
        pipeline = library_pipeline(copy)
        images.append(drawn_by(pipeline, "a red circle", num_inference_steps=6, output_type="pt"))
    assert (images[0] - images[1]).abs().max() > 1e-4


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_command_says_once_what_of_the_scheduler_is_not_available(copy, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square")
    set_scheduler(copy, DPM, solver_type="heun")
    prompts = ["prompts.txt"] if command == "batch" else ["a red circle", "a blue square"]
    size = ["--width", "32", "--height", "32", "--steps", "1", "--devices", "cpu", "cpu"]
    assert main([command, *prompts, "--checkpoint", str(copy), *size]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("scheduler: ")]
    assert lines == ["scheduler: solver_type heun not available; images differ from diffusers' images"]
