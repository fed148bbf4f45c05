"""How far the ways of drawing one file are apart: writes ways.json, and a table in developer/reproducibility.md.

Runs the tests that draw every case in every way, of tests/graph and tests/cluster, and takes what they print.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import printed_by, write

DOCUMENT = ROOT / "docs" / "developer" / "reproducibility.md"
TESTS = ("tests/graph/test_ways.py", "tests/cluster/test_ways_on_a_cluster.py")
LINE = re.compile(r"^(\S.*) \| (.*) \| (nvidia|diffusers): (\S+)$", re.MULTILINE)
TABLE = re.compile(r"(?<=<!-- ways -->\n\n).*?(?=\n\n<!-- -->)", re.DOTALL)


def table(report: dict[str, Any]) -> str:
    """Return the differences as a table of Markdown: a row for each case, a column for each way, of both references the
    larger one."""
    cells: dict[str, dict[str, float]] = {}
    for row in report["largest_difference"]:
        case = cells.setdefault(row["case"], {})
        case[row["way"]] = max(case.get(row["way"], 0.0), row["difference"])
    ways = list(dict.fromkeys(way for row in cells.values() for way in row))
    lines = ["| | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for case, row in cells.items():
        shown = ("-" if way not in row else f"{row[way]:.0e}" if row[way] else "bits" for way in ways)
        lines.append(f"| {case} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    rows = [row for test in TESTS for row in LINE.findall(printed_by(test))]
    found = [
        {"case": case, "way": way, "reference": reference, "difference": float(difference)}
        for way, case, reference, difference in rows
    ]
    report = {"largest_difference": found}
    write(__file__, report)
    DOCUMENT.write_text(TABLE.sub(lambda _: table(report), DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
