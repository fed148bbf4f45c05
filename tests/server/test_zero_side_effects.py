"""What an audit hook saw in the server while all tests of this folder ran; by its name, this file comes last."""

import json
import os
import subprocess
import sys

import pytest
from host import run_graph
from setup import ROOT

PROGRAM = {
    "environment __getitem__": "import os; os.getenv('HOME')",
    "environment __setitem__": "import os; os.environ['SOMETHING'] = '1'",
    "environment __iter__": "import os; dict(os.environ)",
    "socket.connect": "import socket; socket.socket().connect_ex(('127.0.0.1', 1))",
    "socket.bind": "import socket; socket.create_server(('127.0.0.1', 0)).close()",
    "socket.getaddrinfo": "import urllib.request as u\ntry: u.urlopen('http://127.0.0.1:1')\nexcept OSError: pass",
    "subprocess.Popen": "import subprocess; subprocess.run(['true'])",
    "os.system": "import os; os.system('true')",
    "os.fork": "import os; os.fork() or os._exit(0)",
    "write": "import pathlib; pathlib.Path('elsewhere/file').write_text('x')",
    "os.rename": "import os; os.rename('elsewhere/a', 'elsewhere/b')",
    "os.remove": "import pathlib; pathlib.Path('elsewhere/a').unlink()",
    "os.mkdir": "import pathlib; pathlib.Path('elsewhere/folder').mkdir()",
}
BENIGN = "import pathlib, sys; pathlib.Path('outputs/file').write_text('x'); pathlib.Path('elsewhere/a').read_text()"


def entries(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def audited(tmp_path, source):
    """What the hook notes of a program whose `nodes` has that source."""
    for folder in ("nodes", "elsewhere", "outputs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "elsewhere" / "a").write_text("a")
    (tmp_path / "nodes" / "__init__.py").write_text(source)
    log = tmp_path / "log"
    folder = str(ROOT / "tests" / "server" / "audited")
    options = {"PYTHONPATH": folder, "AUDIT_LOG": str(log), "AUDIT_ROOT": str(tmp_path), "AUDIT_WRITABLE": "outputs"}
    subprocess.run([sys.executable, "-c", "import nodes"], cwd=tmp_path, env={**os.environ, **options}, check=True)
    return entries(log)


@pytest.mark.parametrize("event", PROGRAM)
def test_the_hook_sees_it(tmp_path, event):
    first, *_ = [entry for entry in audited(tmp_path, PROGRAM[event]) if entry["event"] == event]
    assert first["by"].startswith("nodes/__init__.py:") and not first["library"]


def test_the_hook_notes_nothing_of_what_is_allowed(tmp_path):
    assert audited(tmp_path, BENIGN) == []


def test_nothing_of_the_pack_opened_a_socket_or_process_read_the_environment_or_wrote_elsewhere(
    server, audit_log, demo
):
    list(run_graph(server, demo))
    result = entries(audit_log)
    # it is our frames that the hook sees
    assert any(entry["event"] == "read" and entry["by"].startswith("sana_core/checkpoints/") for entry in result)
    seen = [entry for entry in result if entry["event"] != "read"]
    assert [entry for entry in seen if not entry["library"]] == []
    # Libraries read the environment when they are imported. A worker's process imports torch, which looks for CUDA's
    # libraries with ldconfig.
    not_reading = [entry for entry in seen if entry["event"] not in ("environment __getitem__", "environment __iter__")]
    assert {(entry["event"], entry["what"]) for entry in not_reading} <= {("subprocess.Popen", "('/sbin/ldconfig',)")}
