"""List the Chinese texts whose English text has changed: `python scripts/translations.py`.

`--reviewed` records the present English texts. Use it after the Chinese texts follow them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys

from host import ROOT, get, start_server

Json = dict[str, object]
# {place of a text: digest of the English text that the Chinese text follows}
RECORD = ROOT / "locales" / "zh" / "sources.json"


def english_texts(object_info: Json) -> dict[str, str]:
    """Return the English texts that have a Chinese translation: of nodes, help pages, and sections of the README.

    `object_info` is the answer of a server's /object_info.
    """
    texts = {}
    for node_id, node in sorted(object_info.items()):
        if not node["python_module"].startswith("custom_nodes.sana"):
            continue
        texts[f"{node_id} display_name"] = node["display_name"]
        texts[f"{node_id} description"] = node["description"]
        for inputs in node["input"].values():
            for name, definition in inputs.items():
                if len(definition) > 1 and definition[1].get("tooltip"):
                    texts[f"{node_id} inputs {name}"] = definition[1]["tooltip"]
        for index, tooltip in enumerate(node["output_tooltips"] or []):
            if tooltip:
                texts[f"{node_id} outputs {index}"] = tooltip
    for page in sorted(ROOT.glob("web/docs/*.md")):
        texts[page.relative_to(ROOT).as_posix()] = page.read_text(encoding="utf-8")
    for section in (ROOT / "README.md").read_text(encoding="utf-8").split("\n## "):
        texts[f"README.md {section.splitlines()[0]}"] = section
    return texts


def digests(object_info: Json) -> dict[str, str]:
    texts = english_texts(object_info)
    return {place: hashlib.sha256(text.encode()).hexdigest()[:12] for place, text in texts.items()}


def stale_translations(object_info: Json) -> list[str]:
    """Return the places whose English text is new, has changed or is gone since the last review."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    return sorted({place for place, _ in recorded.items() ^ digests(object_info).items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reviewed", action="store_true", help="record the present English texts")
    arguments = parser.parse_args()
    with start_server("translations") as server:
        object_info = json.loads(get(server, "/object_info"))
    if arguments.reviewed:
        RECORD.write_text(json.dumps(digests(object_info), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    else:
        sys.stdout.write("".join(f"{place}\n" for place in stale_translations(object_info)))


if __name__ == "__main__":
    main()
