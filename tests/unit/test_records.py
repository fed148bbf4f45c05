"""The records of the released models: the authors' defaults, the files that belong to them, and the settings of folders
that override them."""

import inspect
import json
import warnings
from dataclasses import replace
from pathlib import Path

import diffusers
import layouts
import nvidia_video2
import pytest
import torch
from diffusers import SanaPipeline, SanaSprintPipeline, SanaVideoPipeline
from safetensors.torch import save_file
from video_models import transformer

import sana_core
from sana_core.checkpoints.generation import checkpoint_notes, record_of, scheduler_of, shift_of
from sana_core.checkpoints.load import config_of
from sana_core.commands.convert import convert_checkpoint
from sana_core.errors import InputError
from sana_core.model import known_models
from sana_core.model.known_models import IMAGES, VIDEO_5B, VIDEOS, Defaults
from sana_core.model.reference import DIFFUSERS, NVIDIA, RULES
from sana_core.sampling.guidance import choose_sampling
from sana_core.sampling.samplers import SAMPLERS, Sampler, by_scheduler, check_distilled

BOUND = 1e-5
EULER, DPM = "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"
HEUN, SCM, UNIPC = "FlowMatchHeunDiscreteScheduler", "SCMScheduler", "UniPCMultistepScheduler"


def default_of(pipeline, name):
    return inspect.signature(pipeline.__call__).parameters[name].default


# NVIDIA's values: the commands in docs/sana.md, docs/sana_video.md and docs/sana_video2.md of NVlabs/Sana, the
# defaults of inference_video_scripts/inference_sana_video.py, and FastVideoDMD4Step in diffusion/scheduler.
AUTHORS = {
    **dict.fromkeys(("0.6B", "1.6B", "1.5-1.6B", "1.5-4.8B"), ("flow_dpmpp_2m", 20, 4.5)),
    **dict.fromkeys(("sprint-0.6B", "sprint-1.6B"), ("scm", 2, 4.5)),
    **dict.fromkeys(("video-2B-480p", "video-2B-720p"), ("flow_dpmpp_2m", 50, 6.0)),
    "video-2.0-5B": ("flow_dpmpp_2m", 50, 8.0),
    "video-2.0-5B-4step": ("flow_dmd", 4, 1.0),
    # Their script's scheduler and defaults.
    "vibe-1.6B": ("flow_dpmpp_2m", 20, 4.5),
}
# (frames, rate, shift, width and height, motion score)
VIDEO_AUTHORS = {
    "video-2B-480p": (81, 16, 8.0, (832, 480), 10),
    "video-2B-720p": (81, 16, 8.0, (1280, 704), 10),
    "video-2.0-5B": (193, 24, 12.0, (1280, 736), 20),
    "video-2.0-5B-4step": (81, 16, 6.0, (1280, 736), 20),
}


def test_the_defaults_are_the_authors():
    assert {name: tuple(model.defaults) for name, model in (IMAGES | VIDEOS).items()} == AUTHORS
    facts = {name: (m.frames, m.rate, m.shift, m.size, m.motion_score) for name, m in VIDEOS.items()}
    assert facts == VIDEO_AUTHORS
    for pipeline, name in ((SanaPipeline, "1.6B"), (SanaSprintPipeline, "sprint-1.6B"), (SanaVideoPipeline, "480p")):
        record = IMAGES.get(name) or VIDEOS["video-2B-480p"]
        theirs = default_of(pipeline, "num_inference_steps"), default_of(pipeline, "guidance_scale")
        assert theirs == record.defaults[1:]
    assert default_of(SanaVideoPipeline, "frames") == VIDEOS["video-2B-480p"].frames
    # The example in the pipeline's documentation has NVIDIA's sentence.
    source = Path(inspect.getfile(SanaVideoPipeline)).read_text(encoding="utf-8")
    assert VIDEOS["video-2B-480p"].negative in source


# Field by field, values that differ from the released folders.
SETTINGS = {
    DPM: {
        "beta_start": [0.001],
        "beta_schedule": ["scaled_linear"],
        "trained_betas": [[0.01] * 1000],
        "solver_order": [1, 3, 4],
        "prediction_type": ["epsilon", "sample"],
        "thresholding": [True],
        "dynamic_thresholding_ratio": [0.9],
        "sample_max_value": [0.5],
        "algorithm_type": ["sde-dpmsolver++", "dpmsolver"],
        "solver_type": ["heun"],
        "lower_order_final": [False],
        "euler_at_final": [True],
        "use_karras_sigmas": [True],
        "use_exponential_sigmas": [True],
        "use_beta_sigmas": [True],
        "use_lu_lambdas": [True],
        "use_flow_sigmas": [False],
        "flow_shift": [5.0],
        "final_sigmas_type": ["sigma_min"],
        "lambda_min_clipped": [-5.1],
        "variance_type": ["learned"],
        "timestep_spacing": ["trailing"],
        "steps_offset": [1],
        "rescale_betas_zero_snr": [True],
        "use_dynamic_shifting": [True],
        "num_train_timesteps": [500],
    },
    EULER: {
        "shift": [5.0],
        "use_dynamic_shifting": [True],
        "base_shift": [0.7],
        "max_shift": [2.0],
        "base_image_seq_len": [10],
        "max_image_seq_len": [99],
        "invert_sigmas": [True],
        "shift_terminal": [0.1],
        "use_karras_sigmas": [True],
        "use_exponential_sigmas": [True],
        "use_beta_sigmas": [True],
        "time_shift_type": ["linear"],
        "stochastic_sampling": [True],
        "num_train_timesteps": [500],
    },
    HEUN: {"shift": [5.0], "num_train_timesteps": [500]},
    UNIPC: {"flow_shift": [8.0]},
    SCM: {"prediction_type": ["sample"], "sigma_data": [0.6], "num_train_timesteps": [500]},
}
PLAIN = {
    DPM: {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 8.0},
    UNIPC: {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0},
    EULER: {"shift": 8.0},
    HEUN: {"shift": 8.0},
    SCM: {},
}
CASES = [(name, field, value) for name, fields in SETTINGS.items() for field, many in fields.items() for value in many]


def velocity(x, time):
    return torch.tanh(x * 0.7 + time / 1000) - 0.3 * x.roll(1, -1)


def theirs(name, config, steps):
    """What diffusers' scheduler makes of the noise, NaN where it raises an error."""
    torch.manual_seed(1)
    x = noise = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    try:
        scheduler = getattr(diffusers, name).from_config(config)
        if name == SCM:
            return by_sprint(scheduler, noise, steps)
        scheduler.set_timesteps(steps)
        for time in scheduler.timesteps:
            x = scheduler.step(velocity(x, float(time)), time, x, return_dict=False)[0]
    except (ValueError, TypeError, RuntimeError):
        return torch.full_like(noise, torch.nan)
    return x


def by_sprint(scheduler, noise, steps):
    """The loop of SanaSprintPipeline, in its variables."""
    sigma_data = scheduler.config.sigma_data
    x = noise * sigma_data
    scheduler.set_timesteps(steps, max_timesteps=1.57080, intermediate_timesteps=1.3 if steps == 2 else None)
    generator = torch.Generator().manual_seed(7)
    for angle in scheduler.timesteps[:-1]:
        sigma = torch.sin(angle) / (torch.cos(angle) + torch.sin(angle))
        scale = torch.sqrt(sigma**2 + (1 - sigma) ** 2)
        inputs = x / sigma_data * scale
        out = velocity(inputs, float(sigma))
        out = ((1 - 2 * sigma) * inputs + (1 - 2 * sigma + 2 * sigma**2) * out) / scale * sigma_data
        x, denoised = scheduler.step(out, angle, x, generator=generator, return_dict=False)
    return denoised / sigma_data


def ours(part, steps):
    sampler = SAMPLERS[scheduler_of(part).sampler]
    generator = torch.Generator().manual_seed(7)

    def noises():
        while True:
            yield torch.randn(1, 4, 3, 3, generator=generator)

    def denoise(x, sigma):
        # SANA-Sprint receives the sigma itself.
        time = sigma if sampler is SAMPLERS["scm"] else (torch.tensor(sigma, dtype=torch.float32) * 1000).item()
        return x - sigma * velocity(x, int(time) if sampler.whole_timesteps else time)

    noise = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    rules = RULES[DIFFUSERS]
    return sampler.sample(
        denoise, noise, sampler.sigmas(steps, shift_of(part), rules), **sampler.options(rules, noises())
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: a diffusers folder without a scheduler}: images, the pipeline of a ControlNet, SANA-Sprint, and videos."""
    root = tmp_path_factory.mktemp("folders")
    sana, sprint = layouts.transformer(), layouts.transformer(guidance_embeds=True, qk_norm="rms_norm_across_heads")
    models = {"image": sana, "controlnet": sana, "sprint": sprint, "video": transformer("480p")}
    for kind, model in models.items():
        model.save_pretrained(root / kind / "transformer")
        (root / kind / "model_index.json").write_text("{}")
    diffusers.SanaControlNetModel.from_config(
        {key: value for key, value in sana.config.items() if not key.startswith(("_", "guidance", "qk"))}, num_layers=1
    ).save_pretrained(root / "controlnet" / "controlnet")
    return {kind: root / kind for kind in models}


@pytest.mark.parametrize("kind", ["image", "controlnet", "sprint", "video"])
@pytest.mark.filterwarnings("ignore")
def test_each_setting_of_a_folder_is_followed_or_named(folders, kind):
    """As by diffusers within 1e-5, or in a line; a line only where the result is another."""
    folder, silent, needless, followed = folders[kind], [], [], 0
    file = folder / "scheduler" / "scheduler_config.json"
    file.parent.mkdir(exist_ok=True)
    cases = [(name, None, None) for name in PLAIN] + [
        (name, field, None) for name in (DPM, EULER) for field in PLAIN[name]
    ]
    for name, field, value in cases + CASES:
        config = {**PLAIN[name], field: value} if value is not None else dict(PLAIN[name])
        if value is None:
            config.pop(field, None)
        file.write_text(json.dumps({"_class_name": name, **config}))
        part = sana_core.inspect_checkpoint(folder).transformer
        named = any(line.startswith("scheduler: ") and "not available" in line for line in checkpoint_notes(part))
        # 16 and more steps end with another order than fewer.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors = [(theirs(name, config, steps) - ours(part, steps)).abs().max() for steps in (2, 4, 20)]
        same = all(error < BOUND for error in errors)
        followed += same
        if not same and not named:
            silent.append((name, field, value, errors))
        if same and named:
            needless.append((name, field, value))
    assert not silent and not needless
    assert followed >= (3 if kind == "sprint" else 20)


def test_a_pipeline_of_a_controlnet_has_one(folders):
    module = sana_core.load_controlnet(folders["controlnet"])
    assert len(module.controlnet_blocks) == 1
    assert (
        sana_core.load_transformer(folders["controlnet"]).config.num_layers == layouts.transformer().config.num_layers
    )


def test_a_bare_file_with_biases_of_attention_is_diffusers(tmp_path):
    model = layouts.transformer(attention_bias=True).float()
    save_file(model.state_dict(), tmp_path / "biased.safetensors")
    loaded = sana_core.load_transformer(tmp_path / "biased.safetensors")
    generator = torch.Generator().manual_seed(0)
    x, embeds = torch.randn(1, 32, 4, 4, generator=generator), torch.randn(1, 5, layouts.CAPTION, generator=generator)
    time, mask = torch.tensor([500.0]), torch.ones(1, 5)
    expected = model(x, embeds, time, encoder_attention_mask=mask).sample
    torch.testing.assert_close(sana_core.predict_velocity(loaded, x, time, embeds, mask), expected, atol=BOUND, rtol=0)
    with pytest.raises(InputError, match="^mask: got a prompt without a token, expected at least one; encode the text"):
        sana_core.predict_velocity(loaded, x, time, embeds, torch.zeros(1, 5))


VIDEO2_NAMES = {
    "video-2.0-5B-4step": [
        "SANA_Video_2.0_5B_720p_4step.pth",
        "SANA_Video_2.0_5B_720p_4step/checkpoints/model.pth",
        "SANA-Video_2.0_5B_720p_4step/SANA_Video_2.0_5B_720p.pth",
        "models--nv--SANA-Video_2.0_5B_720p_4step/snapshots/abc/checkpoints/model.pth",
        "sana_video2_4_step.pth",
        "sana_video2_4-step_fp8.pth",
        "sana video2 4 step.pth",
        "video2_four_step.pth",
        "video2-four-steps.pth",
        "video2_4steps.pth",
        "Video2_4Step_bf16.pth",
        "4step.pth",
        "video2.4steps.v2.pth",
        "video2_preview.pth",
        "preview_fp8.pth",
        "sana_video_2_preview_bf16.pth",
        "video2_dmd.pth",
        "video2-DMD2.pth",
        "4step/model.pth",
        "four_step/weights/a/b.pth",
    ],
    "video-2.0-5B": [
        "SANA_Video_2.0_5B_720p.pth",
        "SANA-Video_2.0_5B_720p/checkpoints/model.pth",
        "video2_24step.pth",
        "video2_1024steps.pth",
        "video2_step4.pth",
        "video2_14_steps.pth",
        "video2_4stepper.pth",
        "video2_50steps.pth",
        "model.pth",
        "epoch_4-s_1000.pth",
        "previews/model.pth",
        "my preview/model.pth",
        "sana_video2_fp8.pth",
        "video2-ema.pth",
        "video2_twentyfour.pth",
        "video2_64_steps.pth",
        "dmdx.pth",
        "SANA_Video_2.0_5B_480p.pth",
        "video2_720p_24fps.pth",
        "v2/0004/step.pth",
    ],
}


def renamed(file, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.hardlink_to(file)
    return sana_core.inspect_checkpoint(path)


def test_a_name_of_a_2_0_file_is_followed_and_called_a_guess(tmp_path_factory):
    root = tmp_path_factory.mktemp("v")
    torch.save({"state_dict": nvidia_video2.random_video2_file(48, 8, 4)}, root / "file")
    for variant, names in VIDEO2_NAMES.items():
        for number, name in enumerate(names):
            info = renamed(root / "file", root / f"{variant[-5:]}{number}".replace("4step", "p") / name)
            assert (name, info.variant, info.is_assumed) == (name, variant, True)
            assert f"{variant}, assumed from the file's name)" in info.description


def test_a_relative_path_has_the_names_of_its_folders(tmp_path, monkeypatch):
    (tmp_path / "video_4step").mkdir()
    torch.save({"state_dict": nvidia_video2.random_video2_file(48, 8, 4)}, tmp_path / "video_4step" / "model.pth")
    monkeypatch.chdir(tmp_path / "video_4step")
    assert sana_core.inspect_checkpoint("model.pth").variant == "video-2.0-5B-4step"


def test_a_saved_preview_is_certain(tmp_path):
    torch.save({"state_dict": nvidia_video2.random_video2_file(48, 8, 4)}, tmp_path / "four_steps.pth")
    convert_checkpoint(tmp_path / "four_steps.pth", tmp_path / "video.safetensors")
    info = sana_core.inspect_checkpoint(tmp_path / "video.safetensors")
    assert (info.variant, info.is_assumed) == ("video-2.0-5B-4step", False)
    assert shift_of(info) == 6.0


def test_names_of_2b_files_tell_longsana(tmp_path_factory):
    """LongSANA has the tensors of 480p. No other model has the tensors of 720p."""
    root = tmp_path_factory.mktemp("v")
    long = ("LongLive/model", "SANA-Video_2B_480p_LongLive/checkpoints/model", "x_longsana_y", "LongSANA_2B_480p_ode")
    long += ("long_live", "long-sana", "models--nv--SANA-Video_2B_480p_LongLive/snapshots/abc/checkpoints/model")
    plain = ("SANA_Video_2B_480p", "model", "video/model", "along_sana", "belonglive", "SANA-Video/checkpoints/2b")
    for size in ("480p", "720p"):
        save_file(transformer(size).state_dict(), root / f"{size}.safetensors")
        for name in long:
            info = renamed(root / f"{size}.safetensors", root / f"l{size}" / f"{name}.safetensors")
            assert (name, info.kind) == (name, "other") and info.variant.startswith("LongSANA")
        for name in plain:
            info = renamed(root / f"{size}.safetensors", root / f"p{size}" / f"{name}.safetensors")
            assert (name, info.variant, info.is_assumed) == (name, f"video-2B-{size}", size == "480p")
    # A configuration is certain, whatever the folder is called.
    transformer("480p").save_pretrained(root / "LongLive" / "certain")
    convert_checkpoint(root / "LongLive" / "certain", root / "LongLive" / "converted.safetensors")
    for path in ("certain", "converted.safetensors"):
        info = sana_core.inspect_checkpoint(root / "LongLive" / path)
        assert (info.variant, info.is_assumed) == ("video-2B-480p", False)


def large_file(path, width, layers, heads):
    """A file of the names and shapes of SANA-Video 2.0 with these sizes, without numbers."""
    with torch.device("meta"):
        tensors = nvidia_video2.random_video2_file(width, layers, heads, caption=2304)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # The transformer does not read these two.
    unread = "pos_embed", "y_embedder.y_embedding"
    return layouts.sparse({name: shape for name, shape in shapes.items() if name not in unread}, path)


def test_a_model_of_another_size_has_its_record_or_is_refused(tmp_path, monkeypatch):
    """The 14B that NVIDIA has announced: 40 layers of 4096 (docs/sana_video2.md of NVlabs/Sana)."""
    file = large_file(tmp_path / "SANA_Video_2.0_14B_480p.safetensors", 4096, 40, 32)
    message = "got 40 layers of width 4096, expected at most 32 of 2560 as in SANA-Video 2.0 5B 720p; update this pack"
    with pytest.raises(ValueError, match=message):
        sana_core.inspect_checkpoint(file)
    row = replace(
        VIDEO_5B,
        name="video-2.0-14B",
        title="SANA-Video 2.0 14B 480p",
        width=4096,
        hidden=16384,
        layers=40,
        parameters=14_246_716_224,
        size=(832, 480),
        frames=81,
        rate=16,
        shift=1.0,
        has_twin=False,
    )
    monkeypatch.setitem(known_models.VIDEOS, row.name, row)
    info = sana_core.inspect_checkpoint(file)
    assert (info.variant, shift_of(info), info.is_assumed, info.notes) == (row.name, 1.0, False, ())
    assert record_of(info) is row and known_models.model_of(config_of(info)) is row
    assert info.parameters == row.parameters
    assert choose_sampling(config_of(info), None, None, None) == row.defaults
    small = large_file(tmp_path / "small.safetensors", 2560, 16, 20)
    (note,) = sana_core.inspect_checkpoint(small).notes
    assert "16 layers of width 2560, not 32 of 2560; softmax heads, shift, size and frames are as in SANA-" in note


def preview_config(tmp_path):
    torch.save({"state_dict": nvidia_video2.random_video2_file(48, 8, 4)}, tmp_path / "4step.pth")
    return config_of(sana_core.inspect_checkpoint(tmp_path / "4step.pth"))


def test_a_distilled_model_has_its_own_settings(tmp_path, folders):
    preview = preview_config(tmp_path)
    assert choose_sampling(preview, None, None, None) == Defaults("flow_dmd", 4, 1.0)
    title = "4-step preview of SANA-Video 2.0"
    for chosen, message in (
        (("flow_dpmpp_2m", None, None), f"sampler: got flow_dpmpp_2m for {title}, expected flow_dmd, for which it was"),
        ((None, 20, None), f"steps: got 20 for {title}, expected 4, for which it was distilled; choose that"),
        ((None, None, 4.5), f"guidance: got 4.5 for {title}, expected 1.0, for which it was distilled; choose that"),
        (("scm", None, None), f"sampler: got scm for {title}, expected flow_dmd"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            choose_sampling(preview, *chosen)
    sprint = config_of(sana_core.inspect_checkpoint(folders["sprint"]).transformer)
    assert choose_sampling(sprint, None, 4, 3.0) == Defaults("scm", 4, 3.0)
    with pytest.raises(InputError, match="^sampler: got flow_euler for SANA-Sprint, expected scm, for which it was"):
        choose_sampling(sprint, "flow_euler", None, None)
    image = config_of(sana_core.inspect_checkpoint(folders["image"]).transformer)
    for name, owner in (("scm", "SANA-Sprint 1.6B"), ("flow_dmd", title)):
        with pytest.raises(
            InputError, match=f"^sampler: got {name} for SANA, expected another, because .* {owner}; ch"
        ):
            check_distilled(image, sampler=name)


def test_a_sampler_without_a_scheduler_takes_no_folder_and_a_duplicate_is_refused():
    row = Sampler(SAMPLERS["flow_euler"].sample, SAMPLERS["flow_euler"].schedule)
    assert by_scheduler({**SAMPLERS, "flow_sde": row}) == by_scheduler(SAMPLERS)
    with pytest.raises(
        ValueError, match="^flow_sde: got the scheduler of flow_euler, expected another; set it to None$"
    ):
        by_scheduler({**SAMPLERS, "flow_sde": row._replace(scheduler=(EULER, None))})


def test_the_shift_of_0_6b_is_nvidias_in_nvidias_code():
    for reference, shift in ((NVIDIA, 4.0), (DIFFUSERS, 3.0)):
        assert known_models.released_shift(IMAGES["0.6B"], 1024, reference) == shift
    assert known_models.released_shift(IMAGES["1.6B"], 4096, NVIDIA) == 6.0
