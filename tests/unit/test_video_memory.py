"""Planned memory of a video, compared with the counted peak of a forward on a pretended GPU."""

import pytest
import torch._dynamo

from benchmarks.video import count
from sana_core.model.known_models import VIDEOS
from sana_core.video.latents import plan_video


@pytest.mark.parametrize("name", VIDEOS)
@pytest.mark.parametrize("first_frame", [False, True])
def test_a_forward_takes_what_is_planned(name, first_frame):
    model = VIDEOS[name]
    prepared = 2 * model.layers * 300 * model.width * 2
    planned = plan_video(name, *model.size)["transformer"]["activations"] // 2 - prepared
    # Blocks run one after another. Only the last group of SANA-Video 2.0 reads the states of all groups.
    layers = model.layers if model.is_video2 else 2
    assert abs(count(name, 1, first_frame, layers)["bytes"] / planned - 1) < 0.05


@pytest.mark.parametrize("name", VIDEOS)
def test_no_more_memory_is_needed_where_callers_keep_their_arguments(name):
    """As in Python 3.10, and after torch.compile has failed in a process. `torch._dynamo.run` evaluates frames so."""
    layers = 8 if VIDEOS[name].is_video2 else 2
    assert torch._dynamo.run(count)(name, 1, layers=layers) == count(name, 1, layers=layers)


def test_480p_fits_8_gb_with_one_prompt_at_a_time():
    plan = plan_video("video-2B-480p", 832, 480)
    assert plan["fits"][8] and not plan["fits"][6]
    assert plan["transformer"]["weights"] + plan["transformer"]["activations"] / 2 < 8e9


def test_video_2_fits_24_gb_in_bf16_with_one_prompt_at_a_time():
    plan = plan_video("video-2.0-5B", 1280, 736, 193)
    assert plan["fits"][24] and plan["fits"][16]
    assert plan["transformer"]["weights"] + plan["transformer"]["activations"] / 2 < 11.5e9


@pytest.mark.parametrize("name", [name for name, model in VIDEOS.items() if not model.is_video2])
def test_a_forward_takes_less_than_the_forward_of_diffusers(name):
    ours, theirs = (count(name, 1, layers=2, library=library) for library in (False, True))
    assert ours["bytes"] < 0.8 * theirs["bytes"] and ours["moved"] < 0.75 * theirs["moved"]
    assert ours["launches"] < 1.2 * theirs["launches"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("1.6B", 832, 480),
            "^variant: got '1.6B', expected one of video-2B-480p, video-2B-720p, video-2.0-5B, video-2.0-5B-4st",
        ),
        (("video-2B-480p", 832, 490), "^height: got 490, expected a multiple of 16 from 32 to 16384; use 496$"),
        (("video-2B-720p", 1280, 704, 77), "^frames: got 77, expected a multiple of 8 and one more; use 81$"),
        (("video-2B-480p", 832, 480, 81, 1, "int8"), "^dtype: got 'int8', expected one of bfloat16, float32$"),
    ],
)
def test_what_no_video_has_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_video(*arguments)
