"""Every numeric option of every command, and its form for images, videos, batches and nodes: one range, one line."""

import argparse
import contextlib
import io
import math
import shutil

import pytest
import torch
import video_models
from in_process import NodeError

from sana_core.__main__ import COMMANDS, main

NAN, INF = math.nan, math.inf
SEEDS, STEPS, GUIDANCE = [-1, 2**64], [-1, 1001], [NAN, INF, -INF, -1.0, 100.5, 1e30]
SIDES, VIDEO_SIDES, FRAMES, COUNTS = [-32, 33, 16416], [-32, 40, 16416], [-7, 8, 1026], [-1, 0, 4097]
# The option: values that all its forms refuse, and the forms. A form is a command, or a node and its input.
OPTIONS = {
    "seed": (SEEDS, ["generate", "video", "batch", "Sampler.seed", "Sprint.seed", "BatchSampler.seed"]),
    "steps": (
        STEPS,
        ["generate", "video", "batch", "Sampler.steps", "Sprint.steps", "BatchSampler.steps", "Scheduler.steps"],
    ),
    # SANA Sampler uses the model's steps at 0, and SANA Video Latent its frames.
    "steps 0": ([0], ["generate", "video", "batch", "Sprint.steps", "BatchSampler.steps", "Scheduler.steps"]),
    "frames 0": ([0], ["video", "plan video"]),
    "motion_score": ([-1, 101], ["video", "TextEncode.motion_score"]),
    "guidance": (
        GUIDANCE,
        ["generate", "video", "batch", "Sampler.guidance", "Sprint.guidance", "BatchSampler.guidance"],
    ),
    "width": (SIDES, ["generate", "batch", "plan", "EmptyLatent.width", "Plan.width"]),
    "height": (SIDES, ["generate", "batch", "plan", "EmptyLatent.height", "Plan.height"]),
    "width of a video": (VIDEO_SIDES, ["video", "plan video", "VideoLatent.width"]),
    "height of a video": (VIDEO_SIDES, ["video", "plan video", "VideoLatent.height"]),
    # The latent nodes use the model's size at 0.
    "width 0": ([0], ["generate", "batch", "plan", "Plan.width"]),
    "height 0": ([0], ["generate", "batch", "plan", "Plan.height"]),
    "width 0 of a video": ([0], ["video", "plan video"]),
    "height 0 of a video": ([0], ["video", "plan video"]),
    "frames": (FRAMES, ["video", "plan video", "VideoLatent.frames"]),
    "batch": (COUNTS, ["plan", "EmptyLatent.batch_size", "Plan.batch_size", "VideoLatent.batch_size"]),
    "count": ([-1, 0, 100_001], ["generate", "batch"]),
    "chunk": ([-1, 100_001], ["generate", "batch", "BatchSampler.chunk"]),
    "of": ([-1, 0, 100_001], ["generate", "batch"]),
    "best": ([-1, 0, 3], ["generate", "batch"]),
    "pag_scale": ([NAN, INF, -1.0, 100.5], ["generate", "batch", "PAG.scale"]),
    "guidance_interval": ([NAN, -0.5, 1.5], ["generate", "batch", "GuidanceInterval.start"]),
    "lora": ([NAN, INF, -100.5, 100.5], ["generate", "batch", "LoraLoader.strength_model", "LoraLoader.strength_clip"]),
    "max_gb": ([NAN, INF, -1.0, 1024.5], ["decode", "Decode.budget_gb"]),
    "prompts": ([-1, 0], ["plan"]),
    "seconds": ([NAN, INF, -1.0], ["doctor"]),
}
# options and inputs with one form, and where they are tested
ALONE = {
    "test_pick_best.py": ["PickBest.best"],
    "test_batch_sampler.py; the images stay in memory, so fewer than those of a command": ["BatchSampler.count"],
    "tests/cluster": ["gpus", "gpus_per_worker", "resource"],
    "test_training_plan.py": ["card", "cards"],
    "test_split.py": ["split"],
    "test_commands.py": ["resolution"],
    "tests/unit/test_vibe.py, test_field_names.py": ["image_guidance", "Edit.image_guidance"],
    "test_fuzzed_sizes.py": ["Sampler.denoise", "Scheduler.denoise", "Sprint.strength", "Sprint.max_timestep"]
    + ["Sprint.intermediate_timestep", "GuidanceInterval.end"],
}
# Nodes whose ranges are tested in tests/unit/test_training_settings.py.
TRAINING = ("Dataset", "Train", "TrainSettings", "TrainControlNet")
CASES = [(option, value) for option, (values, _) in OPTIONS.items() for value in values]


def test_every_number_is_in_the_table(host):
    forms = {form for _, forms in OPTIONS.values() for form in forms}
    forms |= {form for alone in ALONE.values() for form in alone}
    listed = {name.partition(" ")[0] for name in OPTIONS} | forms
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser()
        command.configure(parser)
        for action in parser._actions:
            if getattr(action.type, "__name__", "") in ("int", "float", "lora_of", "resource_of"):
                assert action.dest in listed, f"{name} {action.dest}"
    for name, node in host.nodes.NODE_CLASS_MAPPINGS.items():
        short = name.removeprefix("SanaNodes")
        if short != name and short not in TRAINING:
            for widget in node.GET_SCHEMA().inputs:
                assert not hasattr(widget, "min") or f"{short}.{widget.id}" in listed, f"{name} {widget.id}"


@pytest.fixture(scope="module")
def video(host):
    folder = video_models.save_folder("480p", host.models / "diffusers" / "video-numbers")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def by_command(checkpoint, video, tmp_path, monkeypatch):
    """A function that gives the last line of a command that gets a number."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle")
    size = ["--steps=1", "--width=64", "--height=64"]
    commands = {
        "generate": ["generate", "a red circle", f"--checkpoint={checkpoint}", *size],
        "video": ["generate", "a red circle", f"--checkpoint={video}", *size, "--frames=1", "--out=clip.mp4"],
        "batch": ["batch", "prompts.txt", f"--checkpoint={checkpoint}", *size],
        "plan": ["plan", "1.6B"],
        "plan video": ["plan", "video-2B-480p"],
        "decode": ["decode", "none.safetensors", f"--checkpoint={checkpoint}"],
        "doctor": ["doctor"],
    }
    more = {
        "of": ["--best=1", "--scorer=none", "--of="],
        "best": ["--of=2", "--scorer=none", "--best="],
        "lora": ["--lora=none.safetensors="],
    }

    def run(form, option, value):
        name = option.partition(" ")[0]
        *words, last = more.get(name, [f"--{name.replace('_', '-')}="])
        words = [*commands[form], *words, f"{last}{value}"]
        if name == "guidance_interval":
            words = [*commands[form], "--guidance-interval", str(value), "1"]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert main(words) == 1
        (line,) = said.getvalue().splitlines()
        return line

    return run


@pytest.fixture
def by_node(host, base_graph, install, video):
    """A function that gives the error of a node whose input has a number from a link."""
    install("loras", "numbers.safetensors", {"x.lora_A.weight": torch.ones(1, 2), "x.lora_B.weight": torch.ones(2, 1)})
    links = {"model": ["load", 0], "positive": ["positive", 0], "latent_image": ["empty", 0]}
    both = {**links, "negative": ["negative", 0]}
    sampling = {"seed": 0, "steps": 1, "guidance": 1.0}
    size = {"width": 64, "height": 64, "batch_size": 1}
    nodes = {
        "Sampler": {**both, **sampling, "sampler": "flow_euler"},
        "Sprint": {**links, **sampling},
        "BatchSampler": {**both, **sampling, "sampler": "flow_euler", "count": 1, "devices": "default", "chunk": 0},
        "Scheduler": {"model": ["load", 0], "sampler": "flow_euler", "steps": 1, "denoise": 1.0},
        "EmptyLatent": size,
        "Plan": {**size, "variant": "1.6B", "dtype": "bfloat16", "vae": "dc-ae-f32c32"},
        "VideoLatent": {"model": ["load video", 0], **size, "frames": 1},
        "PAG": {"model": ["load", 0], "scale": 1.0},
        "GuidanceInterval": {"model": ["load", 0], "start": 0.0, "end": 1.0},
        "LoraLoader": {
            **{"model": ["load", 0], "clip": ["load", 1], "lora_name": "numbers.safetensors"},
            **{"strength_model": 1.0, "strength_clip": 1.0},
        },
        "TextEncode": {"clip": ["load", 1], "text": "a red circle", "instruction": True},
        "Decode": {"samples": ["empty", 0], "vae": ["load", 2]},
    }

    def run(form, value):
        node, field = form.split(".")
        graph = {name: part for name, part in base_graph().items() if name in ("load", "positive", "negative", "empty")}
        graph["load video"] = ("SanaNodesLoader", {"model": video.name})
        graph["number"] = ("AnyValue", {"value": value})
        graph["node"] = (f"SanaNodes{node}", {**nodes[node], field: ["number", 0]})
        graph["catch"] = ("Catch", {"value": ["node", 0], "name": "caught"})
        with pytest.raises(NodeError) as caught:
            # The models stay loaded between the cases.
            host.run(graph, keep_cache=True)
        return str(caught.value)

    return run


@pytest.mark.parametrize("option, value", CASES)
def test_a_number_out_of_range_is_the_same_line_everywhere(by_command, by_node, option, value):
    lines = {}
    for form in OPTIONS[option][1]:
        line = by_node(form, value) if "." in form else by_command(form, option, value)
        name, _, message = line.partition(": ")
        # An input may have another name than the option.
        assert name.isidentifier() or name == "max-gb", line
        lines[form] = message
    assert len(set(lines.values())) == 1, lines
    (line,) = set(lines.values())
    assert line.startswith(f"got {value}, expected "), line
