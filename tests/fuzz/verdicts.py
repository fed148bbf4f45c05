"""Which errors are ours, and what their line has to be like."""

import traceback

from sana_core import SanaError

LONGEST_MESSAGE = 400  # with the names of a test's folders in it
# whose errors have no classes yet; a file leaves the list when they have
BARE = ("sana_core/batch/", "sana_core/commands/batch.py", "sana_core/commands/decode.py", "sana_core/decode/")


def is_ours(error):
    """Whether `error` is a SanaError, of the pack in ComfyUI too, whose modules have other names."""
    return any(kind.__name__ == SanaError.__name__ for kind in type(error).__mro__)


def is_bare(error):
    """Whether `error` is one of those that have no class of ours yet."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return not is_ours(error) and isinstance(error, ValueError | OSError) and any(place in last for place in BARE)


def check_line(message):
    assert len(message) < LONGEST_MESSAGE and "\n" not in message and ": " in message, message
    message.encode()
