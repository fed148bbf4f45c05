"""ComfyUI's canvas in Chromium, and the few things that tests and the templates' layout do with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, sync_playwright
from setup import chromium_path

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
# the height of a node's title, which lies above its position
TITLE = 30
# sizes of the nodes as they are drawn, {id: [x, y, width, height]} with the title
RECTANGLES = """() => {
    const scale = app.canvas.ds.scale, out = {};
    for (const node of app.canvas.graph.nodes) {
        const element = document.querySelector(`[data-node-id="${node.id}"]`);
        if (LiteGraph.vueNodesMode && element) {
            const box = element.getBoundingClientRect();
            out[node.id] = [node.pos[0], node.pos[1] - TITLE, box.width / scale, box.height / scale];
        } else {
            node.updateArea?.(app.canvas.ctx);
            const [x, y, width, height] = node.boundingRect ?? node.getBounding();
            out[node.id] = [x, y, width, height];
        }
    }
    return out;
}""".replace("TITLE", str(TITLE))

# few steps and the bundled model, on whatever graph is open; no released file is looked into
QUICK = """steps => {
    for (const node of app.graph.nodes) {
        const set = (name, value) => {
            const widget = node.widgets?.find(each => each.name === name);
            if (widget) widget.value = value;
        };
        set("steps", node.type === "SanaNodesTrain" ? 10 * steps : steps);
        set("use", "sana-posters (bundled)");
        if (node.type === "SanaNodesDoctor") set("files", false);
        if (node.type === "SanaNodesTrain") set("name", `run-of-${steps}-steps`);
    }
}"""


# each of the nodes shows an image or a text, or one has failed
DRAWN = """ids => app.extensionManager.lastExecutionError || ids.every(id => {
    const shown = app.nodeOutputs[id];
    return (shown?.images ?? shown?.text)?.length;
})"""


@contextmanager
def open_canvas(address: str, width: int = 1600, height: int = 900, new_user: bool = False) -> Iterator[Page]:
    """Yield a page with the canvas of the server at `address`, which greets a new user with the template browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(120_000)
        if not new_user:
            page.request.post(f"http://{address}/settings", data={"Comfy.TutorialCompleted": True})
        page.goto(f"http://{address}")
        page.wait_for_function("window.app?.graph && window.app?.extensionManager")
        yield page
        browser.close()


def set_setting(page: Page, name: str, value: Any) -> None:
    page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])


def settle(page: Page) -> None:
    """Wait until the canvas has drawn what has changed."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait_for_timeout(150)


def queue(page: Page) -> None:
    """Queue what is on the canvas."""
    page.evaluate("() => { app.nodeOutputs = {}; return app.queuePrompt(0) }")


def failure_of(page: Page, ids: list[Any]) -> str | None:
    """Wait until the nodes `ids` show pictures; return the message of a node that has failed, None if none has."""
    page.wait_for_function(DRAWN, arg=ids)
    return page.evaluate("() => app.extensionManager.lastExecutionError?.exception_message")


def use_renderer(page: Page, vue: bool) -> None:
    """Draw nodes as Nodes 2.0 does, or as before."""
    if page.evaluate("() => LiteGraph.vueNodesMode") == vue:
        return
    set_setting(page, "Comfy.VueNodes.Enabled", vue)
    page.wait_for_function("vue => LiteGraph.vueNodesMode === vue", arg=vue)
    settle(page)


def rectangles(page: Page) -> dict[str, list[float]]:
    """Return {id: [x, y, width, height]} of the nodes as they are drawn, their titles included."""
    return page.evaluate(RECTANGLES)
