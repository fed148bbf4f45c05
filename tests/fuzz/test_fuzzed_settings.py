"""Broken settings of a training: they are read, or one line names the file and what to do."""

from hypothesis import example, given
from hypothesis import strategies as st
from mutations import changed_bytes

from sana_core.training.settings import TrainingSettings, read_settings

SETTINGS = """
model = "model"
out = "out"
name = "x"
seed = 0
dtype = "float32"
keep = 3
[method]
kind = "lora"
rank = 4
alpha = 2.0
layers = ["*.attn1.*"]
dropout = 0.1
[loss]
kind = "flow"
times = "mode"
logit_mean = 0.1
logit_std = 1.0
mode_scale = 1.29
[optimizer]
name = "adamw"
clip = 0.1
[[phase]]
data = ["pictures"]
resolution = 128
steps = 3
learning_rate = 1e-3
schedule = "polynomial"
cycles = 2
repeats = [2]
weights = [0.5]
regularisation = "others"
prior_loss_weight = 1.0
resolutions = [160]
flip = true
crops = 2
tag_orders = 2
keep_tags = 1
power = 2.0
[validation]
every = 2
prompts = ["a red circle"]
[parallel]
kind = "ddp"
"""
LINES = SETTINGS.strip().splitlines()
VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["true", "[]", "{}", "[[]]", "''", "'state'", "'x'", "[1, 'a']", "{a = 1}", "1979-05-27", "-0.0"]),
    st.text(max_size=300).map(repr),
)


@st.composite
def changed_lines(draw):
    """The settings with up to three lines dropped, repeated, or with another value or key."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        key, _, value = lines[number].partition(" = ")
        match draw(st.sampled_from(("drop", "repeat", "value", "key"))):
            case "drop":
                lines[number] = ""
            case "repeat":
                lines.insert(number, lines[number])
            case "value":
                lines[number] = f"{key} = {draw(VALUES)}"
            case "key":
                lines[number] = f"{draw(st.text(max_size=12))} = {value}"
    return "\n".join(lines).encode(errors="surrogatepass")


@given(content=changed_lines() | changed_bytes(SETTINGS.encode()))
@example(content=SETTINGS.replace("[[phase]]", "[phase]").encode())
@example(content=SETTINGS.replace('"x"', '"' + "x" * 250 + '"').encode())
def test_settings(survives, tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "run.toml"
    file.write_bytes(content)
    result = survives(lambda: read_settings(file), "run.toml")
    assert result is None or isinstance(result, TrainingSettings)
