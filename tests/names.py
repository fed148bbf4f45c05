"""Names of files and folders as they come from other systems, and the most hostile names that Linux accepts."""

import os
import random
import unicodedata

LONGEST_NAME = 255  # bytes

# {kind of name: its parts}
PARTS = {
    "Latin-1": ["mod\udce8le", "gr\udcfc\udcdfe", "\udce9t\udce9"],
    # Bytes that are never UTF-8, the first byte of a character without the rest, and an encoded surrogate.
    "bytes": ["\udcff\udcfe", "a\udcc3", "\udced\udca0\udc80", "\udcc0\udcaf", "\udc80\udc81"],
    "line breaks": ["a\nb", "\r", "\r\n", "a\x0bb", "a\x0cb", "a\x85b", "a\u2028b", "a\u2029b", "\n\n"],
    "controls": ["\x1b[2J", "\x07", "\x08\x08", "\x01", "\x7f", "\x9b31m", "a\tb", "\x1b]0;title\x07"],
    "right to left": [
        "\u202egnp.exe",
        "\u2066a\u2069",
        "\u200fa",
        "\u05e9\u05dc\u05d5\u05dd",
        "\u0645\u062b\u0627\u0644",
    ],
    "invisible": ["a\u200bb", "\ufeffa", "\u00a0", "\u2060", "\u00ad", "\U000e0041", "\ufffe", "\ue000"],
    "Chinese": ["\u6a21\u578b", "\u4f60\u597d \u4e16\u754c", "\U00020000"],
    "emoji": ["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "a\ufe0f"],
    "NFC": ["\u00e9t\u00e9", "\u00c5ngstr\u00f6m", "\uac00"],
    "NFD": ["e\u0301te\u0301", "A\u030angstro\u0308m", "\u1100\u1161", "z" + "\u0300" * 20],
    "quotes": ["it's", '"quoted"', "'''", "`id`", "\u201ca\u201d"],
    "percent": ["100%", "%s", "%(name)s", "%n%n", "%d%%", "%2F"],
    "braces": ["{}", "{0}", "{name!r}", "{{", "[a]", "<b>", "${HOME}", "$(id)"],
    "dashes": ["-", "--", "-rf", "--help", "-0.5", "\u2013"],
    "dots and spaces": ["a ", " a", "a.", ".a", "...", "a..b", " ", "a  b", "~", "~root"],
    "backslash": ["a\\b", "\\", "\\\\server\\x", "C:\\x", "a\\n", "\\u202e"],
    "separators": ["a=0.5", "a:b", "a,b", "a;b", "a|b", "a&b", "a#b", "a*", "a?b", "a=b=1", "!", "@", "a+b"],
    "reserved": ["CON", "nul", "aux.png", "state", "None", "nan", "0", "true", "config", "index"],
    "long": ["x" * 255, "\u6a21" * 85, "\udce8" * 255, "\U0001f600" * 63, "\n" * 255, "\u202e" * 85, "'" * 255],
}
# One name of each kind.
EXAMPLES = {kind: parts[0] for kind, parts in PARTS.items()}
# No file on Linux has such a name. A prompt, or a name in a graph, may be such a text.
NO_FILE = {"half a character": "mod\ud83d", "NUL": "a\0b", "5,000 characters": "x" * 5000}


def cut(name: str, suffix: str) -> str:
    """Return `name` with `suffix`, without the end of the name if both together are too long for a file."""
    data = name.encode("utf-8", "surrogateescape")[: LONGEST_NAME - len(suffix)]
    return os.fsdecode(data) + suffix


def make_names(count: int) -> list[str]:
    """Return `count` different names: all parts, then random sequences of parts of different kinds."""
    rng = random.Random(0)
    names = dict.fromkeys(part for parts in PARTS.values() for part in parts)
    while len(names) < count:
        chosen = "".join(rng.choice(PARTS[kind]) for kind in rng.sample(list(PARTS), rng.randint(2, 3)))
        names[cut(chosen, "")] = None
    chosen = list(names)
    rng.shuffle(chosen)
    return chosen[:count]


def is_utf8(name: str) -> bool:
    return not any(unicodedata.category(character) == "Cs" for character in name)
