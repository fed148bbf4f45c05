"""The nodes. A file has the nodes of one step of a workflow, and computer.py the nodes about the computer."""

from comfy_api.latest import ComfyExtension, io

from . import computer, decode, latent, loader, model, replacements, sampler, text, training


class SanaExtension(ComfyExtension):
    async def on_load(self) -> None:
        await replacements.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        modules = (loader, text, latent, model, sampler, decode, training, computer)
        return [node for module in modules for node in module.NODES]


async def comfy_entrypoint() -> SanaExtension:
    from .host.compat import check_host

    check_host()
    # After the check, because it needs a ComfyUI of today.
    from .host.folders import add_result_folders

    add_result_folders()
    return SanaExtension()
