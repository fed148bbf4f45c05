// "Replace All" puts our nodes in the place of those of an absent pack (nodes/replacements.py). The canvas (frontend
// 1.47) does not tell these nodes that they were added, without which the classic renderer shows no text box of theirs,
// and leaves them on top of others where they are taller.
import { app } from "../../scripts/app.js"

// pixels: of a title, which lies above its node's place, and between two nodes
const TITLE = 30
const GAP = 20

function makeRoomBelow(node) {
    const [x, y] = node.pos
    const [width, height] = node.size
    for (const other of node.graph.nodes) {
        const [left, top] = other.pos
        const isBeside = left >= x + width || x >= left + other.size[0]
        if (other === node || isBeside || top < y || top - TITLE >= y + height) continue
        other.pos = [left, y + height + TITLE + GAP]
        makeRoomBelow(other)
    }
}

app.registerExtension({
    name: "SANA.ReplacedNodes",
    nodeCreated(node) {
        if (!node.comfyClass?.startsWith("SanaNodes")) return
        const onAdded = node.onAdded
        let wasAdded = false
        node.onAdded = function () {
            wasAdded = true
            return onAdded?.apply(this, arguments)
        }
        setTimeout(() => {
            if (wasAdded || !node.graph) return
            node.onAdded(node.graph)
            // Nodes 2.0 has measured it by then
            requestAnimationFrame(() => requestAnimationFrame(() => makeRoomBelow(node)))
        })
    },
})
