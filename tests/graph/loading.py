"""Shared by tests of graphs: nodes added to the base graph, a ControlNet, and the forward of a loaded model."""

import layouts
import pytest
import torch
from diffusers import SanaControlNetModel

from sana_core.checkpoints.headers import read_file

KSAMPLER = {"cfg": 4.5, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
KEPT = ("model", "positive", "negative", "latent_image", "seed", "steps")


def component(checkpoint, folder):
    """Tensors and configuration of a component of the bundled checkpoint."""
    file = next((checkpoint / folder).glob("*.safetensors"))
    return read_file(file), (checkpoint / folder / "config.json").read_text()


def catch_all(node):
    return {f"catch {slot}": ("Catch", {"value": [node, slot], "name": str(slot)}) for slot in range(3)}


def interrupted_steps(host, graph, monkeypatch):
    """Run `graph`, cancel at the first report of progress, and return the number of reports until it ended."""
    import comfy.model_management as management

    reports = []

    def callback(*args, **kwargs):
        reports.append(args)
        management.interrupt_current_processing()

    monkeypatch.setattr("comfy.utils.ProgressBar.update_absolute", callback)
    with pytest.raises(InterruptedError):
        host.run(graph)
    return len(reports)


def through(graph, node, name="patch", **inputs):
    """Put `node` between the sampler of `graph` and what gives it its MODEL; return `graph`."""
    graph[name] = (node, {"model": graph["sample"][1]["model"], **inputs})
    graph["sample"][1]["model"] = [name, 0]
    return graph


def model_node(change):
    """Return the class of a pack's node that gives a clone of its MODEL to `change`, and returns the clone."""

    class ModelNode:
        RETURN_TYPES, FUNCTION = ("MODEL",), "run"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"model": ("MODEL",)}}

        def run(self, model):
            clone = model.clone()
            change(clone)
            return (clone,)

    return ModelNode


def ksampler(graph, **inputs):
    """`graph` with core's KSampler in the place of SANA Sampler."""
    saved = {key: graph["sample"][1][key] for key in KEPT}
    return {**graph, "sample": ("KSampler", {**saved, **KSAMPLER, **inputs})}


def controlled(graph, name, image, reference="diffusers", vae=True, **strength):
    """Put a ControlNet's file and core's Apply ControlNet before the sampler of `graph`; return `graph`."""
    graph["edges"] = ("AnyValue", {"value": image})
    graph["control"] = ("SanaNodesControlNetLoader", {"control_net_name": name, "reference": reference})
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["control", 0]}
    inputs |= {"image": ["edges", 0], "strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, **strength}
    graph["apply"] = ("ControlNetApplyAdvanced", {**inputs, **({"vae": ["load", 2]} if vae else {})})
    graph["sample"][1].update(positive=["apply", 0], negative=["apply", 1])
    return graph


def random_controlnet(layers=3):
    """As wide as the bundled transformer, and strong enough to see."""
    torch.manual_seed(5)
    width = {"cross_attention_head_dim": 32, "cross_attention_dim": 160, "caption_channels": 64, "sample_size": 4}
    heads = {"num_attention_heads": 5, "num_cross_attention_heads": 5}
    model = SanaControlNetModel(num_layers=layers, interpolation_scale=1.0, **heads, **width)
    for layer in (model.input_block, *model.controlnet_blocks):
        torch.nn.init.normal_(layer.weight, std=0.03)
    return model.train(False)


def check_forward(patcher, model, tolerance=1e-5):
    x, context = torch.randn(1, 32, 3, 5), torch.randn(1, 7, layouts.CAPTION)
    sigma = torch.tensor([0.7])
    with torch.inference_mode():
        ours = patcher.model.apply_model(x, sigma, c_crossattn=context)
        theirs = x - 0.7 * model.float()(x, context, sigma * 1000).sample
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
