"""Wrong paths of every kind, and a context in which permissions count for root too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys

import pytest

CAPABILITY_VERSION, PASSES_OVER_PERMISSIONS = 0x20080522, 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


class CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class Capabilities(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


@contextlib.contextmanager
def permissions_count():
    """Let the permissions of files count for this thread even where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root reads and writes files without permission, except on Linux with fewer capabilities")
    library = ctypes.CDLL(None, use_errno=True)
    header, capabilities = CapabilityHeader(CAPABILITY_VERSION, 0), (Capabilities * 2)()
    assert library.capget(ctypes.byref(header), capabilities) == 0
    before = capabilities[0].effective
    capabilities[0].effective &= ~PASSES_OVER_PERMISSIONS
    assert library.capset(ctypes.byref(header), capabilities) == 0
    try:
        yield
    finally:
        capabilities[0].effective = before
        assert library.capset(ctypes.byref(header), capabilities) == 0


def folder(path):
    path.mkdir()


def full_folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("of somebody")


def text(path):
    path.write_text("no such content was expected here")


def empty(path):
    path.touch()


def pipe(path):
    os.mkfifo(path)


def unix_socket(path):
    # A socket's path may only be short.
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(before)


def device(path):
    path.symlink_to("/dev/full")


def endless(path):
    path.symlink_to("/dev/zero")


def loop(path):
    path.symlink_to(path.name)


def link_to_nowhere(path):
    path.symlink_to("nowhere/at/all")


def closed_file(path):
    path.write_text("a file without permission")
    path.chmod(0)


def closed_folder(path):
    path.mkdir()
    path.chmod(0)


def read_only_folder(path):
    path.mkdir()
    path.chmod(0o555)


# {kind: function that creates it at the path before the command runs}
MADE = {
    "missing": lambda path: None,
    "a folder": folder,
    "a folder with files": full_folder,
    "a text": text,
    "empty": empty,
    "a pipe": pipe,
    "a socket": unix_socket,
    "a full device": device,
    "an endless device": endless,
    "a loop": loop,
    "a link to nowhere": link_to_nowhere,
    "unreadable": closed_file,
    "a closed folder": closed_folder,
    "an unwritable folder": read_only_folder,
}
# {kind: (function that creates the path's parent, the path on the command line)}
PLACES = {
    "below a file": (text, "{}/inner{suffix}"),
    "below a loop": (loop, "{}/inner{suffix}"),
    "in a closed folder": (closed_folder, "{}/inner{suffix}"),
    "in an unwritable folder": (read_only_folder, "{}/inner{suffix}"),
    "in a missing folder": (lambda path: None, "{}/inner{suffix}"),
    "a folder's name as a file's": (text, "{}/"),
    "too long": (lambda path: None, "{}" + 300 * "x" + "{suffix}"),
    "much too long": (lambda path: None, 5000 * "x" + "{}{suffix}"),
    "the null device": (lambda path: None, "/dev/null"),
    "nothing": (lambda path: None, ""),
}
KINDS = (*MADE, *PLACES)


def make_wrong(kind, parent, suffix):
    """Make a path of this kind in the folder `parent`. Returns the path as a user enters it, relative to `parent`."""
    if kind in MADE:
        MADE[kind](parent / f"wrong{suffix}")
        return f"wrong{suffix}"
    make, name = PLACES[kind]
    make(parent / "wrong")
    return name.replace("{suffix}", suffix).format("wrong")
