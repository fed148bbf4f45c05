"""The nodes, one capability a file."""

from comfy_api.latest import ComfyExtension, io

from . import (
    batch,
    controlnet,
    custom_sampling,
    decode,
    doctor,
    edit,
    guidance,
    latent,
    loader,
    lora,
    model_switch,
    plan,
    prompt_list,
    replacements,
    sampler,
    scorer,
    split,
    text,
    training,
    video,
)


class SanaExtension(ComfyExtension):
    async def on_load(self) -> None:
        await replacements.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        loading = (loader, model_switch, lora, controlnet)
        inference = (text, prompt_list, latent, video, guidance, split, sampler, batch, custom_sampling, decode, scorer)
        modules = (*loading, *inference, edit, training, plan, doctor)
        return [node for module in modules for node in module.NODES]


async def comfy_entrypoint() -> SanaExtension:
    from .host.compat.internals import check_host

    check_host()
    # After the check, because it needs a ComfyUI of today.
    from .host.folders import add_result_folders

    add_result_folders()
    return SanaExtension()
