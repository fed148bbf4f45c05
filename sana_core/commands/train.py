"""Train a LoRA, DoRA, LoKr or all weights with the settings of a TOML file. Ctrl+C saves. The same command resumes.

--plan only predicts memory, and names settings that fit. If torchrun or accelerate launch starts several
processes, they train one model, with the settings in [parallel].
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import InputError, VersionError, first_line
from ..runtime.text import brief, get_logger, write_lines
from .options import path_of, progress_line

if TYPE_CHECKING:
    from ..training.ranks import Ranks
    from ..training.settings import TrainingSettings
    from ..training.states import Line

logger = get_logger(__name__)
# Signals that save and end a run: Ctrl+C, the end of a service or job, a closed terminal, and Slurm's --signal. Windows
# has only the first two.
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
# Seconds in which signals are one wish to stop.
ONE_PRESS = 3.0
# Called with each line of the log.
WriteLine = Callable[["Line"], None]
# What tensorboard shows.
SCALARS = ("loss", "learning_rate", "grad_norm", "validation_loss")
EXAMPLE = """example:
  python -m sana_core train recipes/lora_bundled.toml
  python -m sana_core train recipes/lora_bundled.toml --plan --card 8
  python -m sana_core train recipes/full_1024.toml --plan --card 24 --cards 4
  torchrun --nproc-per-node 4 -m sana_core train recipes/full_1024.toml"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "settings", type=path_of, help="a TOML file; recipes/ has examples, the end of this help lists its keys"
    )
    parser.add_argument("--wandb", action="store_true", help="also log to Weights & Biases, as its project sana")
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write what tensorboard shows into the run's folder"
    )
    parser.add_argument("--plan", action="store_true", help="predict memory, train nothing")
    parser.add_argument("--card", type=float, metavar="GB", help="with --plan: a GPU to fit; without it this machine's")
    parser.add_argument("--cards", type=int, default=1, metavar="N", help="with --plan: how many train together")
    format_options = parser.format_help

    def format_help() -> str:
        # The settings import torch, which takes long. Only the help needs their description.
        from ..training.settings import describe_settings

        return f"{format_options()}\nkeys of the TOML file, with their defaults:\n\n{describe_settings()}\n"

    parser.format_help = format_help  # type: ignore[method-assign]


def run(arguments: argparse.Namespace) -> None:
    from ..training.ranks import joined
    from ..training.settings import read_settings

    planned = arguments.plan or arguments.card is not None
    for name in ("wandb", "tensorboard"):
        if planned and getattr(arguments, name):
            raise InputError(f"{name}: got it with plan, which trains nothing; leave one of them out")
    if not planned and arguments.cards != 1:
        raise InputError("cards: it is for a plan; add --plan, or leave it out")
    settings = read_settings(arguments.settings)
    if planned:
        with progress_line() as show:
            lines = plan_lines(settings, arguments.card, arguments.cards, lambda text: show(f"{text:<70}"))
        write_lines(*lines)
        return
    with joined(settings.device) as ranks:
        run_training(settings, ranks, arguments.tensorboard and ranks.first, arguments.wandb and ranks.first)


def run_training(settings: TrainingSettings, ranks: Ranks, tensorboard: bool, wandb: bool) -> None:
    """Train as one of `ranks`. The first rank shows the progress."""
    from ..training.sharding import check_launch
    from ..training.states import Eta, describe_validation
    from ..training.trainer import ignore, train

    # The prediction needs a number of ranks that the replicas divide.
    check_launch(settings, ranks)
    fitted = ranks.run_on_rank0(lambda: fit_memory(settings, ranks.size))
    # Paths may differ between machines, so only this setting is broadcast.
    checkpointing = ranks.broadcast(fitted is None or fitted.checkpoint_gradients)
    settings = replace(settings, checkpoint_gradients=checkpointing)
    eta, out = Eta(), Path(settings.out)

    def report(line: Line) -> None:
        for write in writers:
            write(line)
        if "validation_loss" in line:
            write_progress(f"{describe_validation(line)}\n")
            return
        write_progress(f"{eta.describe(line)} ")

    def progress(what: str, done: int, total: int) -> None:
        write_progress(f"{what}: {done} of {total} " + ("\n" if done == total else ""))

    def write_progress(text: str) -> None:
        # A closed terminal does not end a run that ignores SIGHUP. A write to a closed stderr raises ValueError.
        with suppress(OSError, ValueError):
            show(text)

    with ExitStack() as stack:
        writers = [stack.enter_context(tensorboard_writer(out))] if tensorboard else []
        writers += [stack.enter_context(wandb_writer(out, settings.name))] if wandb else []
        poll = stack.enter_context(stopping())
        show = stack.enter_context(progress_line())
        path = train(settings, report, progress if ranks.first else ignore, poll, ranks=ranks)
    if ranks.first:
        # Without the .. of a path that is relative to the settings file.
        write_lines(path.resolve())


def plan_lines(
    settings: TrainingSettings, card: float | None, cards: int = 1, report: Callable[[str], None] | None = None
) -> list[str]:
    """Return the table of a run's stages, and whether they fit each of `cards` GPUs of `card` GiB.

    Without `card`, the GPU is this machine's. `report` receives the name of each case that is counted. If the model's
    files do not exist and its name is the name of a released model, the plan is for that model.
    """
    from ..checkpoints.files import readable
    from ..model.known_models import released_variant
    from ..runtime.accelerator import chosen_device, current_accelerator, memory_info
    from ..runtime.checks import check_number, check_whole
    from ..training.optimizers import DDP
    from ..training.plan import decide_checkpointing, fit_lines, plan_training, read_base, released_base, table_lines
    from ..training.sharding import check_steps
    from ..training.trainer import check_base

    if card is not None:
        check_number("card", card, 1, 10_000)
    check_whole("cards", cards, 1, 4096)
    if cards > 1 or settings.parallel.kind != DDP:
        check_steps(settings, cards)
    variant, lines = released_variant(Path(settings.model).name), []
    with readable(Path(settings.model)):
        is_here = Path(settings.model).exists()
    if variant is None or is_here:
        check_base(settings)
        base = read_base(settings, report=report)
    else:
        base = released_base(variant, report=report)
        lines = [f"{Path(settings.model).name} is not downloaded: planned as the released {variant}", ""]
    room = None if card is None else card * 2**30
    # A machine without a GPU can plan too.
    if room is None and current_accelerator() is not None and settings.device != "cpu":
        room = memory_info(chosen_device(settings.device))[1]
    if room is not None:
        settings = decide_checkpointing(settings, base, room, cards)
    plan = plan_training(settings, base, cards)
    return [*lines, *table_lines(plan), "", *fit_lines(settings, base, plan, room, cards)]


def fit_memory(settings: TrainingSettings, cards: int = 1) -> TrainingSettings:
    """Return `settings` without gradient checkpointing, if `cards` accelerators like this one have the memory.

    Writes a line if they need more memory than they have.
    """
    from ..runtime.accelerator import chosen_device, memory_info
    from ..training.plan import decide_checkpointing, plan_training, read_base

    device = chosen_device(settings.device)
    if device.type == "cpu":
        return settings
    free, room = memory_info(device)
    with progress_line() as show:
        base = read_base(settings, report=lambda text: show(f"{text:<70}"))
        plan = plan_training(settings, base, cards)
        decided = decide_checkpointing(settings, base, free, cards)
    if plan.gpu_bytes > room:
        sys.stderr.write(
            f"warning: {plan.largest.name} may take {plan.gpu_bytes / 1e9:.1f} GB, and {device} has {room / 1e9:.1f} "
            "GB; see --plan\n"
        )
    return decided


@contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """Give a poll that cancels after the first of SIGNALS. A second Ctrl+C, or the same signal again, ends at once.

    Signals within ONE_PRESS seconds count as one: a launcher passes on the Ctrl+C that the terminal has already sent to
    all processes. Only the main thread can handle signals, so in another thread the poll never cancels.
    """
    asked: list[int] = []
    since = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if asked:
            # Slurm and service managers send another signal before SIGKILL. It does not interrupt the saving.
            if number in (signal.SIGINT, asked[0]) and time.monotonic() - since > ONE_PRESS:
                # The launcher passes on this press too. It does not interrupt the saving that follows.
                since = time.monotonic()
                leave(number, frame)
            return
        since = time.monotonic()
        asked.append(number)
        # The terminal or stderr may be closed. RuntimeError: the signal interrupted another write to stderr.
        with suppress(OSError, ValueError, RuntimeError):
            sys.stderr.write("\nstops and saves after this step; press Ctrl+C again to quit without waiting for it\n")

    def leave(number: int, frame: FrameType | None = None) -> None:
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)

    def poll() -> None:
        if asked:
            leave(asked[0])

    before: dict[int, Any] = {}
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)] if is_main else []
    try:
        for number in numbers:
            handler = signal.getsignal(number)
            # A shell lets its background processes ignore SIGINT, and nohup lets its command ignore SIGHUP. None is a
            # handler of C code, which Python cannot set again.
            if handler not in (None, signal.SIG_IGN):
                before[number] = handler
                signal.signal(number, ask)
        yield poll
    except RuntimeError as error:
        from ..training.ranks import is_lost

        # The launcher ended another process of the run too, and this process lost the connection to it.
        if asked and is_lost(error):
            leave(asked[0])
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The log on dashboards


@contextmanager
def tensorboard_writer(out: Path) -> Iterator[WriteLine]:
    """Yield a function that writes a line of the log into a new file in `out`/tensorboard.

    The file is created for the first line, because a training that is refused must leave nothing behind.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise VersionError(f"tensorboard: cannot be imported ({error!s:.80}); pip install tensorboard") from None
    folder = out / "tensorboard"
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
    """Yield a function that sends a line of the log to Weights & Biases, to the same run for the same folder `out`."""
    try:
        import wandb
    except ImportError as error:
        raise VersionError(f"wandb: cannot be imported ({error!s:.80}); pip install wandb") from None
    from ..checkpoints.fingerprint import digest_json
    from ..runtime.atomic_files import make_folder

    make_folder(out)
    # Everyone who sees the run sees its id. Because it contains the inode, nobody can verify a guessed path with it.
    run_id = digest_json([str(out.absolute()), out.stat().st_ino])[:16]
    try:
        # They switch off all data that wandb collects by itself. Old versions raise TypeError or ValueError.
        settings = wandb.Settings(
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
    logger.warning(
        "%s: it receives no more lines (%s); the training continues, and log.jsonl contains all lines; %s",
        *(name, brief(first_line(error), 200), remedy),
    )
