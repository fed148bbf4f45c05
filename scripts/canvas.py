"""ComfyUI's canvas in Chromium, and the few things that tests and the templates' layout do with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import ConsoleMessage, Page, sync_playwright
from setup import chromium_path

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
# Height of a node's title, which is above the node's position.
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


# Console messages that this pack does not cause, and their causes.
UPSTREAM = {
    "Content Security Policy": "The server forbids the canvas to look up packs and files on the internet.",
    "404": "The browser reports files that the canvas looks for and does not need, like user.css.",
    "[subgraphNavigation]": "The canvas asks for the view of a workflow that has none yet.",
    "[appModeStore] dropping legacy selectedInput tuple": "The canvas reads App Mode's inputs of the workflow before.",
    "input.link is deprecated": "The canvas still reads its own deprecated property.",
    "ComfyApp graph accessed before initialization": "open_canvas waits for the graph.",
    "The legacy queue/history menu is deprecated": "The canvas creates its own deprecated menu.",
    "[MaskEditor]": "The canvas registers its own deprecated functions.",
    "Invalid layout total size": "The canvas divides its window into panels.",
}
# Counts the frames that the canvas draws while it is dragged for a second.
FRAMES = """async () => {
    const {canvas} = app, draw = canvas.draw, [x, y] = canvas.ds.offset;
    let count = 0;
    canvas.draw = function (...rest) { count++; return draw.apply(this, rest) };
    for (let step = 0; step < 10; step++) {
        canvas.ds.offset[0] += 5;
        canvas.setDirty(true, true);
        await new Promise(done => setTimeout(done, 100));
    }
    canvas.draw = draw;
    canvas.ds.offset = [x, y];
    canvas.setDirty(true, true);
    return count;
}"""

# Each of the nodes shows an image or a text, or one has failed
DRAWN = """ids => app.extensionManager.lastExecutionError || ids.every(id => {
    const shown = app.nodeOutputs[id];
    return (shown?.images ?? shown?.text)?.length;
})"""


@contextmanager
def open_canvas(address: str, width: int = 1600, height: int = 900, new_user: bool = False) -> Iterator[Page]:
    """Yield a page that shows the canvas of the server at `address`. A new user sees the template browser first.

    `page.errors` collects errors and warnings of the console, without the messages in UPSTREAM.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(120_000)
        page.errors = collect_errors(page)
        if not new_user:
            page.request.post(f"http://{address}/settings", data={"Comfy.TutorialCompleted": True})
        page.goto(f"http://{address}")
        page.wait_for_function("window.app?.graph && window.app?.extensionManager")
        yield page
        browser.close()


def collect_errors(page: Page) -> list[str]:
    """Return a list that collects errors and warnings of the console, without the messages in UPSTREAM."""
    errors: list[str] = []

    def on_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(text in message.text for text in UPSTREAM):
            errors.append(message.text)

    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", on_message)
    return errors


def set_setting(page: Page, name: str, value: Any) -> None:
    page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])


def settle(page: Page) -> None:
    """Wait until the canvas has drawn all changes."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait_for_timeout(150)


def count_frames(page: Page) -> int:
    """Return the number of frames that the canvas draws while it is dragged for a second."""
    return page.evaluate(FRAMES)


def queue(page: Page) -> None:
    """Queue the workflow on the canvas."""
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
