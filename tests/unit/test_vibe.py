"""VIBE against the classes of diffusers and transformers, and the formula of its paper (arXiv 2601.02242)."""

import json
import shutil

import layouts
import numpy as np
import pytest
import torch
import vibe_models
from diffusers import DPMSolverMultistepScheduler
from diffusers.image_processor import PixArtImageProcessor
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import ASPECT_RATIO_512_BIN, ASPECT_RATIO_1024_BIN
from diffusers.pipelines.pixart_alpha.pipeline_pixart_sigma import ASPECT_RATIO_2048_BIN
from PIL import Image

import sana_core
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings
from sana_core.checkpoints.load import find_part, load_instruction_reader, load_part
from sana_core.commands.convert import convert_checkpoint
from sana_core.model.instruction import encode_instruction, image_patches
from sana_core.model.known_models import edit_size

pytest.importorskip("transformers.models.qwen3_vl")
BOUND = 1e-5
STEPS = 6
TEXT = "make it winter"


@pytest.fixture(scope="module")
def vibe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vibe") / "VIBE-Image-Edit"
    return folder, *vibe_models.save_vibe(folder)


def photo(width=608, height=416):
    rows = np.random.RandomState(0).randint(0, 256, (7, 9, 3), np.uint8)
    return Image.fromarray(rows).resize((width, height), Image.BICUBIC)


def pixels(image):
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


def test_a_folder_and_a_bare_file_are_recognised_by_their_headers(vibe, tmp_path):
    folder = vibe[0]
    info = sana_core.inspect_checkpoint(folder)
    assert {part.kind for part in info.parts} == {"transformer", "edit_head", "qwen3_vl", "autoencoder"}
    assert not [note for part in info.parts for note in part.notes if "lm_head" not in note]
    model, edit_head = vibe_models.transformer(**REAL), vibe_models.head(width=2048, hidden=2048)
    shapes = {name: tuple(t.shape) for name, t in {**model.state_dict(), **edit_head.tensors()}.items()}
    bare = sana_core.inspect_checkpoint(layouts.sparse(shapes, tmp_path / "vibe.safetensors"))
    assert [part.kind for part in bare.parts] == ["transformer", "edit_head"]
    assert bare.variant == "custom-2240x2"


def test_seq_cat_is_refused_by_name(tmp_path):
    model = vibe_models.transformer(in_channels=32)
    vibe_models.save_transformer(tmp_path / "transformer", model, vibe_models.head(), "seq_cat")
    with pytest.raises(ValueError, match='found VIBE of the kind "seq_cat"'):
        sana_core.load_transformer(tmp_path / "transformer")


REAL = {
    "num_attention_heads": 70,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
}


@pytest.mark.parametrize("real", [False, True])
def test_head_and_forward_match_torch_and_diffusers(tmp_path, real):
    sizes = {"width": 2048, "hidden": 2048, "output": 2304, "queries": 224} if real else {}
    edit_head, model = vibe_models.head(**sizes), vibe_models.transformer(**(REAL if real else {}))
    file = vibe_models.save_transformer(tmp_path / "transformer", model, edit_head)
    loaded = load_part(find_part(sana_core.inspect_checkpoint(file), "edit_head"), torch.float32)
    states = torch.randn(2, *edit_head.queries.shape)
    embeds = edit_head(states)
    assert (loaded(states) - embeds).abs().max() <= BOUND
    assert (loaded(0 * states) - edit_head(0 * states)).abs().max() <= BOUND
    x, time = torch.randn(2, 64, 5, 4), torch.tensor([700.0, 300.0])
    ours = sana_core.predict_velocity(sana_core.load_transformer(file), x, time, embeds, torch.ones(embeds.shape[:2]))
    assert ours.shape == (2, 32, 5, 4)
    assert (ours - model(x, embeds, time, return_dict=False)[0]).abs().max() <= BOUND


def library_reading(vibe, text, image):
    """The library's whole forward. The meta queries are rows of the embedding that no token uses."""
    _, fast, qwen, edit_head, *_ = vibe
    first = vibe_models.VOCABULARY - vibe_models.QUERIES
    qwen.model.language_model.embed_tokens.weight[first:] = edit_head.queries
    inputs = {}
    body = f"generate the image by description: {text}"
    if image is not None:
        from transformers import Qwen2VLImageProcessor

        processor = Qwen2VLImageProcessor(
            patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, min_pixels=352**2, max_pixels=672**2
        )
        inputs = dict(processor(images=[image], return_tensors="pt"))
        count = int(inputs["image_grid_thw"].prod()) // 4
        body = f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>what will this image be like if {text}"
    ids = torch.tensor([fast.encode(f"<|im_start|>user\n{body}<|im_end|>\n").ids + list(range(first, first + 7))])
    kinds = (ids == fast.token_to_id("<|image_pad|>")).int()
    out = qwen.model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **inputs)
    return edit_head(out.last_hidden_state[:, -7:])


@pytest.mark.parametrize("size", [(608, 416), (701, 333), (90, 1300), None])
def test_reading_matches_the_library(vibe, size):
    # Without it, the library scales by Pillow, which rounds to whole levels.
    pytest.importorskip("torchvision")
    reader = load_instruction_reader(vibe[0])
    image = size and photo(*size)
    for text in (TEXT, "Turn the CAR red, don't touch 3 dogs: caf\u00e9\n ok"):
        ours = encode_instruction(reader, f"  {text} ", None if image is None else pixels(image))
        assert (ours - library_reading(vibe, text, image)).abs().max() <= BOUND


def test_sizes_are_the_bins_of_diffusers():
    for width, height in [(640, 448), (701, 333), (3000, 2000), (5000, 3333), (31, 17), (1080, 1920), (724, 814)]:
        area = width * height
        large = ASPECT_RATIO_1024_BIN if area <= 2 * 1024**2 + 512**2 else ASPECT_RATIO_2048_BIN
        bins = ASPECT_RATIO_512_BIN if area <= 2 * 512**2 + 256**2 else large
        expected = PixArtImageProcessor.classify_height_width_bin(height, width, bins)
        assert edit_size(width, height) == expected[::-1]


def formula(vibe, image, guidance, image_guidance, size):
    """Six guided steps by diffusers' scheduler and the paper's formula, decoded by diffusers' VAE, in [-1, 1]."""
    folder, _, _, edit_head, model, vae = vibe
    text = library_reading(vibe, TEXT, image)
    empty = edit_head(torch.zeros(1, 7, vibe_models.WIDTH))
    x = torch.randn(1, 32, size[1] // 32, size[0] // 32, generator=torch.Generator().manual_seed(0))
    latents = torch.zeros_like(x)
    if image is not None:
        latents = vae.encode(pixels(image.resize(size, Image.LANCZOS))[None] / 127.5 - 1).latent * 0.41407
    scheduler = DPMSolverMultistepScheduler.from_pretrained(folder / "scheduler")
    scheduler.set_timesteps(STEPS)
    for time in scheduler.timesteps:

        def v(embeds, beside, x=x, time=time):
            return model(torch.cat([x, beside], 1), embeds, time[None], return_dict=False)[0]

        with_text, with_image, neither = v(text, latents), v(empty, latents), v(empty, torch.zeros_like(x))
        if guidance <= 1:
            velocity = with_text
        elif image is None or image_guidance < 1:
            velocity = with_image + guidance * (with_text - with_image)
        else:
            velocity = neither + guidance * (with_text - with_image) + image_guidance * (with_image - neither)
        x = scheduler.step(velocity, time, x, return_dict=False)[0]
    return vae.decode(x / 0.41407, return_dict=False)[0].clamp(-1, 1)


@pytest.mark.parametrize(("guidance", "image_guidance"), [(4.5, 1.2), (4.5, 0.5), (4.5, 1.0), (1.0, 1.2), (7.0, 2.0)])
@torch.no_grad()
def test_an_edit_matches_the_formula(vibe, guidance, image_guidance):
    settings = SamplingSettings(steps=STEPS, guidance=guidance)
    ours = sana_core.edit_images(TEXT, vibe[0], pixels(photo()), settings=settings, image_guidance=image_guidance)
    expected = formula(vibe, photo(), guidance, image_guidance, (608, 416))
    assert (ours - expected).abs().max() <= 2e-3


@torch.no_grad()
def test_without_an_image_the_prompt_is_generated(vibe):
    ours = sana_core.edit_images(TEXT, vibe[0], settings=SamplingSettings(512, 512, STEPS))
    assert (ours - formula(vibe, None, 4.5, 0, (512, 512))).abs().max() <= 2e-3


def test_prompts_and_seeds_give_the_images_that_they_give_alone(vibe):
    image, settings = pixels(photo(300, 200)), SamplingSettings(steps=2)
    both = sana_core.edit_images([TEXT, "add snow"], vibe[0], image, 5, 2, settings)
    assert both.shape == (4, 3, 200, 300)
    assert torch.equal(both[3], sana_core.edit_images("add snow", vibe[0], image, 6, settings=settings)[0])
    assert not torch.equal(both[0], both[2])


def test_the_command_line_writes_the_edit_in_the_size_of_the_image(vibe, tmp_path):
    file, out = tmp_path / "photo.png", tmp_path / "out"
    image = photo(501, 333).convert("RGBA")
    image.putalpha(200)
    image.save(file)
    options = ["--checkpoint", str(vibe[0]), "--out", str(out), "--steps", "2", "--devices", "cpu"]
    assert main(["generate", TEXT, "--edit", str(file), *options]) == 0
    written = np.array(Image.open(out / "00000_0.png"))
    assert written.shape == (333, 501, 3)
    white = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    expected = sana_core.edit_images(TEXT, vibe[0], pixels(white), settings=SamplingSettings(steps=2))
    assert abs(written - ((expected[0] + 1) * 127.5).movedim(0, -1).numpy()).max() <= 0.51


@pytest.mark.parametrize("split", [False, True])
def test_several_devices_make_the_edits_of_one(vibe, split):
    image, settings = pixels(photo(300, 200)), SamplingSettings(steps=2)
    alone, together = (
        sana_core.edit_images([TEXT, "add snow"], vibe[0], image, 5, 2, settings, devices=devices, split=is_split)
        for devices, is_split in ((["cpu"], False), (["cpu", "cpu"], split))
    )
    # The images of a split differ by rounding, before their size becomes the size of the original.
    assert (alone - together).abs().max() <= (1 / 127 if split else 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--negative-prompt", "x"], "negative_prompt: got it for VIBE"),
        (["--width", "512"], "width: got it for VIBE"),
        (["--chunk", "2"], "chunk: got it for VIBE"),
        (["--cluster", "auto"], "cluster: got it for VIBE"),
        (["--split"], "devices: got cpu to share an image, expected two or more"),
        *((["--image-guidance", value], f"image_guidance: got {value}") for value in ("-1.0", "100.5", "nan", "inf")),
    ],
)
def test_other_options_are_one_line(vibe, tmp_path, capsys, options, message):
    photo(64, 64).save(tmp_path / "photo.png")
    how = ["--checkpoint", str(vibe[0]), "--out", str(tmp_path / "out"), "--devices", "cpu"]
    assert main(["generate", TEXT, "--edit", str(tmp_path / "photo.png"), *how, *options]) != 0
    assert message in capsys.readouterr().err


def test_what_does_not_fit_is_refused(vibe, checkpoint, tmp_path):
    image = pixels(photo(64, 64))
    with pytest.raises(ValueError, match="expected VIBE 1.6B to edit images"):
        sana_core.edit_images(TEXT, checkpoint, image)
    with pytest.raises(ValueError, match="VIBE-Image-Edit: got a SANA pipeline .* expected a SANA model"):
        convert_checkpoint(vibe[0], tmp_path / "vibe.safetensors")
    with pytest.raises(ValueError, match="checkpoint: got VIBE"):
        sana_core.generate(TEXT, vibe[0])
    with pytest.raises(ValueError, match="text: got <|image_pad|>"):
        sana_core.edit_images("<|image_pad|>", vibe[0], image)
    with pytest.raises(ValueError, match="image: got 3000 x 8"):
        image_patches(torch.zeros(3, 8, 3000, dtype=torch.uint8))
    folder = shutil.copytree(vibe[0], tmp_path / "vibe")
    (folder / "text_encoder" / "config.json").unlink()
    with pytest.raises((OSError, ValueError), match="text_encoder"):
        sana_core.edit_images(TEXT, folder, image)


def changed_config(folder, part, **fields):
    file = folder / "text_encoder" / "config.json"
    config = json.loads(file.read_text())
    config[part] |= fields
    file.write_text(json.dumps(config))


def changed_head(folder, **sizes):
    shutil.rmtree(folder / "transformer")
    vibe_models.save_transformer(folder / "transformer", vibe_models.transformer(), vibe_models.head(**sizes))


def without_token(folder, token):
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] != token]
    content["model"]["vocab"].pop(token, None)
    file.write_text(json.dumps(content))


def changed_rope(folder, sections):
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    changed_config(folder, "text_config", rope_parameters=rope)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: changed_rope(folder, [8]), "its config has text_config"),
        (lambda folder: changed_rope(folder, [24, 20, 20]), "its config has text_config"),
        (lambda folder: changed_config(folder, "vision_config", num_heads=3), "its config has vision_config"),
        *(
            (lambda folder, fields=fields: changed_config(folder, "vision_config", **fields), "config has vision_conf")
            for fields in (
                {"deepstack_visual_indexes": [0, 1, 4]},
                {"depth": 24, "deepstack_visual_indexes": [5, 9, 17]},
            )
        ),
        (
            lambda folder: changed_head(folder, width=48),
            r"head of widths \[48, 64, 48\], expected 64 as in Qwen3-VL",
        ),
        (lambda folder: changed_head(folder, output=64), "expected .* and 48 as in the transformer"),
        (lambda folder: without_token(folder, "<|image_pad|>"), r"got no <\|image_pad\|>, expected Qwen3-VL's"),
        (lambda folder: without_token(folder, "<|im_end|>"), r"got no <\|im_end\|>, expected Qwen3-VL's"),
    ],
)
def test_parts_that_do_not_fit_are_refused(vibe, tmp_path, change, message):
    folder = shutil.copytree(vibe[0], tmp_path / "VIBE-Image-Edit")
    change(folder)
    with pytest.raises(sana_core.CheckpointError, match=message):
        load_instruction_reader(folder)


def test_other_images_are_refused(vibe, tmp_path):
    for image in (torch.rand(3, 64, 64), torch.zeros(4, 64, 64).byte(), torch.zeros(64, 64, 3).byte()):
        with pytest.raises(sana_core.InputError, match=r"image: got torch.* expected torch.uint8 \[3, height, width\]"):
            sana_core.edit_images(TEXT, vibe[0], image)


def test_image_guidance_without_an_image_is_refused(vibe, tmp_path, capsys):
    options = ["--checkpoint", str(vibe[0]), "--out", str(tmp_path), "--image-guidance", "2"]
    assert main(["generate", TEXT, *options]) == 1
    assert "image_guidance: got it without an image, expected --edit" in capsys.readouterr().err


def test_training_is_refused(vibe, tmp_path, capsys):
    photo().save(tmp_path / "photo.png")
    (tmp_path / "photo.txt").write_text(TEXT)
    settings = tmp_path / "settings.toml"
    settings.write_text(f"model = '{vibe[0]}'\nout = 'run'\n[[phase]]\ndata = '.'\nsteps = 1\nlearning_rate = 1e-4\n")
    assert main(["train", str(settings)]) == 1
    assert "model: got VIBE, which training does not run" in capsys.readouterr().err
