"""Broken configurations, schedulers and preview files: they load, or one line names the broken one."""

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json, with_file
from small import BUNDLED, LOADERS

import sana_core
from sana_core.batch.folder import OutputFolder
from sana_core.batch.plan import batch_images
from sana_core.batch.png import encode_png
from sana_core.checkpoints.generation import shift_of
from sana_core.checkpoints.schemas import read_preview
from sana_core.runtime.folder_lock import Holder, hold, read_record


def changed(content: bytes):
    """Strategy: nearly the JSON file of `content`."""
    return changed_json(json.loads(content)) | changed_bytes(content)


# the small checkpoint has these files from the bundled one
SCHEDULER = changed((BUNDLED / "scheduler" / "scheduler_config.json").read_bytes())
PREVIEW = changed((BUNDLED / "preview.json").read_bytes())
MODEL_INDEX = changed((BUNDLED / "model_index.json").read_bytes())


@pytest.mark.parametrize("name", LOADERS)
@given(data=st.data())
def test_configurations(survives, folder, name, data):
    def use():
        sana_core.inspect_checkpoint(folder)
        LOADERS[name](folder)

    file = folder / name / "config.json"
    with_file(file, data.draw(changed(file.read_bytes())), survives, use, f"{name}/")


@given(content=SCHEDULER)
def test_schedulers(survives, folder, content):
    file = folder / "scheduler" / "scheduler_config.json"
    with_file(file, content, survives, lambda: shift_of(sana_core.inspect_checkpoint(folder)), "scheduler_config.json")


@given(content=MODEL_INDEX)
def test_model_indexes(survives, folder, content):
    with_file(folder / "model_index.json", content, survives, lambda: sana_core.inspect_checkpoint(folder), "model")


@given(content=PREVIEW)
def test_previews(survives, folder, content):
    file = folder / "preview.json"
    with_file(file, content, survives, lambda: read_preview(file), "preview.json")


RECORD = changed(json.dumps(Holder("0", "here", "now")._asdict()).encode())
PROMPTS, DRAWN = ["a red circle"], {"width": 32, "height": 32, "steps": 1, "sampler": "flow_euler"}
PICTURES = batch_images(1, 2, 0)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A folder that a batch holds, with a picture of it and a manifest."""
    with hold(tmp_path_factory.mktemp("batch")) as held:
        folder = OutputFolder(held, PROMPTS, DRAWN)
        folder.find_done(PICTURES)
        png = encode_png(torch.zeros(3, 32, 32), PROMPTS[0], 0, DRAWN)
        folder.note(PICTURES[0], folder.write(PICTURES[0], png))
        folder.write_manifest()
        yield held


@given(data=st.data())
def test_manifests(survives, held, data):
    def look():
        assert OutputFolder(held, PROMPTS, DRAWN).find_done(PICTURES) == {0}

    file = held.folder / "manifest.json"
    with_file(file, data.draw(changed(file.read_bytes())), survives, look, "out: ")


@given(content=RECORD)
@example(content="[" * 2000 + "]" * 2000)
def test_records_of_who_holds_a_folder(survives, held, content):
    with_file(held.record, content, survives, lambda: read_record(held.record))
