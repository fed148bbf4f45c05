"""Broken states of a training run: they read as written, or one line names the state and the remedy."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json, with_file

from sana_core.training.schedule import Best, TrainProgress
from sana_core.training.sharding import Layout
from sana_core.training.states import NewState, SavedState, begin_run, check_folder, read_state, step_folder

CONFIG = {"seed": 0, "rank": 2}
TENSORS = {"parameter.a": torch.arange(6.0).reshape(2, 3), "optimizer.0.step": torch.tensor(2.0)}
VALUES = {"group": {}, "parameters": [{"values": {}, "subclasses": {}}]}
STATE = SavedState(TrainProgress(2, 0, 2, 0, 2), VALUES, CONFIG, ["abc"], Best(0.5, 2, 0, 0.9), 2)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """The folder of a state in the folder of a run."""
    out = tmp_path_factory.mktemp("run") / "out"
    parts = out / "parts"
    parts.mkdir(parents=True)
    begin_run(out, parts, CONFIG)
    state = NewState(out, parts, STATE, Layout())
    state.write(TENSORS, lambda part: (part / "x.safetensors").write_bytes(b"lora"))
    state.complete()
    return step_folder(out, STATE.progress.step)


def look(state):
    result, tensors = read_state(state, Layout())
    same = {name: torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items()}
    assert all(same.values()) and result._replace(files={}) == STATE


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
@given(data=st.data())
def test_states(survives, state, name, data):
    file = state / name
    content = file.read_bytes()
    changed = changed_bytes(content)
    if name == "state.json":
        changed |= changed_json(json.loads(content))
    with_file(file, data.draw(changed), survives, lambda: look(state), "step-0000002")


@given(data=st.data())
def test_records_of_what_a_run_has_written(survives, state, data):
    out = state.parents[1]
    file = out / "run.json"
    changed = changed_json(json.loads(file.read_bytes())) | changed_bytes(file.read_bytes())
    with_file(file, data.draw(changed), survives, lambda: check_folder(out, ["x.safetensors"], 1, CONFIG), str(out))
