"""SANA Doctor in ComfyUI: the server's own facts beside the machine's, files of the models folders, and Interrupt."""

import json

import pytest
from fake_cuda import pack
from safetensors.torch import load_file
from setup import ROOT

CAUGHT = {
    "catch report": ("Catch", {"value": ["doctor", 0], "name": "report"}),
    "catch json": ("Catch", {"value": ["doctor", 1], "name": "json"}),
}
GRAPH = {"doctor": ("SanaNodesDoctor", {"files": True}), **CAUGHT}


@pytest.fixture
def lines(host):
    """A function that runs SANA Doctor; it returns {what: line} and the Markdown."""

    def examine():
        result = host.run(GRAPH)
        return {line["subject"]: line for line in json.loads(result["json"])["lines"]}, result["report"]

    return examine


def test_the_report_has_the_server_its_files_and_what_a_pack_has_replaced(host, install, lines, monkeypatch):
    install("loras", "mine.safetensors", load_file(ROOT / "demo" / "sana-posters-cyanotype.safetensors"))
    broken = host.models / "vae" / "broken.safetensors"
    broken.parent.mkdir(exist_ok=True)
    broken.write_bytes(b"\xff" * 100)

    import comfy.samplers

    def calc(*arguments):
        raise AssertionError

    calc.__module__ = "another_pack"
    monkeypatch.setattr(comfy.samplers, "sampling_function", calc)
    try:
        report, markdown = lines()
    finally:
        broken.unlink()
    assert report["version"]["got"] and report["memory"]["got"] and "packs" in report
    assert report["comfy.samplers.sampling_function"]["got"] == "replaced by another_pack"
    assert "fits custom-" in report["mine.safetensors"]["got"]
    assert [name for name, line in report.items() if line["verdict"] in ("WRONG", "FAILED")] == ["broken.safetensors"]
    assert markdown.startswith("### SANA Doctor") and str(ROOT) not in markdown and str(host.models) not in markdown


def test_it_checks_again_only_after_a_change_or_if_asked(host, install, monkeypatch):
    runs = []
    monkeypatch.setattr(
        pack("nodes.host.computer"), "examine_host", lambda files: (str(len(runs)), "", runs.append(1) or "")
    )
    for files in (False, True):
        host.run({"doctor": ("SanaNodesDoctor", {"files": files})}, keep_cache=files)
        host.run({"doctor": ("SanaNodesDoctor", {"files": files})}, keep_cache=True)
    assert len(runs) == 2
    install("loras", "new.safetensors", load_file(ROOT / "demo" / "sana-posters-cyanotype.safetensors"))
    host.run({"doctor": ("SanaNodesDoctor", {"files": True})}, keep_cache=True)
    assert len(runs) == 3
    for count in (4, 5):
        host.run({"doctor": ("SanaNodesDoctor", {"files": True, "always": True})}, keep_cache=True)
        assert len(runs) == count


def test_interrupt_ends_it_before_the_next_operation(host, monkeypatch):
    messages = []

    def interrupt(text, node, sid=None):
        messages.append(text)
        if "versions" in text:
            host.nodes.interrupt_processing()

    monkeypatch.setattr(host.server, "send_progress_text", interrupt)
    with pytest.raises(InterruptedError):
        host.run(GRAPH)
    assert "versions" in messages[-1]
