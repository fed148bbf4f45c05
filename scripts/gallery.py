"""Run every template in Chromium with the demo model, and write its screenshot and its card: docs/gallery.md.

`python scripts/gallery.py NAME ...` runs the named templates only.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from pathlib import Path

from canvas import QUICK, failure_of, open_canvas, queue, set_setting, settle, use_renderer
from host import ROOT, Server, base_directory, get, start_server
from PIL import Image
from playwright.sync_api import Page
from templates import DOWNLOADED, showing, templates
from thumbnails import QUALITY as CARD_QUALITY
from thumbnails import draw_card

sys.path.append(str(ROOT))
from sana_core.checkpoints.generation import DOWNLOADS  # noqa: E402

GALLERY, PAGE = ROOT / "docs" / "gallery", ROOT / "docs" / "gallery.md"
SIZE, QUALITY = (1600, 900), 80
# The README shows this template.
FIRST = "SANA 1 first image"
# {title of a node: the images and the text on it}
SHOWN = """() => Object.fromEntries(app.graph.nodes.map(node => {
    const {images = [], text = []} = app.nodeOutputs[node.id] ?? {};
    return [node.title, [images.map(({filename, subfolder, type}) => ({filename, subfolder, type})), text.join("")]];
}))"""
HEAD = """# Templates

Every template as it opens in Nodes 2.0. The images are of the demo model. `make gallery` writes this page.
"""


def shoot(server: Server, page: Page, name: str) -> Image.Image:
    """Open the template, run it unless it needs downloaded files, and return a screenshot.

    Raises RuntimeError with the message of a node that fails.
    """
    workflow = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    page.evaluate("async ([graph, name]) => app.loadGraphData(graph, true, true, name)", [workflow, name])
    settle(page)
    page.keyboard.press("Escape")
    if name not in DOWNLOADED:
        page.evaluate(QUICK, 20)
        queue(page)
        while any(json.loads(get(server, "/queue")).values()):
            time.sleep(0.5)
        if error := failure_of(page, showing(workflow)):
            raise RuntimeError(f"{name}: {error}")
    page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1500)
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def name_released_files(models: Path) -> None:
    """Create empty files for the loaders of the templates, which would be red without them. None is read."""
    for name, file in DOWNLOADS.items():
        path = models / file.folder / name
        # A folder is listed if it has an index.
        path = path / "model_index.json" if file.folder == "diffusers" else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def card_of(server: Server, page: Page, name: str) -> Image.Image:
    """Return the card of the template that is open."""
    images, report = {}, ""
    for title, (files, text) in page.evaluate(SHOWN).items():
        images[title] = [Image.open(io.BytesIO(get(server, "/view", **file))).convert("RGB") for file in files]
        report = text if title == "SANA Doctor" else report
    return draw_card(name, images, report)


def write_page(names: list[str]) -> None:
    """Write the page: the task of each template above its screenshot."""
    parts = [HEAD]
    for name in names:
        workflow = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
        note = next(node for node in workflow["nodes"] if node["type"] == "MarkdownNote")
        task = note["widgets_values"][0].partition("\n")[0].removeprefix("## ")
        parts.append(f"## {name}\n\n{task}\n\n![{name}](gallery/{screenshot_of(name).name})\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def screenshot_of(name: str) -> Path:
    return GALLERY / f"{name.replace(' ', '-').lower()}.jpg"


def main() -> None:
    GALLERY.mkdir(exist_ok=True)
    name_released_files(base_directory("gallery") / "models")
    with (
        # A new output folder: a training would otherwise resume an earlier one.
        tempfile.TemporaryDirectory() as output,
        start_server("gallery", Path(output)) as server,
        open_canvas(server.address, *SIZE) as page,
    ):
        set_setting(page, "Comfy.Minimap.Visible", False)
        set_setting(page, "Comfy.Workflow.WorkflowTabsPosition", "Sidebar")
        use_renderer(page, True)
        for name in sys.argv[1:] or templates():
            screenshot = shoot(server, page, name)
            screenshot.save(screenshot_of(name), quality=QUALITY)
            options = {"quality": CARD_QUALITY, "optimize": True, "progressive": True}
            card_of(server, page, name).save(ROOT / "workflows" / f"{name}.jpg", **options)
            if name == FIRST:
                screenshot.save(ROOT / "docs" / "canvas.jpg", quality=QUALITY)
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()
    write_page(list(templates()))


if __name__ == "__main__":
    main()
