"""Configurations, tokenizers and code beside the weights. See docs/developer/robustness.md."""

import json
import os
import subprocess
import sys

import layouts
import pytest
import torch
from hostile import TENSORS, refused
from setup import ROOT
from transformers import Gemma2Config

import sana_core
from sana_core.checkpoints import headers, schemas
from sana_core.checkpoints.checkpoint import CHECKPOINT_KINDS
from sana_core.checkpoints.generation import shift_of

# older transformers leave layer types unread
NEWER = pytest.mark.skipif(not hasattr(Gemma2Config(), "layer_types"), reason="has no layer types")


# -- code in the folder


CODE = """
open({marker!r}, "w").close()
from transformers import PreTrainedTokenizer
class Mine(PreTrainedTokenizer): pass
"""
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import sana_core
try:
    sana_core.load_text_encoder(sys.argv[2])
except sana_core.SanaError as error:
    print(error)
"""


def with_code(copy, place, marker):
    (copy / place).with_name("mine.py").write_text(CODE.format(marker=str(marker)))
    settings = json.loads((copy / place).read_text())
    settings.update(auto_map={"AutoTokenizer": ["mine.Mine", None], "AutoModel": "mine.Mine"}, tokenizer_class="Mine")
    (copy / place).write_text(json.dumps(settings))


def run_in_a_process(code, copy, cache, answer):
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(copy)],
        input=answer,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(cache)},
    )


@pytest.mark.parametrize(
    "place, answer", [("tokenizer/tokenizer_config.json", "y\n"), ("text_encoder/config.json", "")]
)
def test_code_of_a_folder_is_neither_run_nor_asked_about(copy, tmp_path, place, answer):
    with_code(copy, place, tmp_path / "ran")
    finished = run_in_a_process(RUN, copy, tmp_path / "cache", answer)
    assert "got auto_map, code that comes with the model, which is never run; use the" in finished.stdout, (
        finished.stderr
    )
    assert "y/N" not in finished.stdout + finished.stderr
    assert not (tmp_path / "ran").exists()


def test_a_configuration_names_no_kernel_to_download(copy):
    file = copy / "text_encoder" / "config.json"
    content = json.loads(file.read_text())
    names = {"attn_implementation": "somebody/kernel", "_attn_implementation": "somebody/kernel"}
    file.write_text(json.dumps({**content, **names}))
    assert sana_core.load_text_encoder(copy).model.config._attn_implementation in ("sdpa", "eager")


# -- configurations


@pytest.mark.parametrize(
    "part, field, value",
    [
        ("transformer", "num_layers", 10**7),
        ("transformer", "sample_size", 10**6),
        ("transformer", "sample_size", 32.5),
        ("transformer", "sample_size", None),
        ("transformer", "num_attention_heads", 0),
        ("transformer", "patch_size", -1),
        ("transformer", "dropout", -0.5),
        ("transformer", "norm_eps", 1.5),
        ("transformer", "mlp_ratio", float("nan")),
        ("transformer", "mlp_ratio", float("inf")),
        ("transformer", "qk_norm", [[[]]]),
        ("transformer", "attention_bias", "false"),
        ("transformer", "sampler", []),
        ("vae", "decoder_layers_per_block", [10**7] * 6),
        ("vae", "decoder_block_out_channels", 5),
        ("vae", "scaling_factor", 0),
        ("vae", "scaling_factor", "0.4"),
        ("text_encoder", "num_hidden_layers", 10**7),
        ("text_encoder", "rope_parameters", {"rope_theta": float("nan")}),
        ("text_encoder", "layer_types", ["full_attention"] * 10**4),
    ],
)
def test_a_field_out_of_bounds_is_named(copy, part, field, value):
    file = copy / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    pattern = (
        rf"^{part}/\w+.safetensors: its config has {field}: .*, which no SANA model has; use the model's own config"
    )
    refused(copy, pattern, load=TENSORS[part][1])


JSON = (None, True, -1, 10**30, 0.5, float("nan"), "", "a" * 1000, [], [[]], [None], ["a"] * 50, {}, {"a": []})


@pytest.mark.parametrize("kind", CHECKPOINT_KINDS)
def test_no_value_of_json_ends_a_check_with_an_error(kind):
    for field, check in CHECKPOINT_KINDS[kind].fields.items():
        assert {bool(check(value)) for value in JSON} <= {True, False}, field


@pytest.mark.parametrize(
    "part, field, value",
    [
        ("transformer", "qk_norm", "none such"),
        ("vae", "decoder_block_types", "none such"),
        ("vae", "decoder_block_out_channels", [16]),
        ("text_encoder", "hidden_activation", "none such"),
        ("text_encoder", "num_key_value_heads", 3),
        pytest.param("text_encoder", "layer_types", ["none such"] * 2, marks=NEWER),
    ],
)
def test_a_configuration_that_the_library_cannot_build_is_named(copy, part, field, value):
    file = copy / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    refused(
        copy, rf"^{part}/\w+.safetensors: (its config or its tensors|\S+ is \[|no |unexpected )", load=TENSORS[part][1]
    )


@pytest.mark.parametrize("pixels, cells", [(256, 8), (768, 24), (1280, 40)])
def test_sizes_between_the_released_ones_load(copy, pixels, cells):
    file = copy / "transformer" / "config.json"
    config = json.loads(file.read_text())
    del config["interpolation_scale"]
    file.write_text(json.dumps({**config, "sample_size": cells}))
    assert sana_core.inspect_checkpoint(copy).resolution == pixels
    assert sana_core.load_transformer(copy).config.sample_size == cells


@pytest.mark.parametrize("content", ['{"flow_shift": NaN}', '{"flow_shift": 1e9}', '{"shift": "3"}', "[]", "{", ""])
def test_a_scheduler_without_a_shift_that_works_is_named(copy, content):
    (copy / "scheduler" / "scheduler_config.json").write_text(content)
    refused(copy, "^scheduler/scheduler_config.json: ", load=lambda path: shift_of(sana_core.inspect_checkpoint(path)))


@pytest.mark.parametrize("content", ["{}", '{"rgb_factors": [[1, 2]], "rgb_bias": [1, 2, 3]}', "[]"])
def test_preview_colours_that_are_none_are_named(tmp_path, content):
    (tmp_path / "preview.json").write_text(content)
    refused(tmp_path / "preview.json", "/preview.json: ", load=schemas.read_preview)


# -- tokenizers


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "its JSON nests too deeply"),
        (b'{"version": "1.0"}', "got NoneType, list, list, expected an object vocab"),
        (b'{"model": {"type": "BPE", "vocab": {}}}', "vocab: got no <bos>, expected all special tokens"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_broken_tokenizer_is_named(copy, content, reason):
    (copy / "tokenizer" / "tokenizer.json").write_bytes(content)
    refused(copy, f"^tokenizer/tokenizer.json: {reason}", load=sana_core.load_text_encoder)


def test_another_models_tokenizer_is_refused(copy):
    file = copy / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    # Llama's BOS is 1.
    swapped = file.read_text().replace("<bos>", "<s>").replace("<eos>", "<bos>")
    file.write_text(swapped)
    message = r"got \[0, 1\] as <pad> and an empty text, expected Gemma's \[0, 2\]; use gemma-2-2b-it's"
    refused(copy, message, load=sana_core.load_text_encoder)
    content["added_tokens"] += [
        {**content["added_tokens"][0], "id": 10**4 + n, "content": f"<{n}>"} for n in range(900)
    ]
    file.write_text(json.dumps(content))
    refused(copy, "vocab: got the id 10000, expected numbers below the model's 750;", load=sana_core.load_text_encoder)


def test_a_tokenizer_tensor_that_is_not_bytes_is_refused(checkpoint, tmp_path):
    tensors = headers.read_file(checkpoint / "text_encoder" / "model.safetensors")
    tensors["tokenizer_json"] = torch.zeros(4)
    config = (checkpoint / "text_encoder" / "config.json").read_text()
    file = layouts.save(tensors, tmp_path / "gemma.safetensors", config=config)
    refused(file, "tokenizer_json is no tensor of a tokenizer's bytes; download", load=sana_core.load_text_encoder)


@pytest.mark.parametrize("field", ["r", "lora_alpha", "alpha"])
def test_a_loras_rank_and_alpha_are_numbers_above_zero(field):
    """PEFT divides one by the other."""
    for value in (0, -1, "8", [8], float("nan"), True):
        with pytest.raises(ValueError, match=f"^lora.safetensors: {field} is .*, expected a number above 0; use"):
            schemas.check_peft("lora.safetensors", {field: value})
    for value in (1, 128, 0.5, None):
        schemas.check_peft("lora.safetensors", {field: value})
    schemas.check_peft("lora.safetensors", {})


@pytest.mark.parametrize(
    "field, right, wrong",
    [
        (
            "alpha_pattern",
            [{}, {"to_q": 2}, {r"blocks\.\d+\.attn1\..*": 0.5}],
            [[], {"to_q": 0}, {"(": 1}, {"(a+)+b": 1}],
        ),
        ("rank_pattern", [{"attn1.to_out.0": 8}], [{"a*b*c*": 1}, {"a" * 201: 1}, {f"a{n}": 1 for n in range(501)}]),
        ("use_rslora", [True, False], [1, "yes"]),
        ("peft_type", ["LORA", "LOHA", "LOKR"], ["ADALORA", "OFT", ["LORA"]]),
        # PiSSA and others leave the model other weights than the file's layers are made for
        ("init_lora_weights", [True, False, "gaussian", "eva"], ["pissa", "pissa_niter_4", "olora", "loftq", {}]),
    ],
)
def test_what_peft_says_of_an_adapter_is_followed_or_refused(field, right, wrong):
    for value in right:
        schemas.check_peft("lora.safetensors", {field: value})
    for value in wrong:
        with pytest.raises(ValueError, match=f"^lora.safetensors: {field} is .*, expected .*; use another file"):
            schemas.check_peft("lora.safetensors", {field: value})
