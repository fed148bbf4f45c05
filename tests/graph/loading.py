"""What tests of loaders share: nodes that catch an output, and the forward of what was loaded."""

import layouts
import torch

from sana_core.checkpoints.headers import read_file


def component(checkpoint, folder):
    """Tensors and configuration of a component of the bundled checkpoint."""
    file = next((checkpoint / folder).glob("*.safetensors"))
    return read_file(file), (checkpoint / folder / "config.json").read_text()


def catch(node, slot):
    return {f"catch {slot}": ("Catch", {"value": [node, slot], "name": str(slot)})}


def catch_all(node):
    return {**catch(node, 0), **catch(node, 1), **catch(node, 2)}


def check_forward(patcher, model, tolerance=1e-5):
    x, context = torch.randn(1, 32, 3, 5), torch.randn(1, 7, layouts.CAPTION)
    sigma = torch.tensor([0.7])
    with torch.inference_mode():
        ours = patcher.model.apply_model(x, sigma, c_crossattn=context)
        theirs = x - 0.7 * model.float()(x, context, sigma * 1000).sample
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
