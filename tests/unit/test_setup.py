"""Which ComfyUI the scripts and the tests use."""

import pytest
import setup


@pytest.mark.parametrize("has_main", [True, False])
def test_a_given_comfyui_is_used_if_it_is_one(monkeypatch, tmp_path, has_main):
    if has_main:
        (tmp_path / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    assert setup.comfyui_path() == (tmp_path if has_main else setup.CACHE / "ComfyUI")


def test_the_pinned_comfyui_is_the_default(monkeypatch):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert setup.comfyui_path() == setup.CACHE / "ComfyUI"
