"""Pickles of all operations, with values of every type at every place: they load, or are refused in one line."""

from hypothesis import given
from hypothesis import strategies as st
from pickles import (
    FLOATS,
    KEY,
    LABEL,
    PLACE,
    SHAPE,
    STORAGE,
    STRIDE,
    doubled,
    named,
    outcome,
    pth,
    storage,
    tensor,
    text,
    whole,
)

from sana_core.checkpoints.pickled import NAMED

NUMBERS = [b"K\0", b"K\1", b"K\2", b"M\x10\x27", b"J\xff\xff\xff\xff", b"\x8a\0", *map(whole, (2**40, 2**63, -(2**64)))]
NUMBERS += [whole(1 << 400_000), b"I12\n", b"I01\n", b"I-1\n", b"I1" + b"0" * 5000 + b"\n", b"L5L\n", b"F1.5\n"]
NUMBERS += [b"G\x7f\xf8" + bytes(6), b"G?\xf8" + bytes(6)]
TEXTS = [
    text(value) for value in ("", "a", "0", "storage", "state_dict", "state_dict_ema", "\ud800", "a\nb", "x" * 10**6)
]
TEXTS += [b"U\1a", b"T\1\0\0\0a", b"S'a'\n", b"Va\n", b"V\\ud800\n", b"\x8c\1a", b"\x8d\1" + bytes(7) + b"a"]
BYTES = [b"C\1a", b"B\1\0\0\0a", b"\x8e\1" + bytes(7) + b"a", b"\x96\1" + bytes(7) + b"a"]
GLOBALS = [*map(named, sorted(NAMED)), *map(named, ("os system", "torch onnx", "torch FooStorage", "builtins dict"))]
OTHERS = [b"N", b"\x88", b"\x89", b"]", b")", b"}", b"\x8f", b"(l", b"(d", b"(t", b"(\x91", storage(), tensor()]
# memo, extensions, references as text, buffers, and operations without their values
ODD = [
    b"h\0",
    b"h\1",
    b"j\0\0\0\0",
    b"g1\n",
    b"\x82\1",
    b"\x83\1\0",
    b"\x84\1\0\0\0",
    b"Pabc\n",
    b"\x97",
    b"\x98",
    b"2",
]
ODD += [
    b"0",
    b"1",
    b"(",
    b"t",
    b"\x87",
    b"R",
    b"Q",
    b"u",
    b"e",
    b"s",
    b".",
    b"\xff",
    b"\x95" + bytes(8),
    b"\x80\4",
    b"",
]
LEAVES = (
    st.sampled_from([*NUMBERS, *TEXTS, *BYTES, *OTHERS]) | st.sampled_from(GLOBALS) | st.sampled_from([*OTHERS, *ODD])
)
# Operations behind one, two and any number of values.
ONE = [b"\x85", b"Q", b"0N", b"q\0", b"q\1", b"r\1\0\0\0", b"p1\n", b"\x94", b"\x98", b"(1", b"20", b"2\x86", b"h\1"]
TWO = [b"\x86", b"R", b"\x81", b"b", b"a", b"s", b"\x93", b"0", b"K\1\x87", b"}\x92", b"K\1s"]
MANY = [b"t", b"l", b"d", b"u", b"e", b"\x90", b"\x91", b"o", b"ios\nsystem\n", b"itorch\nSize\n", b"1N", b"tR", b"tQ"]
DEPTHS = st.sampled_from([1, 2, 60, 1000, 10_000, 400_000])
FEW = st.integers(0, 4)


@st.composite
def values(draw, depth=3):
    """Operations that push a value, mostly."""
    inner = values(depth - 1) if depth else LEAVES
    match draw(st.integers(0, 9 if depth else 0)):
        case 0:
            return draw(LEAVES)
        case 1:
            return draw(inner) + draw(st.sampled_from(ONE))
        case 2:
            return draw(inner) + draw(inner) + draw(st.sampled_from(TWO))
        case 3:
            items = b"".join(draw(st.lists(inner, max_size=4)))
            return draw(st.sampled_from([b"", b"]", b"}", b"\x8f"])) + b"(" + items + draw(st.sampled_from(MANY))
        case 4:
            # deep: tuples, lists, dicts, calls
            before, after = draw(
                st.sampled_from(
                    [(b"", b"\x85"), (b"(", b"t"), (b"]", b"a"), (b"}X\1\0\0\0a", b"s"), (b"N(", b"tR"), (b"", b"Q")]
                )
            )
            times = draw(DEPTHS)
            return before * times + draw(inner) + after * times
        case 5:
            return doubled(draw(inner), draw(st.sampled_from([1, 3, 24, 60])), draw(st.sampled_from([b"q\1h\1", b"2"])))
        case 6:
            # a dict or a list in itself
            return draw(st.sampled_from([b"}q\1%bh\1s", b"]q\1%bah\1a"])) % draw(inner)
        case 7:
            return (
                draw(st.sampled_from(GLOBALS)) + draw(inner) + draw(st.sampled_from([b"R", b"\x81", b"\x85R", b"(tR"]))
            )
        case 8:
            good = (FLOATS, KEY, PLACE, b"K\x10", LABEL)
            return storage(*[draw(st.just(part) | inner) for part in good])
        case _:
            good = (STORAGE, b"K\0", SHAPE, STRIDE, b"\x89")
            return tensor(*[draw(st.just(part) | inner) for part in good])


@st.composite
def pickles(draw):
    """A document: of one value, of a state_dict, or of a trainer."""
    name = st.sampled_from([*map(text, ("a", "b", "state_dict", "state_dict_ema", "epoch"))]) | LEAVES
    entries = st.lists(st.tuples(name, st.just(tensor()) | values()).map(b"".join), max_size=4).map(b"".join)
    state = entries.map(lambda items: b"}(%bu" % items)
    document = draw(
        values()
        | state
        | state.map(lambda inner: b"}" + text("state_dict") + inner + b"s")
        | st.tuples(state, state, values()).map(
            lambda parts: (
                b"}(" + text("state_dict") + parts[0] + text("state_dict_ema") + parts[1] + parts[2] * 2 + b"u"
            )
        )
    )
    return b"\x80\x02" + document + b"."


@given(content=pickles())
def test_pickles_by_grammar(count, tmp_path_factory, content):
    count()
    outcome(pth(tmp_path_factory.getbasetemp() / "grammar.pth", content, **{"data/0": bytes(64)}))
