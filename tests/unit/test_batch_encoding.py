"""Tests of the plan that decides which device encodes which prompts, and when."""

import pytest

from sana_core.batch.encoding import LARGEST_SESSION, LARGEST_STOCK, SESSION_PATIENCE, Action, EncodingPlan

PROMPTS = [f"prompt {number}" for number in range(4000)]


def encode(plan, worker, count=None, needed=(), now=0.0):
    """Run the session of `worker` to its end, or for `count` prompts, and return the prompts."""
    prompts = []
    while count is None or len(prompts) < count:
        prompt = plan.next_prompt(worker, needed, now)
        if prompt is None:
            break
        plan.store(worker, prompt, prompt.upper(), now)
        prompts.append(prompt)
    return prompts


def next_action(plan, worker, prompts, loaded=True, has_room=True, other_devices=1, now=0.0):
    return plan.next_action(worker, f"device of {worker}", prompts, loaded, has_room, other_devices, now)


def test_sessions_encode_twice_as_many_prompts_each_time_in_the_order_of_need():
    plan = EncodingPlan(PROMPTS, 8)
    sizes, encoded = [], []
    while plan.waiting:
        prompt = plan.waiting[0]
        assert next_action(plan, "a", [prompt]) is Action.ENCODE
        prompts = encode(plan, "a")
        sizes.append(len(prompts))
        encoded += prompts
        for prompt in prompts:
            plan.finish_image(prompt)
    assert encoded == PROMPTS and sizes[:8] == [8, 16, 32, 64, 128, 256, 512, 512] and max(sizes) == LARGEST_SESSION


def test_a_prompt_is_encoded_once_and_kept_until_its_last_image():
    plan = EncodingPlan(["a", "b", "a"], 8)
    plan.begin("gpu", "device", 0.0)
    assert encode(plan, "gpu") == ["a", "b"]
    plan.finish_image("a")
    assert plan.texts["a"] == "A"
    plan.finish_image("a")
    assert list(plan.texts) == ["b"]


def test_prompts_that_the_caller_has_encoded_are_not_encoded_again():
    plan = EncodingPlan(["a", "b"], 8, {"a": "A", "b": "B"})
    assert next_action(plan, "gpu", ["a", "b"]) is None and not plan.waiting


def test_a_session_includes_all_prompts_of_the_chunk_that_it_is_for():
    plan = EncodingPlan(PROMPTS[:40], 8)
    assert next_action(plan, "gpu", PROMPTS[:20]) is Action.ENCODE
    assert encode(plan, "gpu", needed=PROMPTS[:20]) == PROMPTS[:20]


def test_other_workers_load_their_models_and_then_join_if_the_encoder_fits():
    plan = EncodingPlan(PROMPTS[:100], 8)
    assert next_action(plan, "a", PROMPTS[:1], loaded=False) is Action.ENCODE
    assert next_action(plan, "b", PROMPTS[1:2], loaded=False) is Action.LOAD
    assert next_action(plan, "b", PROMPTS[1:2], has_room=False) is Action.WAIT
    assert next_action(plan, "b", PROMPTS[1:2]) is Action.ENCODE
    # The two sessions share the prompts.
    assert encode(plan, "a", 1) + encode(plan, "b", 1) + encode(plan, "a", 1) == PROMPTS[:3]


def test_two_workers_of_one_device_never_load_two_encoders():
    plan = EncodingPlan(PROMPTS[:100], 8)
    assert plan.next_action("cpu", "cpu", PROMPTS[:1], True, True, 0, 0.0) is Action.ENCODE
    assert plan.next_action("cpu #2", "cpu", PROMPTS[1:2], True, True, 0, 0.0) is Action.WAIT


def test_the_next_prompts_are_encoded_while_other_devices_generate():
    plan = EncodingPlan(PROMPTS[:400], 16)
    plan.begin("a", "device", 0.0)
    encode(plan, "a")
    # Half of the first session is left after prompt 8.
    assert next_action(plan, "a", PROMPTS[7:8]) is None
    assert next_action(plan, "a", PROMPTS[8:9], other_devices=0) is None
    assert next_action(plan, "a", PROMPTS[8:9]) is Action.ENCODE
    assert next_action(plan, "b", PROMPTS[9:10]) is None


def test_encoding_ahead_stops_when_memory_holds_enough_prompts():
    plan = EncodingPlan(PROMPTS, 8)
    plan.texts = dict.fromkeys(PROMPTS[:LARGEST_STOCK], "")
    for _ in range(LARGEST_STOCK):
        plan.waiting.popleft()
    last = PROMPTS[LARGEST_STOCK - 1 : LARGEST_STOCK]
    assert next_action(plan, "a", last) is None
    # A chunk that needs more prompts gets them all the same.
    assert next_action(plan, "a", PROMPTS[LARGEST_STOCK : LARGEST_STOCK + 1]) is Action.ENCODE


def test_the_prompt_of_a_session_that_fails_is_encoded_by_the_next_session():
    plan = EncodingPlan(PROMPTS[:4], 8)
    plan.begin("a", "device", 0.0)
    assert encode(plan, "a", 1) == PROMPTS[:1] and plan.next_prompt("a", (), 0.0) == PROMPTS[1]
    plan.end("a")
    assert next_action(plan, "b", PROMPTS[1:2]) is Action.ENCODE
    assert encode(plan, "b") == PROMPTS[1:4]


def test_a_session_that_moves_to_another_device_repeats_the_prompt_that_failed():
    plan = EncodingPlan(PROMPTS[:4], 8)
    plan.begin("a", "device", 0.0)
    assert plan.next_prompt("a", (), 0.0) == PROMPTS[0]
    assert encode(plan, "a") == PROMPTS[:4]


def test_other_workers_take_over_from_a_session_that_hangs():
    plan = EncodingPlan(PROMPTS[:4], 8)
    plan.begin("a", "device", 0.0)
    assert plan.next_prompt("a", (), 0.0) == PROMPTS[0]
    assert next_action(plan, "b", PROMPTS[:1], has_room=False, now=SESSION_PATIENCE) is Action.WAIT
    assert next_action(plan, "b", PROMPTS[:1], has_room=False, now=SESSION_PATIENCE + 1) is Action.ENCODE
    assert encode(plan, "b") == PROMPTS[:4]
    # The prompt that the hanging device finishes at last is no harm, and its session is over.
    plan.store("a", PROMPTS[0], "late", 700.0)
    assert plan.next_prompt("a", (), 700.0) is None


@pytest.mark.parametrize("stored", [True, False])
def test_a_finished_prompt_is_not_missing(stored):
    plan = EncodingPlan(["a", "b"], 8)
    plan.begin("gpu", "device", 0.0)
    assert plan.next_prompt("gpu", (), 0.0) == "a"
    if stored:
        plan.store("gpu", "a", "A", 0.0)
    plan.finish_image("a")
    assert not plan.missing(["a"]) and plan.missing(["a", "b"])
    plan.store("gpu", "a", "A", 0.0)
    assert "a" not in plan.texts
