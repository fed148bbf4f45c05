"""Every message that the code can raise, in docs/errors.md: `python scripts/list_errors.py`.

The messages come from the code; an indented line below one is a note, written by hand in the page, and is kept.
"""

import ast
import functools
import re
from pathlib import Path

from setup import ROOT

PAGE = ROOT / "docs" / "errors.md"
CLASSES = set(re.findall(r"^class (\w+)", (ROOT / "sana_core/errors.py").read_text(), re.M))
SOURCES = sorted([*ROOT.glob("sana_core/**/*.py"), *ROOT.glob("nodes/**/*.py")])
FILLED = "..."  # stands for what a message fills in
# sections and the files whose errors they list; the first that matches
SECTIONS = {
    "Several GPUs and clusters": r"(split|cluster)/|model/(row_shards|sharded_ops)|nodes/host/.*(cluster|split)",
    "Training": r"training|commands/train|nodes/dataset",
    "Command line and batches": r"sana_core/(batch/(?!scorer)|commands/)|(_files|video/files|_lock)\.py$",
    "Models and their files": r"/checkpoints/|/scorer\.py|host/(folders|file_s|.*/(preview|quantise|weights))",
    "Nodes, prompts and images": "",
}


@functools.cache
def constants(path: Path) -> dict[str, object]:
    """The strings and numbers that the file names at its top."""
    return {
        target.id: node.value.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def known_in(path: Path) -> dict[str, object]:
    """`constants`, with those that the file imports."""
    found = dict(constants(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            theirs = constants(source) if source.is_file() else {}
            found |= {each.asname or each.name: theirs[each.name] for each in node.names if each.name in theirs}
    return found


def text_of(node: ast.AST, known: dict[str, object]) -> str:
    """The text of an expression, with FILLED for what only a run knows."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, known) + text_of(node.right, known)
    return str(known.get(node.id, FILLED)) if isinstance(node, ast.Name) else FILLED


def messages(path: Path):
    """Yield (line, message) of each error that the file makes, without those that pass another on."""
    known = known_in(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
            message = re.sub(r"(\.\.\.){2,}", FILLED, text_of(node.args[0], known))
            if re.search("[a-z]{3}", message.partition(": ")[2]):
                yield node.lineno, message


def section(path: Path) -> str:
    return next(title for title, files in SECTIONS.items() if re.search(files, path.relative_to(ROOT).as_posix()))


def notes(page: str) -> dict[str, str]:
    return dict(re.findall(r"^- `(.+)`\n  (.+)$", page, re.M))


def written(page: str) -> str:
    """The page with the messages of the code, and the notes of `page`."""
    kept, listed = notes(page), {title: set() for title in SECTIONS}
    for path in SOURCES:
        listed[section(path)] |= {message for _, message in messages(path)}
    lost = kept.keys() - set().union(*listed.values())
    if lost:
        raise SystemExit("\n".join(["these have a note and are in the code no more:", *sorted(lost)]))
    parts = [page.partition("\n## ")[0].rstrip()]
    for title, found in listed.items():
        entries = [f"- `{each}`" + (f"\n  {kept[each]}" if each in kept else "") for each in sorted(found, key=order)]
        parts.append("\n".join([f"## {title}", "", *entries]))
    return "\n\n".join(parts) + "\n"


def order(message: str) -> tuple[str, str]:
    """By what was found: what comes before differs from one file to the next."""
    return re.sub(r"^\W+", "", message.lower()), message


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
