"""The report of a healthy machine has no fault. The report of another machine names the broken part."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path, PureWindowsPath

import pytest
import torch
import torch.nn.functional as F
import video_models
from bounded import bounded
from forked import command
from pretend_card import pretend_cards
from safetensors.torch import load_file, save_file
from setup import ROOT

from sana_core import inspect_checkpoint
from sana_core.__main__ import main
from sana_core.checkpoints.headers import read_header
from sana_core.doctor import Report, examine, files, machine
from sana_core.doctor.files import check_files, describe_loras
from sana_core.doctor.machine import check_versions, describe_devices
from sana_core.doctor.report import without_places
from sana_core.kernels import trial
from sana_core.runtime.atomic_files import digest_file

POSTERS, TINY = ROOT / "demo" / "sana-posters", ROOT / "tests" / "models" / "sana-tiny"
WEIGHTS = "diffusion_pytorch_model.safetensors"
CYANOTYPE = ROOT / "demo" / "sana-posters-cyanotype.safetensors"


def faults(report):
    return {line.subject: line.got for line in report.faults}


def test_a_machine_and_files_that_are_right_have_no_fault(capsys, tmp_path):
    file = tmp_path / "report.json"
    options = ["--seconds", "1000", "--json", str(file)]
    assert main(["doctor", *map(str, (POSTERS, POSTERS / "transformer", CYANOTYPE)), *options]) == 0
    written = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert {line["verdict"] for line in document["lines"]} <= {"right", "noted", "skipped"}, written
    checked = {line["subject"] for line in document["lines"] if line["verdict"] == "right"}
    assert {"torch", "diffusers", "transformers"} <= checked
    assert CYANOTYPE.name in {line["subject"] for line in document["lines"]}
    assert document["summary"] in written
    # nothing of where it is
    assert not any(part in written + file.read_text() for part in (str(ROOT), str(tmp_path), str(ROOT.parent)))


def test_the_exit_status_is_1_if_there_is_a_fault(capsys, tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    assert main(["doctor", str(tmp_path), "--seconds", "0"]) == 0
    assert main(["doctor", str(tmp_path / "broken.safetensors"), "--seconds", "0"]) == 1
    assert "broken.safetensors" in capsys.readouterr().out


def test_an_old_torch_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    report = Report()
    check_versions(report)
    assert faults(report) == {"torch": "2.5.1+cu124"}


BROKEN = """raise RuntimeError(
    "Detected that PyTorch and TorchAudio were compiled with different CUDA versions. PyTorch has CUDA version 13.2 "
    "whereas TorchAudio has CUDA version 13.0. Please install the TorchAudio version that matches your PyTorch version."
)"""


def test_a_torchaudio_of_another_torch_is_named_with_its_remedy(tmp_path):
    """transformers imports any torchaudio. Its error is the fourth of a chain."""
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text(BROKEN)
    record = tmp_path / "torchaudio-2.11.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.11.0\n")
    line = (
        f"torchaudio: got 2.11.0, which cannot be imported with torch {torch.__version__} (RuntimeError: Detected that "
        "PyTorch and TorchAudio were compiled with different CUDA versions. "
    )
    remedy = "); pip install -U torchaudio, or pip uninstall torchaudio if this ComfyUI starts without it"

    size = ["--width", "128", "--height", "128", "--out", str(tmp_path / "images")]
    commands = [["generate", "x", "--checkpoint", str(TINY), *size], ["doctor", "--seconds", "0"]]
    code = f"from sana_core.__main__ import main; assert [main(words) for words in {commands}] == [1, 1]"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (said, *others) = process.stderr.splitlines()
    assert said.startswith(line) and said.endswith(remedy) and all(other.startswith("checking ") for other in others)
    document = [row.split(" | ") for row in process.stdout.splitlines() if row.endswith("WRONG |")]
    got = {subject.removeprefix("| "): text for subject, _, text, _ in document}
    assert got["torchaudio"].startswith(line) and got["torchaudio"].endswith(remedy)
    assert got.keys() == {"torchaudio", "diffusers", "transformers"}
    assert all(got[name].endswith(", which needs torchaudio") for name in ("diffusers", "transformers"))


def test_an_installed_ray_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(machine, "OLDEST_RAY", "99.0")
    report = Report()
    check_versions(report)
    assert faults(report).keys() == {"ray"}


def test_attention_that_a_pack_has_replaced_is_named(monkeypatch):
    def replacement(*_, **__):
        raise AssertionError

    replacement.__module__ = "another_pack.attention"
    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    report = Report()
    machine.describe_machine(report)
    noted = {line.subject: line.got for line in report.lines}
    assert noted["torch's scaled_dot_product_attention"] == "replaced by another_pack.attention"


# The text of c10/cuda/CUDAException.cpp with the trace that TORCH_SHOW_CPP_STACKTRACES adds.
CUDA_ERROR = """CUDA error: no kernel image is available for execution on the device
Search for `cudaErrorNoKernelImageForDevice' in https://docs.nvidia.com/cuda/cuda-runtime-api for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:44 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f1c2b378dd8 in /usr/lib/libc10.so)
"""


def test_of_a_gpu_that_fails_a_line_has_the_error_and_not_the_advice(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError(CUDA_ERROR)

    monkeypatch.setattr(trial, "TRIALS", {"channels": fail})
    trial.refused_kernels.cache_clear()
    report = Report()
    with pretend_cards():
        describe_devices(report)
    trial.refused_kernels.cache_clear()
    said = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    assert faults(report) == {f"fused kernels, {dtype}": f"not channels ({said})" for dtype in ("bfloat16", "float16")}


def test_a_published_file_is_named_and_one_that_was_changed_is_not(tmp_path, monkeypatch):
    file = tmp_path / "text_encoder.safetensors"
    shutil.copy(POSTERS / "text_encoder" / "model.safetensors", file)
    shutil.copy(POSTERS / "text_encoder" / "config.json", tmp_path)
    digest = digest_file(file)
    monkeypatch.setitem(files.PUBLISHED, digest, "a published file")
    monkeypatch.setitem(files.SIZES, file.stat().st_size, "a published file")
    right, changed = Report(), Report()
    check_files(right, [file])
    assert ("SHA-256 of text_encoder.safetensors", "right") in {(line.subject, line.verdict) for line in right.lines}
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    check_files(changed, [file])
    (line,) = (line for line in changed.lines if line.subject == "SHA-256 of text_encoder.safetensors")
    assert "but it has the size of a published file" in line.got and line.verdict == "noted"


@pytest.mark.parametrize("as_folder", [False, True])
def test_loras_of_other_models_are_counted_and_no_fault(tmp_path, as_folder):
    folder = tmp_path / "loras"
    folder.mkdir()
    # kohya's name of a layer of SDXL
    name = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {f"{name}.lora_{end}.weight": torch.ones(4, 4) for end in ("down", "up")}
    for number in range(20):
        save_file(tensors, folder / f"sdxl-{number}.safetensors")
    tensors = load_file(CYANOTYPE)
    save_file(
        {name: torch.cat([item, item], int("lora_A" in name)) for name, item in tensors.items()},
        folder / "wider.safetensors",
    )
    shutil.copy(CYANOTYPE, folder)
    report = Report()
    check_files(report, [TINY / "transformer", *([folder] if as_folder else sorted(folder.iterdir()))])
    assert not report.faults
    lines = {line.subject: line.got for line in report.lines}
    assert lines["LoRAs of other models"] == "20" and not any(name.startswith("sdxl") for name in lines)
    assert lines[CYANOTYPE.name].startswith("a LoRA of SANA, fits custom-")
    assert re.search(r"fits no model here: .* layers fit", lines["wider.safetensors"])


@pytest.mark.parametrize("name", video_models.MODELS)
def test_a_folder_of_sana_video_is_described(tmp_path, name):
    report = Report()
    check_files(report, [video_models.save_folder(name, tmp_path / "video"), CYANOTYPE])
    assert not report.faults
    assert f"a SANA pipeline (video-2B-{name})" in " ".join(line.got for line in report.lines)


def test_without_requirements_txt_the_installed_requirements_are_checked(tmp_path, monkeypatch):
    # `pip install .` leaves this record and no requirements.txt.
    record = tmp_path / "sana_nodes-0.1.0.dist-info"
    record.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: sana-nodes", "Version: 0.1.0", "Requires-Dist: diffusers>=0.30"]
    lines += ["Requires-Dist: numpy>=99.0", 'Requires-Dist: none-such>=1; extra == "cluster"']
    (record / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "HERE", tmp_path)
    report = Report()
    check_versions(report)
    assert faults(report).keys() == {"numpy"}
    assert ("diffusers", "right") in {(line.subject, line.verdict) for line in report.lines}


def test_a_file_that_is_broken_is_a_line_and_the_rest_is_checked(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    report = Report()
    check_files(report, [tmp_path / "broken.safetensors", tmp_path / "missing.safetensors", CYANOTYPE])
    assert faults(report).keys() == {"broken.safetensors", "missing.safetensors"}
    assert str(tmp_path) not in report.markdown()
    assert CYANOTYPE.name in {line.subject for line in report.lines}


def test_odd_files_are_lines_and_pickles_of_other_programs_are_no_faults(tmp_path):
    vae, upscalers = tmp_path / "vae", tmp_path / "upscale_models"
    vae.mkdir()
    upscalers.mkdir()
    # One file is an ESRGAN model. The other has the format of torch before 1.6.
    torch.save({"params": {"conv.weight": torch.ones(3, 3)}}, upscalers / "esrgan.pth")
    torch.save({"conv.weight": torch.ones(3, 3)}, upscalers / "old.pth", _use_new_zipfile_serialization=False)
    os.mkfifo(vae / "pipe.safetensors")
    (vae / "folder.safetensors").mkdir()
    (vae / "loop.safetensors").symlink_to("loop.safetensors")
    (vae / "zero.safetensors").symlink_to("/dev/zero")
    shutil.copy(CYANOTYPE, os.fsdecode(os.fsencode(vae) + b"/caf\xe9\xff.safetensors"))
    model = shutil.copytree(POSTERS, tmp_path / "model")
    (model / "tokenizer" / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer" / "tokenizer.json")
    report = Report()
    check_files(report, [tmp_path])
    assert faults(report).keys() == {"pipe.safetensors", "loop.safetensors", "zero.safetensors"}
    noted = {line.subject: line.got for line in report.lines if line.verdict == "noted"}
    assert all(noted[name].startswith("not read: ") for name in ("esrgan.pth", "old.pth"))
    assert r"caf\udce9\udcff.safetensors" in {line.subject for line in report.lines}
    assert report.markdown().encode() and json.dumps(report.as_json())


def test_in_a_folder_of_thousands_what_there_is_no_time_for_is_one_line(tmp_path):
    for index in range(50):
        save_file({"weight": torch.ones(1)}, tmp_path / f"{index:03}.safetensors")
    report = Report(seconds=0)
    check_files(report, [tmp_path])
    assert [(line.subject, line.verdict) for line in report.lines] == [
        ("000.safetensors and the files after it", "skipped")
    ]


def test_a_broken_bundled_model_hides_no_other_file(tmp_path, monkeypatch):
    (tmp_path / "bundled").mkdir()
    monkeypatch.setattr(files, "BUNDLED", tmp_path / "bundled")
    report = Report()
    check_files(report, [TINY / "transformer", CYANOTYPE])
    assert faults(report).keys() == {"the bundled model"}
    assert CYANOTYPE.name in {line.subject for line in report.lines}
    assert any(line.subject.startswith("SHA-256") for line in report.lines)


def test_links_in_circles_are_looked_at_once_and_a_folder_that_cannot_be_read_is_a_line(tmp_path, monkeypatch):
    models, closed = tmp_path / "models", tmp_path / "models" / "closed"
    (models / "loras").mkdir(parents=True)
    closed.mkdir()
    shutil.copy(CYANOTYPE, models / "loras")
    (models / "again").symlink_to(models)
    (models / "loras" / "above").symlink_to(models)
    (models / "gone.safetensors").symlink_to("nowhere")
    listed = Path.iterdir

    def refuse(folder):
        if folder == closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    report = Report()
    check_files(report, [models])
    assert [line.subject for line in report.lines if line.subject == CYANOTYPE.name] == [CYANOTYPE.name]
    assert faults(report) == {
        "folder 3": "PermissionError: Permission denied: 'folder 3'",
        "gone.safetensors": faults(report)["gone.safetensors"],
    }


def test_no_line_names_a_folder_of_the_user(tmp_path, monkeypatch):
    private = tmp_path / "Private Folder"
    long = private / ("Jane's other folder " * 5).strip()
    model = shutil.copytree(TINY, private / "caf\u00e9 client model")
    broken = shutil.copytree(TINY, private / "Jane's broken model")
    shutil.rmtree(broken / "vae")
    (broken / "vae").mkdir()
    (broken / "vae" / "config.json").write_text("{")
    for folder in (private, long, private / "loras" / "of Jane"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "n.safetensors").write_bytes(b"\xff" * 100)
        shutil.copy(CYANOTYPE, folder / "fits.safetensors")
    (private / "gone.safetensors").symlink_to(private / "nowhere")
    # a broken PEFT adapter in a folder
    (long / "adapter").mkdir()
    (long / "adapter" / "adapter_config.json").write_text("{")
    shutil.copy(CYANOTYPE, long / "adapter" / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)
    reports = [Report(seconds=1000) for _ in range(4)]
    for report, place in zip(reports, (private, Path("Private Folder"), long / "n.safetensors", model), strict=True):
        check_files(report, [place])
        text = report.markdown() + json.dumps(report.as_json(), ensure_ascii=False)
        assert not re.search(r"Private|Jane|caf|client|other folder", text), text
    assert re.search(r"folder \d/n.safetensors: corrupt", faults(reports[2])["n.safetensors"])
    # The names of folders that diffusers chooses stay.
    assert re.search(r"SHA-256 of folder \d/transformer/", reports[0].markdown())


def test_folders_without_a_name_change_no_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for path in (Path("mine"), Path("."), Path("/nowhere")):
        report = Report()
        check_files(report, [path])
        report.note("Files", "quotes", "['a', 'b']: \"c\"")
        assert report.lines[-1].got == "['a', 'b']: \"c\""


def test_a_folder_that_cannot_be_looked_at_has_a_number(monkeypatch):
    def is_dir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert Report().label(Path("/locked/of Jane")) == "folder 1"


def test_walking_folders_stops_when_the_time_is_over(tmp_path):
    """Two links in each of 40 folders lead to the next one: 2^40 paths."""
    folders = [tmp_path / str(number) for number in range(40)]
    for folder, after in zip(folders, [*folders[1:], tmp_path / "last"], strict=True):
        folder.mkdir()
        for name in ("a", "b"):
            (folder / name).symlink_to(after)
    (tmp_path / "last").mkdir()
    save_file({"weight": torch.ones(1)}, tmp_path / "last" / "it.safetensors")
    report = Report(seconds=1000)
    with bounded(5):
        check_files(report, [folders[0]])
    assert [(line.subject, line.got) for line in report.lines] == [("files of other models", "1")]
    # Listing these folders takes longer than the report has.
    report = Report(seconds=0.2)
    for number in range(300):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
    started, listed = time.monotonic(), Path.iterdir

    def slow(folder):
        time.sleep(0.1)
        return listed(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", slow)
        check_files(report, [tmp_path / "many"])
    assert time.monotonic() - started < 5
    (line,) = report.lines
    assert line.verdict == "skipped" and line.subject.endswith(" and the files after it")


@pytest.mark.parametrize("fits", [False, True])
def test_a_lora_of_gigabytes_is_compared_without_reading_it(tmp_path, fits):
    rank, names = 2_000_000, ("lora_A", "lora_B")
    rows, columns = read_header(TINY / "transformer" / WEIGHTS).headers["transformer_blocks.0.attn1.to_q.weight"].shape
    shapes = [(rank, columns), (rows, rank)] if fits else [(rank, 7), (7, rank)]
    entries, end = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        size = 4 * shape[0] * shape[1]
        key = f"transformer.transformer_blocks.0.attn1.to_q.{name}.weight"
        entries[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    file = tmp_path / "sparse.safetensors"
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    report = Report(seconds=1000)
    # Imports take memory too.
    describe_loras(report, [inspect_checkpoint(CYANOTYPE)])
    with bounded(size=5 * 10**7):
        describe_loras(report, [inspect_checkpoint(file), inspect_checkpoint(TINY / "transformer")])
    (line,) = (line for line in report.lines if line.subject == file.name)
    assert line.verdict == "noted"
    expected = "fits " if fits else rf"fits no model here: .*lora_A \[{rank}, 7\]"
    assert re.match(f"a LoRA of SANA, {expected}", line.got)


def test_a_file_in_the_home_folder_does_not_name_its_user(tmp_path, monkeypatch):
    home = tmp_path / "jane doe"
    home.mkdir()
    (home / "broken.safetensors").write_bytes(b"\xff" * 100)
    monkeypatch.setattr(Path, "home", lambda: home)
    report = Report()
    check_files(report, [home / "broken.safetensors"])
    assert faults(report)["broken.safetensors"].startswith("CheckpointError: broken.safetensors: ")
    assert "jane" not in report.markdown()


def test_names_are_no_markdown():
    report = Report()
    report.note("section", "a|b\r\nc", "`d` <b>*e* [f](g) h_i")
    assert r"| a\|b c |  | \`d\` \<b>\*e\* \[f](g) h_i | noted |" in report.markdown()


def test_a_gpu_that_is_gone_is_a_line_and_the_rest_is_checked(monkeypatch):
    def gone(*_):
        raise RuntimeError("CUDA error: device unavailable")

    monkeypatch.setattr(machine, "current_accelerator", gone)
    report = Report(seconds=0)
    examine(report, [CYANOTYPE])
    assert faults(report) == {"devices": "RuntimeError: CUDA error: device unavailable"}
    assert {"torch", f"{CYANOTYPE.name} and the LoRAs after it"} <= {line.subject for line in report.lines}


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_cancelling_ends_it_at_once(calls):
    remaining = iter(range(calls))

    def poll():
        if next(remaining, None) is None:
            raise Cancelled

    report = Report(poll)
    with pytest.raises(Cancelled):
        examine(report)
    assert not report.faults


def test_what_there_is_no_time_for_is_skipped():
    report = Report(seconds=0)
    check_files(report, [POSTERS])
    skipped = {line.subject for line in report.lines if line.verdict == "skipped"}
    assert any(case.startswith("SHA-256") for case in skipped) and not report.faults


@pytest.mark.parametrize(
    "text, expected",
    [
        ("No file /home/jane doe/ComfyUI/models/x.safetensors here", "No file x.safetensors here"),
        (r"C:\Users\Jane\models\x.safetensors: broken", "x.safetensors: broken"),
        (r"'C:\\Users\\Jane\\x.safetensors' or \\server\jane\x.sft", "'x.safetensors' or x.sft"),
        ("cannot open:/mnt/jane/x.safetensors", "cannot open:x.safetensors"),
        ("float32/bfloat16 in 3/4 of 10", "float32/bfloat16 in 3/4 of 10"),
        ("at 10.0.0.7:8188, http://host:80/x?token=y", "at (address), (address)"),
        ("file:///home/jane/x git+ssh://jane@host/x", "(address) (address)"),
        ("fe80::1ff:fe23:4567:890a%eth0: no", "(address): no"),
        (
            "[2001:db8::7]:8188 or 2001:db8:1:2:3:4:5:6, ::1, ::ffff:10.0.0.7",
            "(address) or (address), (address), (address)",
        ),
        ("jane.doe@example.com, jane@desktop: git@host:jane/x.git", "(address), (address): (address)"),
        ("00:1b:44:11:3a:b7", "(address)"),
        ("hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567", "(secret)"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer (secret)"),
        ("bearer abc; HF_TOKEN=abc; 'api_key': 'abc'", "bearer (secret); HF_TOKEN=(secret); 'api_key': '(secret)'"),
        ("/models/x?token=abc&v=1", "x?token=(secret)&v=1"),
        ("no\udcffname", r"no\udcffname"),
    ],
)
def test_no_place_no_address_and_no_secret_is_in_a_report(text, expected):
    report = Report()
    report.note("", text, text)
    assert report.lines[0].got == report.lines[0].subject == expected


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.14.1, compute 9.0 at 12:30:45 on cuda:0",
        "c10::Error in torch::jit, std::dead",
        "hf_transfer 0.1.9, tokens of the instruction: 300, tokenizer.json: broken",
        "dfd991d1b54ffabf22745c5885589d8f2a7bc59930d95d92bd741c4fc64454bb, 1249044836 bytes",
        "float32 / bfloat16, 3 / 4",
    ],
)
def test_what_only_looks_like_a_place_or_a_secret_stays(text):
    assert without_places(text) == text


@pytest.mark.parametrize("home", [Path("/"), Path("/srv/jane"), PureWindowsPath(r"C:\Users\jane"), None])
def test_whatever_the_home_folder_is_no_line_has_it(home, monkeypatch):
    def own():
        if home is None:
            raise RuntimeError("Could not determine home directory.")
        return home

    monkeypatch.setattr(Path, "home", own)
    assert without_places("float32/bfloat16 of transformer/x") == "float32/bfloat16 of transformer/x"
    for place in (home, str(home).replace("\\", "\\\\")) if home and home.name else ():
        assert without_places(f"'{place}' is closed") == "'~' is closed"


@pytest.mark.parametrize("name", ["there.json", "folder", "none/report.json", "x" * 300])
def test_a_report_that_cannot_be_written_is_said_before_anything_is_checked(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("sana_core.doctor.examine", None)
    assert main(["doctor", "--json", str(tmp_path / name)]) == 1
    out, said = capsys.readouterr()
    assert (
        not out and re.fullmatch(r"json: .*; choose another name(, or remove it)?\n", said) and "overwrite" not in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "there.json"]
    assert (tmp_path / "there.json").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
@pytest.mark.parametrize("words", [("doctor", "--seconds", "0"), ("plan", "1.6B")], ids=" ".join)
def test_a_full_disk_behind_the_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        completed = command(*words, before=lambda: os.dup2(full.fileno(), 1))
        _, said = completed.communicate()
    (said,) = (line for line in said.splitlines() if not line.startswith("checking "))
    assert completed.returncode == 1 and "No space left on device" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_full_disk_behind_what_it_says_on_its_way_spoils_no_check():
    with open("/dev/full", "w") as full:
        words = ("doctor", "--seconds", "0")
        completed = command(*words, before=lambda: os.dup2(full.fileno(), 2))
        said, _ = completed.communicate()
    assert completed.returncode == 0 and "OSError" not in said and " 0 with a fault" in said


@pytest.mark.slow
def test_an_installed_pack_finds_its_requirements(tmp_path):
    """`pip install .` copies no requirements.txt. Its lines are in the metadata, where the extras are too."""
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "sana_core", source / "sana_core", ignore=shutil.ignore_patterns("__pycache__"))
    install = ["pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--target", target, source]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    words = [sys.executable, "-m", "sana_core", "doctor", "--seconds", "0"]
    report = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert report.returncode == 0 and "FAILED" not in report.stdout, report.stdout
    assert "| diffusers | >=" in report.stdout and "| torchao | >=" not in report.stdout
