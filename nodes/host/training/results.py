"""Results of training on the canvas, copied to where ComfyUI's loaders list them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path

import folder_paths

from ....sana_core.errors import OutputError
from ....sana_core.runtime.atomic_files import digest_file, output_file, reason_of
from ....sana_core.training.settings import TrainingSettings
from ....sana_core.training.states import read_run


def list_result(files: Mapping[str, Path], settings: TrainingSettings, kind: str) -> str:
    """Copy the result of a training to output/`kind`. Returns a sentence with its name in the loaders' lists.

    `files` are {end of the name there: file}, the weights first. A copy replaces only an earlier result of the same
    training. If the name is taken in any of ComfyUI's folders of that kind, the copy gets a number. Raises OutputError.
    """
    folder = Path(folder_paths.get_output_directory()) / kind
    published = read_run(Path(settings.out))[1]
    weights = next(iter(files))
    names = (settings.name if number == 1 else f"{settings.name}-{number}" for number in count(1))
    name = next(name for name in names if is_free(kind, folder, name, files, published))
    # The weights come last: with them, the loaders list all of it.
    for end, file in reversed(files.items()):
        copy = folder / f"{name}{end}"
        if not copy.exists() or digest_file(copy) != digest_file(file):
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"name: {copy.parent} cannot be made ({reason_of(error)}); see its rights and its disk, then Run "
                    f"again, which trains nothing; the result is {file}"
                ) from None
            with output_file(copy, replace=True, field="name") as part:
                shutil.copyfile(file, part)
    note = "" if name == settings.name else f"; {settings.name}{weights} is another file, which stays"
    return f"press R, then choose {name}{weights}{note}"


def is_free(kind: str, folder: Path, name: str, ends: Collection[str], published: Collection[str]) -> bool:
    """Whether the result may be called `name`: no other file has that name, and no other folder's file hides it."""
    copies = [folder / f"{name}{end}" for end in ends]
    listed = folder_paths.get_full_path(kind, f"{name}{next(iter(ends))}")
    if listed is not None and not (copies[0].exists() and copies[0].samefile(listed)):
        return False
    existing = [copy for copy in copies if copy.exists()]
    return all(copy.is_file() and digest_file(copy) in published for copy in existing)
