"""A run's TOML file: an error is one line that names the wrong key and the nearest valid one."""

import re
from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_origin, get_type_hints

import pytest
from setup import ROOT

from sana_core.__main__ import main
from sana_core.errors import InputError, MissingFileError
from sana_core.training.ranks import all_values
from sana_core.training.settings import (
    TABLES,
    Phase,
    TrainingSettings,
    check_settings,
    describe_field,
    describe_settings,
    read_settings,
)

WHOLE = """
model = "model"
out = "out"
[[phase]]
data = "pictures"
steps = 3
"""


def write(folder, text):
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_paths_are_relative_to_the_file(tmp_path):
    settings = read_settings(write(tmp_path, WHOLE))
    assert isinstance(settings, TrainingSettings)
    assert (settings.model, settings.out) == (str(tmp_path / "model"), str(tmp_path / "out"))
    assert settings.phase[0].data == (str(tmp_path / "pictures"),)
    assert settings.cache == "" and settings.method.scale == 1.0


def test_a_file_can_turn_clipping_off(tmp_path):
    assert read_settings(write(tmp_path, WHOLE + "[optimizer]\nclip = 0")).optimizer.clip == 0.0
    with pytest.raises(InputError, match="optimizer.clip: got -0.1, expected a number from 0 to"):
        read_settings(write(tmp_path, WHOLE + "[optimizer]\nclip = -0.1"))


def test_each_machine_may_have_its_folders_elsewhere():
    phases = [
        Phase((f"{folder}/pictures",), steps=1, regularisation=(f"{folder}/others",)) for folder in ("here", "there")
    ]
    one, other = (all_values(TrainingSettings("model", "out", (phase,))) for phase in phases)
    assert one == other and one["phase 1: data"] == one["phase 1: regularisation"] == 1


WRONG = {
    "no TOML": ("a = = b", "not TOML"),
    "unknown key": (WHOLE + "learning_rat = 1e-4", "got the key 'learning_rat', .* the nearest is learning_rate"),
    "unknown table": (WHOLE + "[methods]\nkind='lora'", "got the key 'methods', .* the nearest is method"),
    "missing": ("model = 'm'", r"^run.toml: out is missing"),
    "text for number": (WHOLE.replace("3", "'3'"), "steps: got '3', expected a whole number"),
    "number for text": (WHOLE.replace("'model'", "3").replace('"model"', "3"), "model: got 3, expected a text"),
    "true for number": (WHOLE.replace("3", "true"), "steps: got True, expected a whole number"),
    "neither": (WHOLE.replace("steps = 3", ""), "phase 1: got neither of epochs and steps"),
    "both": (WHOLE + "epochs = 2", "phase 1: got both of epochs and steps"),
    "side": (WHOLE + "resolution = 1000", "phase 1: resolution: got 1000, expected a multiple of 32"),
    "NaN": (WHOLE + "learning_rate = nan", "phase 1: learning_rate: got nan, expected a number from 0 to 10"),
    "optimizer": (WHOLE + "[optimizer]\nname = 'adam'", "optimizer.name: got 'adam', .* the nearest is adamw"),
    "precision": (
        "dtype = 'float32'" + WHOLE + "[method]\nkind = 'full'\nweights = 'bfloat16'",
        "weights: got bfloat16 with dtype float32",
    ),
    "no control": (
        WHOLE + "[method]\nkind = 'controlnet'\n[validation]\nprompts = ['a', 'b', 'c']\ncontrol = ['a', 'b']",
        "control: got 2 control images for 3 prompts, expected one, or one for each",
    ),
    "blocks": (WHOLE + "[method]\nblocks = 0", "method.blocks: got 0, expected a number from 1"),
    "no phase": ("model = 'm'\nout = 'o'\nphase = []", "phase: got none"),
    "a table for a list": (
        "model = 'm'\nout = 'o'\n[phase]\nsteps = 1",
        r"phase: got \[phase\], expected a list of tables; write \[\[phase\]\]$",
    ),
    "a name with a folder": ("name = '../x'" + WHOLE, "name: got '../x', expected the name of a file"),
    "an empty name": ("name = ''" + WHOLE, "name: got '', expected the name of a file; use letters and digits"),
    "a name of spaces": ("name = '  '" + WHOLE, "name: got '  ', expected the name of a file"),
    "a space at its end": ("name = 'a '" + WHOLE, "name: got 'a ', expected the name of a file"),
    "a dot at its end": ("name = 'a.'" + WHOLE, "name: got 'a.', expected the name of a file"),
    "a device of Windows": ("name = 'Nul.b'" + WHOLE, "name: got 'Nul.b', which Windows reserves for a device; choose"),
    "a state's own name": (
        "name = 'STATE'" + WHOLE,
        "name: got 'STATE', .* the name of a state's file; choose another",
    ),
    "a name that no disk takes": (f"name = '{'x' * 241}'" + WHOLE, "name: got .*, expected at most 240 bytes; choose"),
    "a longer one in bytes": (
        "name = '" + "\u4e00" * 81 + "'" + WHOLE,
        "name: got .*, expected at most 240 bytes; choose",
    ),
    "nothing counts": (WHOLE + "weights = [0]", "phase 1: weights: got only 0, so nothing is trained; raise one"),
    "a size twice": (
        WHOLE + "resolutions = [1024]",
        "phase 1: resolutions: got a size twice, expected others than 1024; remove it",
    ),
    "repeats": (WHOLE + "repeats = [1, 2]", "phase 1: got 2 repeats for 1 sets of data, expected one for each"),
    "crops": (WHOLE + "crops = 0", "phase 1: crops: got 0, expected a number from 1 to 64"),
    "other sizes": (WHOLE + "resolutions = [1000]", "phase 1: resolutions: got 1000, expected a multiple of 32"),
    "times": (WHOLE + "[loss]\ntimes = 'sigmoid'", "loss.times: got 'sigmoid', expected one of logit_normal, mode"),
    "an average of an average": (
        WHOLE + "[optimizer]\nname = 'schedulefree'\nema = 0.99",
        "ema: got 0.99 with optimizer schedulefree, which averages the weights itself, expected 0; remove it",
    ),
    "a resolution of no bucket": (
        WHOLE + "resolution = 16384",
        "phase 1: resolution: got 16384, expected a multiple of 32 from 32 to 8192; change it",
    ),
    "steps of the images": (
        WHOLE + "[validation]\nevery = 1\nprompts = 'a'\nsteps = -1",
        "validation.steps: got -1, expected a number from 1 to 1000",
    ),
    "guidance of the images": (
        WHOLE + "[validation]\nevery = 1\nprompts = 'a'\nguidance = nan",
        "validation.guidance: got nan, expected a number from 0 to 100",
    ),
    "nested": ("a = " + "[" * 100_000, "not TOML"),
    "a key of many parts": (".".join("a" * 20_000) + " = 1", "not TOML .a key has 100 parts"),
    "a table of many parts": ("[" + ".".join("a" * 20_000) + "]", "not TOML .a key has 100 parts"),
    "a number that cannot be written": (WHOLE + "[[phase]]\nsteps = 0x" + "f" * 5000, "or a number 1000 digits"),
    "a table that is a number that cannot be written": ("phase = 0x" + "f" * 5000, "or a number 1000 digits"),
    "a newline and a tab": (
        WHOLE.replace('"pictures"', r'"D:\new\train"'),
        "data: got .*, a path with a control character; write a path with backslashes in single quotes, or with /",
    ),
    "a Windows path in double quotes": (
        WHOLE.replace('"model"', r'"C:\Users\me"'),
        r"at line 2, column \d+\)\); write a path with backslashes in single quotes, or with /",
    ),
    "no model": (WHOLE.replace('"model"', '""'), "model: got an empty path, expected the path of a file or folder"),
    "no out": (WHOLE.replace('"out"', '""'), "out: got an empty path, expected the path of a file or folder"),
    "no data": (WHOLE.replace('"pictures"', '""'), "phase 1: data: got an empty path, expected the path of a file"),
    "one empty path": (WHOLE.replace('"pictures"', "['d', '']"), "phase 1: data: got an empty path, expected the path"),
    "no regularisation": (WHOLE + "regularisation = ''", "phase 1: regularisation: got an empty path, expected the"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_named(tmp_path, fault):
    text, expected = WRONG[fault]
    with pytest.raises(InputError, match=expected) as caught:
        read_settings(write(tmp_path, text))
    assert str(caught.value).startswith("run.toml: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


# Settings that have an effect with some options only: a TOML text that sets one without them, and the missing option.
UNUSED = {
    "method.rank": ("kind = 'full'\nrank = 8", "got 8 without method.kind lora, dora or lokr"),
    "method.alpha": ("kind = 'controlnet'\nalpha = 8", "got 8.0 without method.kind lora, dora or lokr"),
    "method.targets": ("kind = 'full'\ntargets = 'both'", 'got "both" without method.kind lora, dora or lokr'),
    "method.weights": ("weights = 'bfloat16'", 'got "bfloat16" without method.kind controlnet or full'),
    "method.blocks": ("kind = 'full'\nblocks = 3", "got 3 without method.kind controlnet"),
    "method.start": ("kind = 'full'\nstart = 'a'", "got .* without method.kind lora, dora or lokr"),
    "method.layers": ("kind = 'full'\nlayers = '*'", r'got \["\*"\] without method.kind lora, dora or lokr'),
    "method.dropout": ("kind = 'lokr'\ndropout = 0.1", "got 0.1 without method.kind lora or dora"),
    "loss.tangent_warmup": ("tangent_warmup = 3", "got 3 without loss.kind consistency"),
    "loss.times": ("kind = 'consistency'\ntimes = 'mode'", 'got "mode" without loss.kind flow'),
    "loss.logit_mean": ("times = 'mode'\nlogit_mean = 0.5", "got 0.5 without loss.times logit_normal"),
    "loss.logit_std": ("kind = 'consistency'\nlogit_std = 2.0", "got 2.0 without loss.kind flow"),
    "loss.mode_scale": ("mode_scale = 1.0", "got 1.0 without loss.times mode"),
    "optimizer.d0": ("d0 = 1e-5", "got 1e-05 without optimizer.name prodigy"),
    "optimizer.d_coef": ("name = 'came'\nd_coef = 2", "got 2.0 without optimizer.name prodigy"),
    "parallel.block": ("block = 'SanaBlock'", 'got "SanaBlock" without parallel.kind fsdp or fsdp_offload'),
    "parallel.replicas": ("replicas = 2", "got 2 without parallel.kind fsdp or fsdp_offload"),
    "phase.cycles": ("schedule = 'cosine'\ncycles = 2", "got 2 without schedule cosine_with_restarts"),
    "phase.power": ("power = 2", "got 2.0 without schedule polynomial"),
    "phase.prior_loss_weight": ("prior_loss_weight = 0.5", "got 0.5 without regularisation"),
    "phase.regularisation_caption": ("regularisation_caption = 'a cat'", 'got "a cat" without regularisation'),
    "phase.keep_tags": ("keep_tags = 1", "got 1 without tag_orders"),
    "validation.every": ("every = 9", "got 9 without validation.prompts or validation.share"),
    "validation.share": ("share = 0.1", "got 0.1 without validation.every"),
    "validation.prompts": ("prompts = 'a fox'", r'got \["a fox"\] without validation.every'),
    "validation.negative_prompt": (
        "every = 9\nshare = 0.1\nnegative_prompt = 'x'",
        'got "x" without validation.prompts',
    ),
    "validation.width": ("width = 64", "got 64 without validation.prompts"),
    "validation.height": ("height = 64", "got 64 without validation.prompts"),
    "validation.steps": ("steps = 4", "got 4 without validation.prompts"),
    "validation.guidance": ("guidance = 3", "got 3.0 without validation.prompts"),
    "validation.control": ("every = 9\nprompts = 'x'\ncontrol = 'a'", "got .* without method.kind controlnet"),
    "compile": ("[method]\nkind = 'controlnet'", 'got "on" without method.kind lora, dora, lokr or full'),
    "trigger": ("[method]\nkind = 'full'", 'got "my style" without method.kind lora, dora or lokr'),
}


@pytest.mark.parametrize("setting", UNUSED)
def test_a_setting_that_the_other_settings_ignore_is_refused(tmp_path, setting):
    text, expected = UNUSED[setting]
    table, _, name = setting.rpartition(".")
    if table == "phase":
        text, name = WHOLE + text, f"phase 1: {name}"
    elif table:
        text, name = f"{WHOLE}[{table}]\n{text}", setting
    else:
        value = "on" if name == "compile" else "my style"
        text = f'{name} = "{value}"\n{WHOLE}{text}'
    with pytest.raises(InputError, match=rf"^run.toml: {name}: {expected}, where it does nothing; set that, or remove"):
        read_settings(write(tmp_path, text))


def test_every_setting_for_some_options_only_is_in_the_table():
    """The help of such a setting begins with the option, as in "prodigy only:", or the row of the setting needs one."""
    conditional = {"validation.every"}
    for table, kind in TABLES.items():
        for row in fields(kind):
            if row.metadata.get("needs") or re.match(r"[\w ]+ only:", row.metadata.get("help", "")):
                conditional.add(f"{table}.{row.name}".removeprefix("."))
    assert conditional == UNUSED.keys()


def test_a_negative_prompt_of_sana_sprint_is_refused(tmp_path):
    text = WHOLE + "[loss]\nkind = 'consistency'\n[validation]\nevery = 1\nprompts = 'a'\nnegative_prompt = 'b'"
    with pytest.raises(InputError, match='validation.negative_prompt: got "b" without loss.kind flow, where it does'):
        read_settings(write(tmp_path, text))


def texts_in(kind, before=""):
    """Yield (name, path of fields, value) for each text of a settings class, with half a character in the value."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from ((f"{name}.{inner}", (name, *path), value) for inner, path, value in texts_in(hint))
        elif hint is str:
            yield name, (name,), HALF
        elif get_origin(hint) is tuple and get_args(hint)[0] is str:
            yield name, (name,), ("whole", HALF)


def replaced(settings, path, value):
    """A copy of `settings` with `value` at the path of fields `path`."""
    name, *inner = path
    return replace(settings, **{name: replaced(getattr(settings, name), inner, value) if inner else value})


HALF = "half \ud83d"
RUN_TEXTS = list(texts_in(TrainingSettings))
PHASE_TEXTS = list(texts_in(Phase))
PHASE = Phase(("pictures",), steps=3)


def test_the_texts_of_settings_are_known():
    names = {name for name, *_ in RUN_TEXTS}
    assert {"model", "out", "trigger", "name", "validation.prompts", "method.start", "parallel.block"} <= names
    assert {name for name, *_ in PHASE_TEXTS} >= {"data", "regularisation"}


@pytest.mark.parametrize("name, path, value", RUN_TEXTS, ids=[name for name, *_ in RUN_TEXTS])
def test_a_lone_surrogate_in_a_text_is_refused_at_the_start(name, path, value):
    settings = replaced(TrainingSettings("model", "out", (PHASE,)), path, value)
    with pytest.raises(InputError, match=f"^{name}: contains half a character .* at position 5; [a-z ]+$"):
        check_settings(settings)


@pytest.mark.parametrize("name, path, value", PHASE_TEXTS, ids=[name for name, *_ in PHASE_TEXTS])
def test_a_lone_surrogate_in_a_text_of_a_phase_is_refused_at_the_start(name, path, value):
    settings = TrainingSettings("model", "out", (PHASE, replaced(PHASE, path, value)))
    with pytest.raises(InputError, match=f"^phase 2: {name}: contains half a character .* at position 5; [a-z ]+$"):
        check_settings(settings)


def test_of_a_file_that_is_no_settings_no_more_is_read_than_tells_so(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(InputError, match="^model.safetensors: got more than 1000000 bytes, expected a TOML file"):
        read_settings(file)


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_byte_order_mark_before_the_settings_is_skipped(tmp_path, ends):
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf" + ends.join([*WHOLE.splitlines(), ""]).encode())
    assert read_settings(file).phase[0].data == read_settings(write(tmp_path, WHOLE)).phase[0].data


def test_settings_in_another_encoding_are_named(tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes(WHOLE.encode("utf-16"))
    with pytest.raises(InputError, match="^run.toml: got a file that is not UTF-8 at byte 0; save it as UTF-8$"):
        read_settings(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        MissingFileError, match="^settings: no such file .*, expected a TOML file as in recipes/; check its spelling"
    ):
        read_settings(tmp_path / "run.toml")


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda file: file.stem)
def test_the_recipes_are_read(recipe):
    read_settings(recipe)


def test_the_help_of_train_and_its_page_list_every_key_with_its_description(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert describe_settings() in shown
    assert (ROOT / "docs" / "settings.toml").read_text(encoding="utf-8") == f"{describe_settings()}\n"
    for table, kind in TABLES.items():
        for row in fields(kind):
            if row.name not in TABLES:
                help_text = describe_field(f"{table}.{row.name}").help
                assert help_text.endswith(".") and help_text in " ".join(shown.replace("\n# ", " ").split()), row.name


def test_the_described_defaults_are_the_defaults_of_a_run(tmp_path):
    text = describe_settings().replace('""  # required', '"x"').replace("# steps =", "steps = 1", 1)
    settings = read_settings(write(tmp_path, text))
    place = str(tmp_path / "x")
    assert settings == TrainingSettings(place, place, (Phase((place,), steps=1),))
