// "Replace All" replaces the nodes of an absent pack with ours (nodes/replacements.py). The frontend leaves three things
// out, and this script does them. It does not call onAdded on the new nodes (1.47), so the classic renderer would show no
// text box. It does not move the nodes around a taller node (1.47). It does not count a new version of the graph (1.53
// and 1.58), so the canvas would draw the removed nodes, fail, and stop drawing.
import { app } from "../../scripts/app.js"

// Pixels: the height of a title, which is above its node's position, and the gap between two nodes.
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
        // All nodes are replaced in one task, so this runs after it and before the next frame. The new node may be
        // of another pack, such as ComfyUI's Conditioning (Set Timestep Range).
        queueMicrotask(() => node.graph?.incrementVersion?.())
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
            // Nodes 2.0 has measured the node after two frames.
            requestAnimationFrame(() => requestAnimationFrame(() => makeRoomBelow(node)))
        })
    },
})
