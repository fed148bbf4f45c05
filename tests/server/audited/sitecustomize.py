"""Audit hook that records the actions of the pack. Python imports it if this folder is on PYTHONPATH.

AUDIT_LOG receives one JSON object per line: the event, its subject, the file and line of the pack that caused it, and
whether a library was between. AUDIT_ROOT is the checkout. AUDIT_WRITABLE lists the folders, joined as in PATH, in which
writing is not recorded.
"""

import json
import os
import sys
import sysconfig
from functools import cache

LOG = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
ROOT = os.path.realpath(os.environ["AUDIT_ROOT"])
OURS = tuple(os.path.join(ROOT, name) for name in ("nodes" + os.sep, "sana_core" + os.sep, "__init__.py"))
WRITABLE = tuple(os.path.realpath(folder) + os.sep for folder in os.environ["AUDIT_WRITABLE"].split(os.pathsep))
STANDARD = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
PACKAGES = ("site-packages", "dist-packages")
SOCKETS = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"}
PROCESSES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"}
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@cache
def place(file):
    """Return whose a frame's file is: ours, standard, or a library's."""
    if file.startswith("<") or file == __file__:
        return "standard"
    path = os.path.realpath(file)
    if path.startswith(OURS):
        return "ours"
    return "standard" if path.startswith(STANDARD) and not any(name in path for name in PACKAGES) else "library"


def note(event, what, frame):
    """Write the event down if a frame of ours is among its callers."""
    library = False
    while frame is not None:
        owner = place(frame.f_code.co_filename)
        if owner == "ours":
            entry = {"event": event, "what": str(what)[:200], "library": library}
            entry["by"] = f"{os.path.relpath(os.path.realpath(frame.f_code.co_filename), ROOT)}:{frame.f_lineno}"
            os.write(LOG, (json.dumps(entry) + "\n").encode())
            return
        library = library or owner == "library"
        frame = frame.f_back


def is_elsewhere(path):
    """Whether to write `path` is to write outside the host's folders; a descriptor was open before."""
    if isinstance(path, int):
        return False
    path = os.path.realpath(os.fsdecode(path))
    # Python writes the bytecode of imported modules there.
    return not path.startswith(WRITABLE) and "__pycache__" not in path and path != os.devnull


def hook(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if not flags & WRITING:
            if str(path).endswith(".safetensors"):
                note("read", path, sys._getframe(1))
        elif is_elsewhere(path):
            note("write", path, sys._getframe(1))
    elif event in CHANGES:
        if is_elsewhere(arguments[0]):
            note(event, arguments[0], sys._getframe(1))
    elif event in SOCKETS or event in PROCESSES:
        note(event, arguments[1:] if event in SOCKETS else arguments[:1], sys._getframe(1))


def watched(name):
    """Put a method in the place of os.environ's that notes the variable first."""
    original = getattr(os._Environ, name)

    def method(self, *arguments):
        note(f"environment {name}", arguments[0] if arguments else "all", sys._getframe(1))
        return original(self, *arguments)

    setattr(os._Environ, name, method)


for name in ("__getitem__", "__setitem__", "__delitem__", "__iter__"):
    watched(name)
sys.addaudithook(hook)
