"""The nodes, one capability a file."""

from comfy_api.latest import ComfyExtension, io

from . import decode, latent, loader, sampler, text


class SanaExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [node for module in (loader, text, latent, sampler, decode) for node in module.NODES]


async def comfy_entrypoint() -> SanaExtension:
    return SanaExtension()
