"""The nodes, one capability a file."""

from comfy_api.latest import ComfyExtension, io

from . import (
    batch,
    controlnet,
    custom_sampling,
    decode,
    guidance,
    latent,
    loader,
    lora,
    plan,
    prompt_list,
    sampler,
    text,
)


class SanaExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        loading = (loader, lora, controlnet)
        modules = (*loading, text, prompt_list, latent, guidance, sampler, batch, custom_sampling, decode, plan)
        return [node for module in modules for node in module.NODES]


async def comfy_entrypoint() -> SanaExtension:
    from .host.version import check_host

    check_host()
    return SanaExtension()
