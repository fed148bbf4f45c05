"""A page with a screenshot of every template, each run with the demo model where it can be: docs/gallery.md.

Of a template that names no files its last picture becomes the thumbnail, which says what has drawn it.
`python scripts/gallery.py NAME ...` takes those of the named templates anew.
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
from PIL import Image, ImageOps
from playwright.sync_api import Page
from templates import DOWNLOADED, SHOWING
from thumbnails import CARDS, FOOT, SIDE, VIDEO_CARDS, draw_card
from thumbnails import QUALITY as SHARP

sys.path.append(str(ROOT))
from sana_core.checkpoints.downloads import DOWNLOADS  # noqa: E402

GALLERY, PAGE = ROOT / "docs" / "gallery", ROOT / "docs" / "gallery.md"
SIZE, QUALITY = (1600, 900), 80
# the one that the README shows
FIRST = "SANA first image"
SAVED = """ids => ids.flatMap(id => app.nodeOutputs[id].images)
    .filter(image => image).map(({filename, subfolder, type}) => ({filename, subfolder, type}))"""
HEAD = """# Templates

Every template as it opens in Nodes 2.0; images are of the demo model. `make gallery` makes it.
"""


def shoot(server: Server, page: Page, path: Path) -> Image.Image:
    """Open the template, run it if it can be, and return the canvas as a picture.

    Raises RuntimeError with the message of a node that fails.
    """
    workflow = json.loads(path.read_text(encoding="utf-8"))
    page.evaluate("async ([graph, name]) => app.loadGraphData(graph, true, true, name)", [workflow, path.stem])
    settle(page)
    page.keyboard.press("Escape")
    if path.stem not in DOWNLOADED:
        page.evaluate(QUICK, 20)
        queue(page)
        wait_until_idle(server)
        shown = [node["id"] for node in workflow["nodes"] if node["type"] in SHOWING]
        if error := failure_of(page, shown):
            raise RuntimeError(f"{path.stem}: {error}")
    page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1500)
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def name_released_files(models: Path) -> None:
    """Make empty files of the names that the templates' loaders choose, which would be red without; none is read."""
    for name, file in DOWNLOADS.items():
        path = models / file.folder / name
        # a folder is offered by its index
        path = path / "model_index.json" if file.folder == "diffusers" else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def wait_until_idle(server: Server) -> None:
    """Wait until the server has nothing left to run."""
    while any(json.loads(get(server, "/queue")).values()):
        time.sleep(0.5)


def draw_thumbnail(server: Server, page: Page, path: Path, canvas: Image.Image) -> Image.Image:
    """Return a card of what the template that is open has saved, else shows, and who drew it."""
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    savers = [node["id"] for node in nodes if node["type"] == "SaveImage"]
    found = page.evaluate(SAVED, savers or [node["id"] for node in nodes if node["type"] in SHOWING][:1])
    images = [Image.open(io.BytesIO(get(server, "/view", **image))).convert("RGB") for image in found]
    if not savers:  # a chart, of which no edge may be cut, or words on the canvas
        shown = ImageOps.pad(images[0], (SIDE, SIDE - FOOT), color="white") if images else canvas
        return draw_card([shown], "figures for this computer")
    width, height = images[0].size
    return draw_card(images, f"{width} x {height} - demo model, CPU")


def picture_of(name: str) -> Path:
    return GALLERY / f"{name.replace(' ', '-').lower()}.jpg"


def write_page(names: list[str]) -> None:
    """Write the page: what each template is for, above its picture, which shows its note."""
    parts = [HEAD]
    for name in names:
        workflow = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
        note = next(node for node in workflow["nodes"] if node["type"] == "MarkdownNote")
        task = note["widgets_values"][0].partition("\n")[0].removeprefix("## ")
        parts.append(f"## {name}\n\n{task}\n\n![{name}](gallery/{picture_of(name).name})\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def main() -> None:
    # the README's is the first: nothing that it shows is known from an earlier run
    names = sorted((path.stem for path in (ROOT / "workflows").glob("*.json")), key=lambda name: (name != FIRST, name))
    GALLERY.mkdir(exist_ok=True)
    name_released_files(base_directory("gallery") / "models")
    # a run of the last time would go on, and not with another model
    with (
        tempfile.TemporaryDirectory() as output,
        start_server("gallery", Path(output)) as server,
        open_canvas(server.address, *SIZE) as page,
    ):
        set_setting(page, "Comfy.Minimap.Visible", False)
        set_setting(page, "Comfy.Workflow.WorkflowTabsPosition", "Sidebar")
        use_renderer(page, True)
        for name in sys.argv[1:] or names:
            picture = shoot(server, page, ROOT / "workflows" / f"{name}.json")
            picture.save(picture_of(name), quality=QUALITY)
            if name not in CARDS | VIDEO_CARDS:
                draw_thumbnail(server, page, ROOT / "workflows" / f"{name}.json", picture).save(
                    ROOT / "workflows" / f"{name}.jpg", quality=SHARP
                )
            if name == FIRST:
                picture.save(ROOT / "docs" / "canvas.jpg", quality=QUALITY)
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()
    write_page(names)


if __name__ == "__main__":
    main()
