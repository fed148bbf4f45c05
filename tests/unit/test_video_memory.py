"""Planned memory of a video, compared with the counted peak of a forward on a pretended GPU."""

import pytest

from benchmarks.video import count
from sana_core.model.known_models import VIDEOS
from sana_core.video.memory import plan_video

KEPT = 2 * 20 * 300 * 2240 * 2


@pytest.mark.parametrize("channels", VIDEOS)
@pytest.mark.parametrize("given", [False, True])
def test_a_forward_takes_what_is_planned(channels, given):
    model = VIDEOS[channels]
    planned = plan_video(model.name, *model.size)["transformer"]["activations"] // 2 - KEPT
    # the blocks come one after another
    assert abs(count(channels, 1, given, layers=2)["bytes"] / planned - 1) < 0.05


def test_480p_fits_8_gb_with_one_prompt_at_a_time():
    plan = plan_video("video-2B-480p", 832, 480)
    assert plan["fits"][8] and not plan["fits"][6]
    assert plan["transformer"]["weights"] + plan["transformer"]["activations"] / 2 < 8e9


@pytest.mark.parametrize("channels", VIDEOS)
def test_a_forward_takes_less_than_the_forward_of_diffusers(channels):
    ours, theirs = (count(channels, 1, layers=2, library=library) for library in (False, True))
    assert ours["bytes"] < 0.8 * theirs["bytes"] and ours["moved"] < 0.75 * theirs["moved"]
    assert ours["launches"] < 1.2 * theirs["launches"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1.6B", 832, 480), "^variant: got '1.6B', expected one of video-2B-480p, video-2B-720p$"),
        (("video-2B-480p", 832, 490), "^height: got 490, expected a multiple of 16 from 32 to 16384; use 496$"),
        (("video-2B-720p", 1280, 704, 77), "^frames: got 77, expected a multiple of 8 and one more; use 81$"),
        (("video-2B-480p", 832, 480, 81, 1, "int8"), "^dtype: got 'int8', expected one of bfloat16, float32$"),
    ],
)
def test_what_no_video_has_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_video(*arguments)
