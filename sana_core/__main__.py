"""The command line, `python -m sana_core`."""

from __future__ import annotations

import argparse
import gc
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
from .runtime.text import one_line

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
    """Run the command in `argv`, by default the command line. Returns the exit status. An error is one line."""
    parser = argparse.ArgumentParser(prog="python -m sana_core", description="NVIDIA's SANA, without a host.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        # With python -OO there are no docstrings.
        text = cleandoc(command.__doc__ or name)
        subparser = subparsers.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            epilog=command.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(subparser)
    arguments = parser.parse_args(argv)
    for name, value in vars(arguments).items():
        # In Python 3.11, argparse treats "--" in "--seed=--" as the end of the options and returns an empty list.
        if value == []:
            parser.error(f"argument --{name.replace('_', '-')}: expected one argument")
    try:
        # `doctor` returns 1 if it found a fault. The others return nothing.
        return COMMANDS[arguments.command].run(arguments) or 0
    except BrokenPipeError:
        raise
    except (SanaError, OSError) as error:
        message = str(error) if isinstance(error, SanaError) else system_failure(error)
        sys.stderr.write(f"{one_line(message)}\n")
        # All other images were written, so a script can tell this from a run that ended early.
        return 3 if isinstance(error, FailedImagesError) else 1
    except (RuntimeError, MemoryError) as error:
        # torch takes long to import, and most commands have imported it by then.
        from .runtime.accelerator import is_driver_error, is_out_of_memory

        if is_out_of_memory(error):
            failure, remedy = "memory ran out", "choose smaller images, dtype bfloat16, or devices with more memory"
        elif is_driver_error(error):
            failure, remedy = "the device has failed", "check the log of its driver, or choose other devices"
        else:
            raise
        sys.stderr.write(f"devices: {failure} ({one_line(first_line(error))}); {remedy}\n")
        return 1


def system_failure(error: OSError) -> str:
    """Return a line about an error of the operating system that no other code has caught."""
    name = "a file" if error.filename is None else f"{error.filename!s:.240}"
    reason = error.strerror or type(error).__name__
    return f"{name}: cannot be read or written ({reason}); check its name, permissions and disk"


def command_line() -> int:
    """Run `main` for a shell. Returns the exit status, which is 128 plus its number for a signal.

    Characters that the shell cannot show are escaped. A signal ends the command without a traceback.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        elif stream is None:
            # The shell has closed it.
            setattr(sys, name, open(devnull, "w"))  # noqa: SIM115
    signal.signal(signal.SIGTERM, end)
    try:
        status = main()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; all files that were listed are complete\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the output has ended, as `head` does. Python must not flush the remaining output at its end.
        dup2(open_descriptor(devnull, O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except OSError as error:
        # For example, the disk is full. Python must not flush the remaining output at its end.
        dup2(open_descriptor(devnull, O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"output: it cannot be written ({error.strerror}); check the disk that it is written to\n")
        return 1


def end(number: int, frame: FrameType | None) -> NoReturn:
    """End the process with an exception, so that temporary files are removed, as after Ctrl+C."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    status = command_line()
    # Python would search a million objects of torch for cycles at its end, which takes longer than a second.
    gc.freeze()
    # Triton counts these objects as leaks, and writes 30 lines about them. All output of the command is written.
    dup2(open_descriptor(devnull, O_WRONLY), 2)
    sys.exit(status)
