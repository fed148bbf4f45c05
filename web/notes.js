// A warning of a sampling, such as a size that the model was not trained for, as a message of the canvas. The text under
// a node is not enough: nobody sees it on a node inside a subgraph, and frontend 1.58 removes it when the run ends.
import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"

const MILLISECONDS = 20_000

app.registerExtension({
    name: "SANA.Notes",
    setup() {
        api.addEventListener("sana_note", ({ detail }) => {
            app.extensionManager.toast.add({ severity: "warn", summary: "SANA", detail: detail.text, life: MILLISECONDS })
        })
    },
})
