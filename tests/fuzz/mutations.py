"""Bytes and JSON documents that are nearly right."""

from __future__ import annotations

import json

from hypothesis import strategies as st

NUMBERS = (
    st.sampled_from([0, -1, 1, 2, 255, 256, 3_000_000, 10**7, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308]) | st.floats()
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def changed_bytes(draw, content: bytes) -> bytes:
    """`content` with up to four bytes or stretches changed, dropped, repeated or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(0, 64))
        match draw(st.sampled_from(("set", "insert", "drop", "repeat", "cut"))):
            case "set":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "drop":
                del data[at : at + length]
            case "repeat":
                data[at:at] = data[at : at + length]
            case "cut":
                del data[at:]
    return bytes(data)


@st.composite
def changed_json(draw, document) -> str:
    """The text of `document` with up to three of its values replaced, dropped, renamed or nested."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            match draw(st.sampled_from(("value", "drop", "rename", "nest"))):
                case "value":
                    place[key] = draw(VALUES)
                case "drop":
                    del place[key]
                case "rename" if isinstance(place, dict):
                    other = draw(
                        st.text(max_size=40) | st.sampled_from([key + ".9999999.x", "auto_map", "__metadata__"])
                    )
                    place[other] = place.pop(key)
                case "nest":
                    for _ in range(draw(st.sampled_from((1, 50, 2000)))):
                        place[key] = [place[key]]
            break
    return encode(document)


def encode(document) -> str:
    """The JSON of a document that may nest deeper than Python's own writer goes."""
    nested = 0
    try:
        return json.dumps(document)
    except RecursionError:
        while isinstance(document, list):
            document, nested = document[0], nested + 1
        return "[" * 2000 + "0" + "]" * 2000


def with_file(file, content, survives, action, *names):
    """Check that `action` survives `file` with `content` instead of its own bytes."""
    before = file.read_bytes()
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        survives(action, *names)
    finally:
        file.write_bytes(before)
