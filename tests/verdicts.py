"""Which errors are ours, and what their line has to be like."""

from sana_core import SanaError

LONGEST_MESSAGE = 400  # The names of a test's folders count too.


def is_ours(error):
    """Whether `error` is a SanaError, of the pack in ComfyUI too, whose modules have other names."""
    return any(kind.__name__ == SanaError.__name__ for kind in type(error).__mro__)


def check_line(message, longest=LONGEST_MESSAGE):
    """Check that `message` is one short line that any log can write and no terminal obeys."""
    assert len(message) < longest and ": " in message, message
    assert message.isprintable(), ascii(message)
