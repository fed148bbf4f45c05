"""Copy the lines of the log of `train` to TensorBoard files or to Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoints.files import brief
from ..checkpoints.fingerprint import digest_json
from ..errors import InputError, VersionError
from ..runtime.atomic_files import make_folder
from ..training.run_log import Line
from ..training.runs import stranger, writing

WriteLine = Callable[[Line], None]
BOARD = "tensorboard"
SCALARS = ("loss", "learning_rate", "grad_norm", "validation_loss")


@contextmanager
def tensorboard_writer(out: Path) -> Iterator[WriteLine]:
    """Give a function that writes a line of the log into a new file in `out`/tensorboard.

    Raises VersionError without tensorboard, ExistingFileError for a file in the folder's place, and OutputError.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise VersionError(f"tensorboard: cannot be imported ({error!s:.80}); pip install tensorboard") from None
    folder = out / BOARD
    if folder.exists() and not folder.is_dir():
        raise stranger(folder)
    # torch's SummaryWriter would put the machine's name and the process id into the file's name.
    file = folder / f"events.out.tfevents.{time.time_ns()}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = file.open("xb", buffering=0)
    with stream:
        records = RecordWriter(stream)

        def write(line: Line) -> None:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in line.items() if name in SCALARS]
            event = Event(wall_time=time.time(), step=line["step"], summary=Summary(value=values))
            with writing(file):
                records.write(event.SerializeToString())

        with writing(file):
            records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        yield write


@contextmanager
def wandb_writer(out: Path, name: str) -> Iterator[WriteLine]:
    """Give a function that sends a line of the log to Weights & Biases, always to the same run for the folder `out`.

    Raises VersionError without wandb or for one that is too old, and InputError where it cannot start.
    """
    try:
        import wandb
    except ImportError as error:
        raise VersionError(f"wandb: cannot be imported ({error!s:.80}); pip install wandb") from None
    make_folder(out)
    # Everybody who sees the run sees its id. With the inode in it, nobody can check whether a guessed path is right.
    run_id = digest_json([str(out.absolute()), out.stat().st_ino])[:16]
    try:
        settings = log_only_settings()
    except (TypeError, ValueError) as error:
        raise VersionError(
            f"wandb: version {wandb.__version__} has no settings to send only the log ({brief(error)}); "
            "pip install -U wandb"
        ) from None
    try:
        # Without `dir`, wandb's files, which contain paths, are in ./wandb and not in the run's folder.
        run = wandb.init(project="sana", name=name, id=run_id, resume="allow", settings=settings)
    except wandb.Error as error:
        raise InputError(
            f"wandb: cannot start ({brief(error)}); run wandb login, set WANDB_MODE=offline, or leave out --wandb"
        ) from None
    with run:
        yield lambda line: run.log(dict(line), line["step"])


def log_only_settings() -> object:
    """Settings that switch off all that wandb collects by itself. Old versions raise TypeError or ValueError."""
    import wandb

    return wandb.Settings(
        host="",
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
