"""Write the tables of sana_core/advice.py into the documents, and docs/settings.toml: `python scripts/tables.py`.

A table is between `<!-- NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import re
import sys

from setup import ROOT

sys.path.append(str(ROOT))
from sana_core.advice import gpu_table, markdown, model_table  # noqa: E402
from sana_core.training.settings import describe_settings  # noqa: E402

# Words of the tables in the Chinese README.
CHINESE = {
    "VRAM": "显存",
    "for example": "例如",
    "file": "文件",
    "download": "下载量",
    "with *quantise* int8": "*quantise* 选 int8",
    "yes": "可以",
    "no": "不行",
}


def in_chinese(cell: str) -> str:
    return CHINESE.get(cell, re.sub(r"^([\d.]+) s$", r"\1 秒", cell))


def tables() -> dict[tuple[str, str], str]:
    """Return {(document, name): table in Markdown}."""
    gpus = gpu_table()
    return {
        ("README.md", "gpu table"): markdown(gpus),
        ("README.zh.md", "gpu table"): markdown([[in_chinese(cell) for cell in row] for row in gpus]),
        ("docs/memory.md", "model table"): markdown(model_table()),
    }


def replace(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between its markers. Raises ValueError if `text` has not exactly one such place."""
    pattern = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end {name} -->)"
    replaced, count = re.subn(pattern, lambda match: f"{table}\n", text, flags=re.S)
    if count != 1:
        raise ValueError(f"got {count} places for {name!r}, expected one")
    return replaced


def main() -> None:
    for (document, name), table in tables().items():
        path = ROOT / document
        path.write_text(replace(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")
    (ROOT / "docs" / "settings.toml").write_text(f"{describe_settings()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
