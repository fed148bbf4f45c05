"""`python -m sana_core`: what the engine does, one command each."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from inspect import cleandoc
from os import O_WRONLY, devnull, dup2
from os import open as open_descriptor
from types import FrameType
from typing import NoReturn

from .commands import batch, convert, decode, doctor, generate, inspect, plan, train
from .errors import FailedImagesError, SanaError, first_line

COMMANDS = {
    "generate": generate,
    "batch": batch,
    "train": train,
    "decode": decode,
    "plan": plan,
    "inspect": inspect,
    "convert": convert,
    "doctor": doctor,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv`, or the command line, names. Return the exit status; a mistake is one line."""
    parser = argparse.ArgumentParser(prog="python -m sana_core", description="NVIDIA's SANA, without a host.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        # python -OO leaves no docstrings
        text = cleandoc(command.__doc__ or name)
        own = subparsers.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            epilog=command.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(own)
    arguments = parser.parse_args(argv)
    for name, value in vars(arguments).items():
        # argparse of Python 3.11 takes the end of "--seed=--" for the end of the options
        if value == []:
            parser.error(f"argument --{name.replace('_', '-')}: expected one argument")
    try:
        # `doctor` returns 1 if it found a fault. The others return nothing.
        return COMMANDS[arguments.command].run(arguments) or 0
    except BrokenPipeError:
        raise
    except (SanaError, OSError) as error:
        message = str(error) if isinstance(error, SanaError) else system_failure(error)
        sys.stderr.write(f"{on_one_line(message)}\n")
        # All other images were written, so a script can tell this from a run that ended early.
        return 3 if isinstance(error, FailedImagesError) else 1
    except (RuntimeError, MemoryError) as error:
        # torch takes long to import, and most commands have imported it by then.
        from .runtime.accelerator import is_driver_error, is_out_of_memory

        if is_out_of_memory(error):
            failure, remedy = "memory ran out", "choose smaller images, dtype bfloat16, or devices with more memory"
        elif is_driver_error(error):
            failure, remedy = "the device has failed", "see the log of its driver, or choose other devices"
        else:
            raise
        sys.stderr.write(f"devices: {failure} ({on_one_line(first_line(error))}); {remedy}\n")
        return 1


def system_failure(error: OSError) -> str:
    """Return a line about an error of the operating system that no other code has named."""
    name = "a file" if error.filename is None else f"{error.filename!s:.240}"
    reason = error.strerror or type(error).__name__
    return f"{name}: cannot be read or written ({reason}); check its name, its permissions and its disk"


def on_one_line(text: str) -> str:
    """Return `text`, which may have a file's name in it, with what no screen shows written as in Python."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def command_line() -> int:
    """Run `main` for a shell: no output fails for its characters, and a signal ends it tidily, without a traceback.

    Return the exit status, for a signal 128 and its number.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        elif stream is None:
            # closed by the shell
            setattr(sys, name, open(devnull, "w"))  # noqa: SIM115
    signal.signal(signal.SIGTERM, end)
    try:
        status = main()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; every file that was named is whole\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # whoever read the output has gone, as head does; nor can the rest of it be flushed
        dup2(open_descriptor(devnull, O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except OSError as error:
        # as of a full disk; Python would flush the rest of it again at its end
        dup2(open_descriptor(devnull, O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"output: it cannot be written ({error.strerror}); see the disk that it goes to\n")
        return 1


def end(number: int, frame: FrameType | None) -> NoReturn:
    """End as Ctrl+C does, so that nothing is left behind."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(command_line())
