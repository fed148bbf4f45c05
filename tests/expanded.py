"""A saved workflow as the canvas queues it: the nodes inside subgraphs take the place of their subgraph.

Muted and bypassed nodes run here too, so that tests reach them.
"""

DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", DYNAMIC}
NOTES = {"Note", "MarkdownNote"}
LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")


def expand(workflow, prefix="", graph=None, given=()):
    """The nodes that run as (id, node, {input: its source, or the value that a subgraph's widget gives it})."""
    held = (
        {definition["id"]: definition for definition in workflow["definitions"]["subgraphs"]}
        if "definitions" in workflow
        else {}
    )
    graph = graph or {**workflow, "links": [dict(zip(LINK, link, strict=True)) for link in workflow["links"]]}
    nodes, links = {node["id"]: node for node in graph["nodes"]}, {link["id"]: link for link in graph["links"]}

    def source(link):
        """The source of a link: [id, output], or the value that the node of this subgraph received."""
        key, slot, place, inner = link["origin_id"], link["origin_slot"], prefix, nodes.get(link["origin_id"])
        if key == -10:
            return given[slot]
        while inner["type"] in held:
            place, about = f"{place}{key}:", held[inner["type"]]
            (end,) = [
                definition for definition in about["links"] if definition["id"] in about["outputs"][slot]["linkIds"]
            ]
            key, slot = end["origin_id"], end["origin_slot"]
            inner = next(node for node in about["nodes"] if node["id"] == key)
        return [f"{place}{key}", slot]

    for node in nodes.values():
        values = iter(node["widgets_values"])
        if node["type"] in held:
            widget_values = [next(values) if "widget" in entry else None for entry in node["inputs"]]
            ends = [entry["link"] for entry in node["inputs"]]
            widget_values = [
                source(links[end]) if end else value for end, value in zip(ends, widget_values, strict=True)
            ]
            yield from expand(workflow, f"{prefix}{node['id']}:", held[node["type"]], widget_values)
        elif node["type"] not in NOTES:
            linked = {entry["name"]: source(links[entry["link"]]) for entry in node["inputs"] if entry["link"]}
            yield f"{prefix}{node['id']}", node, linked


def unfold(fields):
    """`fields` with the inputs that the first choice of each dynamic combo brings, behind it."""
    out = {}
    for name, (kind, *options) in fields.items():
        out[name] = (kind, *options)
        if kind == DYNAMIC:
            chosen = options[0]["options"][0]["inputs"]
            widget_values = {**chosen.get("required", {}), **chosen.get("optional", {})}
            out |= {f"{name}.{key}": value for key, value in widget_values.items()}
    return out


def to_graph(workflow, inputs_of):
    """The graph {id: (node, inputs)} that the canvas queues for `workflow`: widgets go by their order in the schema.

    `inputs_of` is a function of a node's name that returns its schema.
    """
    graph = {}
    for key, node, linked in expand(workflow):
        types = inputs_of(node["type"])
        fields = {**types.get("required", {}), **types.get("optional", {})}
        names = [entry["name"] for entry in node["inputs"]]
        if any(kind == DYNAMIC for kind, *_ in fields.values()):
            fields = unfold(fields)
        # a node may have learnt optional inputs since; the canvas gives them their defaults
        assert set(types.get("required", {})) <= set(names) <= set(fields), node["type"]
        # the canvas writes sockets first, and widgets in the order of the schema
        widgets = [
            name
            for name in names
            if (isinstance(fields[name][0], list | tuple) or fields[name][0] in WIDGETS)
            and not (len(fields[name]) > 1 and fields[name][1].get("forceInput"))
        ]
        assert widgets == [name for name in fields if name in widgets], node["type"]
        values = iter(node["widgets_values"])
        inputs = {}
        for name in names:
            _, *options = fields[name]
            if name in widgets:
                inputs[name] = next(values)
                if options and options[0].get("control_after_generate"):
                    assert next(values) in ("fixed", "randomize")
        assert not list(values), node["type"]
        graph[key] = (node["type"], {**inputs, **linked})
    return graph
