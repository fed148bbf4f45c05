// Shows lines under a node, and warnings and errors as messages (nodes/host/report.py).
// ComfyUI's own text under a node is for progress. Frontend 1.58 removes it when the run ends.
import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"

// The names of the widget with our lines, and of the frontend's widget with a progress text.
const LINES = "sana_lines"
const PROGRESS = "$$node-text-preview"
// Pixels: a line of text, the longest text, which scrolls if it is longer, and the classic renderer's gap around it.
const LINE = 14
const LARGEST = 140
const MARGIN = 4
const MILLISECONDS = 20_000
// Folders of the pack in a traceback.
const OURS = /sana_core|nodes[\\/]host[\\/]/

// The node of an id such as 5, or 12:5 for node 5 in the subgraph of node 12.
function nodeOf(id) {
    let graph = app.rootGraph ?? app.graph
    let node = null
    for (const part of String(id).split(":")) {
        node = graph?.getNodeById(part)
        graph = node?.subgraph
    }
    return node
}

function findWidget(node, name) {
    return node?.widgets?.find(widget => widget.name === name)
}

function removeWidget(node, name) {
    const widget = findWidget(node, name)
    if (!widget) return
    widget.onRemove?.()
    node.widgets = node.widgets.filter(each => each !== widget)
}

function show(id, lines) {
    const node = nodeOf(id)
    if (!node || !lines?.length) return
    removeWidget(node, PROGRESS)
    removeWidget(node, LINES)
    const element = document.createElement("div")
    element.textContent = lines.join("\n")
    element.style.cssText = `font: 11px/${LINE}px sans-serif; white-space: pre-wrap; overflow: hidden auto;
        padding: 2px 6px; box-sizing: border-box; color: var(--input-text); user-select: text`
    const columns = Math.max(20, node.size[0] / 6)
    const rows = lines.reduce((count, line) => count + Math.ceil(line.length / columns), 0)
    const height = Math.min(LARGEST, LINE * rows + 6)
    element.style.height = `${height}px`
    const widget = node.addDOMWidget(LINES, "sana_lines", element, {
        serialize: false,
        margin: MARGIN,
        getMinHeight: () => height + 2 * MARGIN,
        getMaxHeight: () => height + 2 * MARGIN,
        getValue: () => element.textContent,
    })
    // `serialize` of the options keeps it out of the prompt, and this out of the saved workflow.
    widget.serialize = false
    node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])])
    app.graph.setDirtyCanvas(true, true)
}

function addMessage(severity, detail, life) {
    app.extensionManager.toast.add({ severity, summary: "SANA", detail, life })
}

app.registerExtension({
    name: "SANA.Notes",
    setup() {
        // Lines of an earlier run go when the node runs again.
        api.addEventListener("executing", ({ detail }) => detail && removeWidget(nodeOf(detail), LINES))
        api.addEventListener("executed", ({ detail }) => show(detail.display_node ?? detail.node, detail.output?.sana))
        api.addEventListener("sana_note", ({ detail }) => {
            const earlier = findWidget(nodeOf(detail.node), LINES)?.value
            if (detail.node) show(detail.node, [...(earlier ? earlier.split("\n") : []), detail.text])
            addMessage("warn", detail.text, MILLISECONDS)
        })
        // ComfyUI's own message names the node, but not the reason. Our code may fail below a node of ComfyUI.
        api.addEventListener("execution_error", ({ detail }) => {
            const isOurs = detail.node_type.startsWith("SanaNodes") || detail.traceback.some(line => OURS.test(line))
            if (isOurs) addMessage("error", detail.exception_message.trim().split("\n")[0])
        })
    },
    // The outputs of an earlier run that is opened again.
    onNodeOutputsUpdated(outputs) {
        for (const [id, output] of Object.entries(outputs)) show(id, output?.sana)
    },
})
