"""`python -m sana_core`: what the engine does, one command each."""

from __future__ import annotations

import argparse
import sys
from inspect import cleandoc

from .commands import batch, convert, decode, generate, inspect, plan
from .errors import SanaError

COMMANDS = {
    "generate": generate,
    "batch": batch,
    "decode": decode,
    "plan": plan,
    "inspect": inspect,
    "convert": convert,
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
    try:
        COMMANDS[arguments.command].run(arguments)
    except (SanaError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
