"""Write all error messages of the code into docs/errors.md: `python scripts/list_errors.py`.

An indented line below a message is a note. Notes are written by hand into the page, and this script preserves them.
"""

import ast
import functools
import re
from pathlib import Path

from setup import ROOT

PAGE = ROOT / "docs" / "errors.md"
CLASSES = set(re.findall(r"^class (\w+)", (ROOT / "sana_core/errors.py").read_text(), re.M))
SOURCES = sorted([*ROOT.glob("sana_core/**/*.py"), *ROOT.glob("nodes/**/*.py")])
# Placeholder for values that are inserted at run time.
FILLED = "..."
# {section: pattern of the files whose messages it lists}. The first match counts.
SECTIONS = {
    "Several GPUs and clusters": r"(split|cluster)/|model/row_shards|nodes/host/.*split",
    "Training": r"training|commands/train",
    "Command line and batches": r"sana_core/(batch/(?!best)|commands/)|(_files|video/generate|_lock)\.py$",
    "Models and their files": r"/checkpoints/|/(scorer|best)\.py|host/(folders|file_s|.*/(quantise|weights))",
    "Nodes, prompts and images": "",
}


@functools.cache
def constants(path: Path) -> dict[str, object]:
    """Return the file's module constants that are strings or numbers."""
    return {
        target.id: node.value.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def all_constants(path: Path) -> dict[str, object]:
    """Return the constants of the file, including imported ones."""
    names = dict(constants(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            imported = constants(source) if source.is_file() else {}
            names |= {
                alias.asname or alias.name: imported[alias.name] for alias in node.names if alias.name in imported
            }
    return names


def text_of(node: ast.AST, names: dict[str, object]) -> str:
    """Return the text of an expression, with FILLED for values of the run time. `names` are constants."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names) + text_of(node.right, names)
    return str(names.get(node.id, FILLED)) if isinstance(node, ast.Name) else FILLED


def messages(path: Path):
    """Yield (line, message) of each error that the file creates. Errors with only another error's text are left out."""
    names = all_constants(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
            message = re.sub(r"(\.\.\.){2,}", FILLED, text_of(node.args[0], names))
            if re.search("[a-z]{3}", message.partition(": ")[2]):
                yield node.lineno, message


def section(path: Path) -> str:
    return next(title for title, files in SECTIONS.items() if re.search(files, path.relative_to(ROOT).as_posix()))


def notes(page: str) -> dict[str, str]:
    return dict(re.findall(r"^- `(.+)`\n  (.+)$", page, re.M))


def written(page: str) -> str:
    """Return the page with the messages of the code and the notes of `page`."""
    old_notes, listed = notes(page), {title: set() for title in SECTIONS}
    for path in SOURCES:
        listed[section(path)] |= {message for _, message in messages(path)}
    lost = old_notes.keys() - set().union(*listed.values())
    if lost:
        raise SystemExit("\n".join(["these messages have a note, but are no longer in the code:", *sorted(lost)]))
    parts = [page.partition("\n## ")[0].rstrip()]
    for title, section_messages in listed.items():
        entries = [
            f"- `{message}`" + (f"\n  {old_notes[message]}" if message in old_notes else "")
            for message in sorted(section_messages, key=order)
        ]
        parts.append("\n".join([f"## {title}", "", *entries]))
    return "\n\n".join(parts) + "\n"


def order(message: str) -> tuple[str, str]:
    """Sort key: ignores case and punctuation at the beginning."""
    return re.sub(r"^\W+", "", message.lower()), message


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
