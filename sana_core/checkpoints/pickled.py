"""NVIDIA's .pth: torch's zip of a pickle and storages, looked through before torch unpickles it.

torch's safe unpickler executes nothing of the file, but believes what it says of sizes: a member that inflates to a
thousand times its size, a tensor rebuilt larger than its storage. So the archive may only hold what torch.save writes
of a state_dict.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch

from ..errors import CheckpointError
from .files import REDOWNLOAD, START, brief, check_start, opened, shown

LARGEST_PICKLE = 16_000_000
# of the pickle; a tensor takes about 25
MOST_OPERATIONS = 1_000_000
MOST_MEMBERS = 100_000
# the last bytes of an archive without a comment: a signature and 18 bytes more
ARCHIVE_END = b"PK\5\6"
ARCHIVE_END_SIZE = 22
# what the pickle of a state_dict names, besides the storages and dtypes of torch
NAMED = {
    "collections OrderedDict",
    "torch Size",
    "torch device",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
}
INSTEAD = "use the .safetensors file of the diffusers repository"


def read_pickled(file: Path, mapped: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of NVIDIA's .pth, without executing anything that is in the file.

    They are mapped into memory, or in memory of their own.

    Raises CheckpointError where the archive holds anything but a state_dict, or where torch is older than 2.6, whose
    safe unpickler was not; MissingFileError for a file that is gone, ReadError where the disk refuses.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise CheckpointError(
            f"{shown(file)}: got torch {torch.__version__}, expected 2.6 or newer for .pth; use .safetensors"
        )
    size = check_archive(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds for what is no checkpoint
        reason = brief((str(error) or type(error).__name__).splitlines()[0], 100)
        raise CheckpointError(
            f"{shown(file)}: torch cannot read it safely ({reason}); {REDOWNLOAD}, or {INSTEAD}"
        ) from None
    tensors = content.get("state_dict", content) if isinstance(content, dict) else {}
    tensors = tensors if isinstance(tensors, dict) else {}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError(
            f"{shown(file)}: got a pickle without weights, expected a state_dict of tensors; use another file"
        )
    check_sizes(file, tensors, size)
    return tensors


def check_archive(file: Path) -> int:
    """Return the bytes of a .pth. Raises CheckpointError unless it is a zip of stored members and a plain pickle."""
    with opened(file) as (stream, size):
        check_start(file, stream.read(START))
        # The archive has to end with its table, so that torch's reader cannot find another one than zipfile does.
        stream.seek(max(size - ARCHIVE_END_SIZE, 0))
        if not stream.read(len(ARCHIVE_END)) == ARCHIVE_END:
            raise CheckpointError(
                f"{shown(file)}: corrupt, incomplete, or saved by a torch before 1.6: got no zip archive of "
                f"{size} bytes; {REDOWNLOAD}, or {INSTEAD}"
            )
        try:
            with ZipFile(stream) as archive:
                members = archive.infolist()
                pickles = [member for member in members if member.filename.endswith("data.pkl")]
                packed = any(m.compress_type != ZIP_STORED or m.compress_size != m.file_size for m in members)
                if packed or len(members) > MOST_MEMBERS or sum(m.file_size for m in members) > size:
                    raise CheckpointError(
                        f"{shown(file)}: got an archive that is compressed, or larger inside than outside, which "
                        f"torch never saves; {INSTEAD}"
                    )
                if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE or members[0].header_offset:
                    raise CheckpointError(f"{shown(file)}: got an archive that torch has not saved; {REDOWNLOAD}")
                check_pickle(file, archive.read(pickles[0]))
        except (BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{shown(file)}: corrupt or incomplete, got {size} bytes ({brief(error)}); {REDOWNLOAD}"
            ) from None
    return size


def check_pickle(file: Path, content: bytes) -> None:
    """Raise CheckpointError for a pickle that names anything but what a state_dict is made of; nothing is unpickled."""
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name == "GLOBAL" and argument not in NAMED and not is_torch_type(str(argument)):
            raise CheckpointError(
                f"{shown(file)}: got a pickle that calls {brief(argument)}, expected nothing but tensors; {INSTEAD}"
            )
        if number > MOST_OPERATIONS or operation.name in ("EMPTY_SET", "FROZENSET", "STACK_GLOBAL", "EXT4"):
            raise CheckpointError(f"{shown(file)}: got a pickle that is no state_dict's; {INSTEAD}")


def is_torch_type(name: str) -> bool:
    """Whether a pickle's global, "module name", is one of torch's storages or dtypes."""
    module, _, attribute = name.partition(" ")
    return module == "torch" and (
        attribute.endswith("Storage") or isinstance(getattr(torch, attribute, None), torch.dtype)
    )


def check_sizes(file: Path, tensors: dict[str, torch.Tensor], size: int) -> None:
    """Raise CheckpointError for tensors that share or repeat their storage, and so are more than the file."""
    odd = [name for name, tensor in tensors.items() if not isinstance(name, str) or not is_plain_tensor(tensor)]
    if odd:
        raise CheckpointError(
            f"{shown(file)}: got a tensor {brief(odd[0])} that is no plain one of bytes in the file; {INSTEAD}"
        )
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total > size:
        raise CheckpointError(
            f"{shown(file)}: got tensors of {total} bytes in a file of {size}, expected each to have its own; {INSTEAD}"
        )


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
    )
