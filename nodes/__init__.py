"""The nodes, one capability a file."""

from comfy_api.latest import ComfyExtension, io

from . import decode, latent, loader, plan, sampler, text


class SanaExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [node for module in (loader, text, latent, sampler, decode, plan) for node in module.NODES]


async def comfy_entrypoint() -> SanaExtension:
    return SanaExtension()
