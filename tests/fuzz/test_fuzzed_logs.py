"""Broken logs of a training run: complete lines are read in order, and so is the next line that is added."""

import json

from hypothesis import example, given
from hypothesis import strategies as st
from mutations import VALUES, changed_bytes

from sana_core.training.states import append_log, order, read_log

LINES = [
    {"step": 0, "validation_loss": 0.5},
    *({"step": step, "loss": 1.0 / step, "seconds": 0.1} for step in range(1, 9)),
    {"step": 8, "validation_loss": 0.4},
]
LOG = "".join(json.dumps(line) + "\n" for line in LINES).encode()
ODD = st.lists(
    st.fixed_dictionaries({"step": VALUES}, optional={"loss": VALUES, "validation_loss": VALUES}), max_size=8
)


@given(content=changed_bytes(LOG) | ODD.map(lambda lines: "\n".join(map(json.dumps, lines)).encode()))
@example(content=LOG[:-7])
@example(content=b"\xff\n" + LOG + b"\n\n" + LOG)
@example(content=b"[" * 100_000)
def test_logs(survives, tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    (folder / "log.jsonl").write_bytes(content)

    def read():
        before = read_log(folder)
        assert before == sorted(before, key=order) and len(set(map(order, before))) == len(before)
        append_log(folder, {"step": 5, "loss": 0.25})
        assert (folder / "log.jsonl").read_bytes().startswith(content)
        saved = [line for line in before if order(line) < (5, False)]
        assert read_log(folder) == [*saved, {"step": 5, "loss": 0.25}]

    survives(read)
