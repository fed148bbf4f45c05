"""NVIDIA's text to image in 4K for ExtraModels' fork, as the canvas saves it.

Nodes, positions, sizes and values are copied from asset/docs/ComfyUI/Sana_FlowEuler_4K.json in NVlabs/Sana.
"""

# type, place, size, values, inputs as (name, type, link), outputs as (name, type, links)
NODES = {
    130: (
        "SanaCheckpointLoader",
        (2526, 1376),
        (315, 106),
        ["Efficient-Large-Model/Sana_1600M_4Kpx_BF16", "SanaMS_1600M_P1_D20_4K", "BF16"],
        [],
        [("model", "MODEL", [135])],
    ),
    127: (
        "SanaResolutionSelect",
        (2517, 1548),
        (315, 102),
        ["4K", "1.00"],
        [],
        [("width", "INT", [139]), ("height", "INT", [140])],
    ),
    122: (
        "GemmaLoader",
        (2500, 1759),
        (315, 106),
        ["Efficient-Large-Model/gemma-2-2b-it", "cuda", "BF16"],
        [],
        [("GEMMA", "GEMMA", [142, 143])],
    ),
    125: (
        "EmptySanaLatentImage",
        (2934, 1446),
        (315, 106),
        [512, 512, 1],
        [("width", "INT", 139), ("height", "INT", 140)],
        [("LATENT", "LATENT", [138])],
    ),
    128: (
        "SanaTextEncode",
        (2865, 1711),
        (400, 200),
        ["a dog and a cat"],
        [("GEMMA", "GEMMA", 142)],
        [("CONDITIONING", "CONDITIONING", [136])],
    ),
    129: (
        "GemmaTextEncode",
        (2862, 1963),
        (400, 200),
        [""],
        [("GEMMA", "GEMMA", 143)],
        [("CONDITIONING", "CONDITIONING", [137])],
    ),
    124: (
        "KSampler",
        (3312, 1346),
        (300, 480),
        [1057228702589645, "fixed", 28, 2, "euler", "normal", 1],
        [
            ("model", "MODEL", 135),
            ("positive", "CONDITIONING", 136),
            ("negative", "CONDITIONING", 137),
            ("latent_image", "LATENT", 138),
        ],
        [("LATENT", "LATENT", [133])],
    ),
    123: (
        "ExtraVAELoader",
        (3325, 1989),
        (315, 106),
        ["mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers", "dcae-f32c32-sana-1.0-diffusers", "BF16"],
        [],
        [("VAE", "VAE", [146])],
    ),
    121: (
        "VAEDecode",
        (3658, 1352),
        (200, 50),
        [],
        [("samples", "LATENT", 133), ("vae", "VAE", 146)],
        [("IMAGE", "IMAGE", [141])],
    ),
    126: ("PreviewImage", (3685, 1464), (606, 666), [], [("images", "IMAGE", 141)], []),
}


def workflow() -> dict:
    """Return it in the canvas's format of that time."""
    nodes, links, sources = [], [], {}
    for order, (number, (kind, place, size, values, inputs, outputs)) in enumerate(NODES.items()):
        slots = [{"name": name, "type": type_, "link": link} for name, type_, link in inputs]
        for slot in slots:
            if slot["type"] == "INT":
                slot["widget"] = {"name": slot["name"]}
        nodes.append(
            {
                "id": number,
                "type": kind,
                "pos": list(place),
                "size": list(size),
                "flags": {},
                "order": order,
                "mode": 0,
                "inputs": slots,
                "outputs": [{"name": name, "type": type_, "links": outcome} for name, type_, outcome in outputs],
                "properties": {"Node name for S&R": kind},
                "widgets_values": list(values),
            }
        )
        for place_, (_, type_, outcome) in enumerate(outputs):
            sources |= {link: (number, place_, type_) for link in outcome}
    for number, (*_, inputs, _outputs) in NODES.items():
        for place_, (_, _, link) in enumerate(inputs):
            source, output, type_ = sources[link]
            links.append([link, source, output, number, place_, type_])
    return {"last_node_id": 131, "last_link_id": 146, "nodes": nodes, "links": links, "groups": [], "version": 0.4}
