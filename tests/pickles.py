"""Pickles for .pth files, written operation by operation, and what becomes of a file of one."""

import resource
import sys
import zipfile

from bounded import SECONDS, bounded
from forked import Forked

import sana_core
from sana_core import CheckpointError
from sana_core.checkpoints.pickled import read_pickled


def pth(file, content, packing=zipfile.ZIP_STORED, **members):
    """Write an archive like torch's, of a pickle's bytes."""
    with zipfile.ZipFile(file, "w", packing) as archive:
        archive.writestr("archive/data.pkl", content)
        for name, data in {"byteorder": b"little", "version": b"3\n", **members}.items():
            archive.writestr(f"archive/{name}", data)
    return file


def outcome(file):
    """Read a .pth in another process: return the line of its CheckpointError, or nothing.

    A crash, another exception, more than 10 s and more than 1 GB fail.
    """

    def work():
        # A signal handler waits for the end of a hash or a repr.
        resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
        with bounded():
            try:
                for mapped in (True, False):
                    for tensor in read_pickled(file, mapped).values():
                        assert tensor.numel() > 1000 or tensor.sum() is not None
                sana_core.inspect_checkpoint(file)
            except CheckpointError as error:
                sys.stdout.write(f"{error}\n")

    process = Forked(work)
    line, errors = process.communicate()
    assert process.returncode == 0, errors or process.returncode
    assert line.count("\n") <= 1 and line.isascii() and len(line) < 300, line
    return line


def text(value):
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def whole(value):
    size = value.bit_length() // 8 + 1
    return b"\x8b" + size.to_bytes(4, "little") + value.to_bytes(size, "little", signed=True)


def named(name):
    return b"c%b\n" % name.replace(" ", "\n").encode()


FLOATS, KEY, PLACE, LABEL = named("torch FloatStorage"), text("0"), text("cpu"), text("storage")


def storage(kind=FLOATS, key=KEY, place=PLACE, count=b"K\x10", label=LABEL):
    return b"(" + label + kind + key + place + count + b"tQ"


STORAGE, SHAPE, STRIDE = storage(), b"K\2K\2\x86", b"K\2K\1\x86"


def tensor(values=STORAGE, offset=b"K\0", shape=SHAPE, stride=STRIDE, more=b"\x89"):
    return named("torch._utils _rebuild_tensor_v2") + b"(" + values + offset + shape + stride + more + b"}tR"


NAME = text("a")


def entry(value, name=NAME):
    """A pickle of a dict of one entry."""
    return b"\x80\x02}" + name + value + b"s."


def doubled(value, times, again=b"q\1h\1"):
    """A tuple of a tuple of ... of `value`, each twice in the next."""
    return value + (again + b"\x86") * times
