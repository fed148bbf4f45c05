"""A saved workflow as the nodes that run: those in subgraphs stand in their place, as the canvas queues them."""

NOTES = {"Note", "MarkdownNote"}
LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")


def expand(workflow, prefix="", graph=None, given=()):
    """The nodes that run as (id, node, {input: its source, or the value that a subgraph's widget gives it})."""
    held = {each["id"]: each for each in workflow["definitions"]["subgraphs"]} if "definitions" in workflow else {}
    graph = graph or {**workflow, "links": [dict(zip(LINK, link, strict=True)) for link in workflow["links"]]}
    nodes, links = {node["id"]: node for node in graph["nodes"]}, {link["id"]: link for link in graph["links"]}

    def source(link):
        """Where a link comes from: [id, output], or what the node that is this subgraph has been given."""
        key, slot, place, inner = link["origin_id"], link["origin_slot"], prefix, nodes.get(link["origin_id"])
        if key == -10:
            return given[slot]
        while inner["type"] in held:
            place, about = f"{place}{key}:", held[inner["type"]]
            (end,) = [each for each in about["links"] if each["id"] in about["outputs"][slot]["linkIds"]]
            key, slot = end["origin_id"], end["origin_slot"]
            inner = next(node for node in about["nodes"] if node["id"] == key)
        return [f"{place}{key}", slot]

    for node in nodes.values():
        values = iter(node["widgets_values"])
        if node["type"] in held:
            own = [next(values) if "widget" in entry else None for entry in node["inputs"]]
            ends = [entry["link"] for entry in node["inputs"]]
            own = [source(links[end]) if end else value for end, value in zip(ends, own, strict=True)]
            yield from expand(workflow, f"{prefix}{node['id']}:", held[node["type"]], own)
        elif node["type"] not in NOTES:
            linked = {entry["name"]: source(links[entry["link"]]) for entry in node["inputs"] if entry["link"]}
            yield f"{prefix}{node['id']}", node, linked
