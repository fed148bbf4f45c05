"""Copy the lines of the log of `train` to TensorBoard files or to Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..checkpoints.fingerprint import digest_json
from ..errors import VersionError, first_line
from ..runtime.atomic_files import make_folder
from ..runtime.text import brief, get_logger
from ..training.states import Line

logger = get_logger(__name__)

WriteLine = Callable[[Line], None]
BOARD = "tensorboard"
SCALARS = ("loss", "learning_rate", "grad_norm", "validation_loss")


@contextmanager
def tensorboard_writer(out: Path) -> Iterator[WriteLine]:
    """Yield a function that writes a line of the log into a new file in `out`/tensorboard.

    The file is created for the first line, because a training that is refused must leave nothing behind. Raises
    VersionError without tensorboard.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise VersionError(f"tensorboard: cannot be imported ({error!s:.80}); pip install tensorboard") from None
    folder = out / BOARD
    records: RecordWriter | None = None
    with ExitStack() as stack:

        def write(line: Line) -> None:
            nonlocal records
            if records is None:
                folder.mkdir(parents=True, exist_ok=True)
                # torch's SummaryWriter would put the machine's name and the process id into the file's name.
                file = folder / f"events.out.tfevents.{time.time_ns()}"
                records = RecordWriter(stack.enter_context(file.open("xb", buffering=0)))
                records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            values = [Summary.Value(tag=name, simple_value=value) for name, value in line.items() if name in SCALARS]
            event = Event(wall_time=time.time(), step=line["step"], summary=Summary(value=values))
            records.write(event.SerializeToString())

        yield optional("tensorboard", write)


@contextmanager
def wandb_writer(out: Path, name: str) -> Iterator[WriteLine]:
    """Yield a function that sends a line of the log to Weights & Biases, always to the same run for the folder `out`.

    Raises VersionError without wandb or for one that is too old, and OutputError where `out` cannot be written.
    """
    try:
        import wandb
    except ImportError as error:
        raise VersionError(f"wandb: cannot be imported ({error!s:.80}); pip install wandb") from None
    make_folder(out)
    # Everyone who sees the run sees its id. Because it contains the inode, nobody can verify a guessed path with it.
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
    except Exception as error:  # errors of wandb, of the network, and of a folder that cannot be written
        warn("wandb", error, "run wandb login, or set WANDB_MODE=offline")
        yield lambda line: None
        return
    exit_code = 1
    try:
        yield optional("wandb", lambda line: run.log(dict(line), line["step"]))
        exit_code = 0
    finally:
        try:
            run.finish(exit_code)
        except Exception as error:
            warn("wandb", error, "see its log in ./wandb")


def optional(name: str, write: WriteLine) -> WriteLine:
    """Return `write` for a dashboard on which the training does not depend: after a failure it warns and then stops."""
    has_failed = False

    def write_or_warn(line: Line) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            write(line)
        # wandb's process may have ended, which is a BrokenPipeError, and a disk may be full.
        except Exception as error:
            has_failed = True
            warn(name, error, "see the disk and the network")

    return write_or_warn


def warn(name: str, error: Exception, remedy: str) -> None:
    """Warn in one line that a dashboard receives no more lines."""
    logger.warning(
        "%s: it receives no more lines (%s); the training continues, and log.jsonl contains all lines; %s",
        *(name, brief(first_line(error), 200), remedy),
    )


def log_only_settings() -> object:
    """Settings that switch off all data that wandb collects by itself. Old versions raise TypeError or ValueError."""
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
