"""A LoRA that does not fit, or that belongs to the other reference, is named by the commands and on the canvas."""

import logging

import layouts
import pytest
import torch
from adapted import save_adapter
from in_process import NodeError
from loading import through
from lora_dialects import DIALECTS
from safetensors.torch import load_file

import sana_core
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.errors import CheckpointError, InputError
from sana_core.training.settings import Method

pytestmark = pytest.mark.usefixtures("one_load")

LINEAR, CONV = "transformer_blocks.2.attn2.to_q", "transformer_blocks.1.ff.conv_inverted"
SHAPES = {LINEAR: (160, 160), CONV: (800, 160, 1, 1)}
NUMBERS = torch.Generator().manual_seed(1)


def random(*shape):
    return 0.3 * torch.randn(shape, generator=NUMBERS)


def pairs(dialect, rank=4):
    """A LoRA of both layers."""
    pattern, down, up = DIALECTS[dialect]
    tensors = {}
    for layer, (rows, columns, *kernel) in SHAPES.items():
        name = pattern.format(name=layer, flat=layer.replace(".", "_"))
        tensors[name + down] = random(rank, columns, *kernel)
        tensors[name + up] = random(rows, rank, *[1] * len(kernel))
    return tensors


@pytest.fixture
def file(host):
    """Where a test puts its LoRA."""
    path = host.models / "loras" / "merge.safetensors"
    path.parent.mkdir(exist_ok=True)
    yield path
    path.unlink()


def load(host, name):
    """Put the LoRA on the bundled model."""
    model = host.output_of("SanaNodesLoader", model="sana-tiny")
    host.output_of("SanaNodesLoraLoader", linked={"model": model}, lora_name=name, strength_model=1.0)


def test_a_dora_s_magnitudes_of_another_shape_are_refused_on_the_canvas(host, checkpoint, file):
    save_adapter(checkpoint, file, Method("dora", 4, 6.0, "both"))
    tensors = {name: tensor for name, tensor in load_file(file).items() if "dora_scale" not in name}
    layouts.save(tensors | {name: tensor[1:] for name, tensor in tensors.items() if "magnitude" in name}, file)
    with pytest.raises(NodeError, match="none of its 50 layers fit this model"):
        load(host, file.name)


@pytest.mark.parametrize("reference", ["nvidia", "diffusers"])
def test_a_lora_of_the_other_reference_is_named(host, checkpoint, file, caplog, reference):
    layouts.save(pairs("diffusers"), file, reference=reference)
    with caplog.at_level(logging.WARNING):
        load(host, file.name)
        resolve_settings(SamplingSettings(64, 64, loras=((str(file), 1.0),)), checkpoint)
    note = "merge.safetensors: trained with reference nvidia, but the model follows diffusers"
    assert caplog.text.count(note) == (2 if reference == "nvidia" else 0)


@pytest.mark.parametrize("reference", ["nvidia", "diffusers"])
def test_it_is_named_of_comfyuis_own_loader_too(host, base_graph, file, node_texts, reference):
    layouts.save(pairs("diffusers"), file, reference=reference)
    host.run(through(base_graph(steps=1), "LoraLoaderModelOnly", lora_name=file.name, strength_model=1.0))
    note = "LoRA: trained with reference nvidia, but the model follows diffusers"
    assert any(note in text for _, text in node_texts) == (reference == "nvidia")


WRONG = {
    "OFT": ({**pairs("bare"), "proj_out.oft_blocks": random(8, 4, 4)}, r"2 of 3 .* proj_out \(.*, but no alpha\)"),
    "a text encoder": (
        {**pairs("bare"), "text_encoder.layers.0.mlp.up_proj.lora_A": random(4, 160)},
        "2 of 3 .* text_",
    ),
    "another width": ({**pairs("bare"), f"{LINEAR}.lora_A.weight": random(4, 96)}, r"lora_A \[4, 96\].*\[160, 160\]"),
    "half": (
        {f"{LINEAR}.lora_A.weight": random(4, 160)},
        r"none of its 1 .*got lora_A \[4, 160\], but no lora_B",
    ),
    "a half that is flat": ({**pairs("bare"), f"{LINEAR}.lora_A.weight": random(4)}, r"1 of 2 .*got lora_A \[4\]"),
    "two kinds": ({**pairs("bare"), f"{LINEAR}.lokr_w1": random(8, 8)}, r"1 of 2 .*lokr_w1 \[8, 8\], lora_A"),
    "one layer twice": ({**pairs("bare"), **pairs("kohya")}, r"2 of 4 .*\(its weight has another layer in the file\)"),
    "no rank": ({**pairs("bare"), f"{LINEAR}.lora_A.weight": random(0, 160)}, r"1 of 2 .*lora_A \[0, 160\]"),
    "two alphas": ({**pairs("bare"), f"{LINEAR}.alpha": torch.ones(2)}, r"1 of 2 .*got alpha \[2\]"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_does_not_fit_is_named_before_anything_is_drawn(checkpoint, tmp_path, fault):
    tensors, said = WRONG[fault]
    file = layouts.save(tensors, tmp_path / "it.safetensors")
    with pytest.raises(InputError, match=f"it.safetensors: .*{said}"):
        sana_core.generate(["a red circle"], checkpoint, width=64, height=64, loras=[(str(file), 1.0)])


def test_numbers_that_are_not_finite_are_named(checkpoint, tmp_path):
    tensors = pairs("bare")
    tensors[f"{LINEAR}.lora_A.weight"][1, 2] = float("nan")
    file = layouts.save(tensors, tmp_path / "it.safetensors")
    with pytest.raises(CheckpointError, match="1 of 640 values in .*to_q.lora_A.weight are NaN or infinite"):
        sana_core.generate(["a red circle"], checkpoint, width=64, height=64, loras=[(str(file), 1.0)])


def test_a_strength_out_of_range_is_named(checkpoint):
    with pytest.raises(InputError, match="lora: got 101.0"):
        sana_core.generate(["a red circle"], checkpoint, width=64, height=64, loras=[("it.safetensors", 101.0)])
