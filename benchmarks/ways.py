"""The differences between the ways to generate an image: writes ways.json and a table in developer/reproducibility.md.

Runs the tests in tests/graph and tests/cluster that generate every case in every way, and parses their output.
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
    """Return the differences as a Markdown table with a row per case and a column per way.

    Each cell has the larger difference of both references.
    """
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
    differences = [
        {"case": case, "way": way, "reference": reference, "difference": float(difference)}
        for way, case, reference, difference in rows
    ]
    report = {"largest_difference": differences}
    write(__file__, report)
    DOCUMENT.write_text(TABLE.sub(lambda _: table(report), DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
