"""MODEL and CONDITIONING to many images, on every device of this machine or of a cluster."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.batch.plan import LARGEST_COUNT, LARGEST_SEED
from ..sana_core.model.latents import LARGEST_BATCH
from ..sana_core.runtime.checks import check_number, check_whole
from ..sana_core.sampling.guidance import LARGEST_GUIDANCE
from ..sana_core.sampling.schedules import LARGEST_STEPS
from .host.folders import list_devices
from .sampler import guidance_input, sampler_input, seed_input


class SanaNodesBatchSampler(io.ComfyNode):
    """
    Generates many images of one prompt or of a list of prompts, on all GPUs of this computer.

    Image i of each prompt uses seed + i and is the same whichever GPU makes it. A slow GPU gets fewer images; if memory
    runs out, it makes fewer at once. With a VAE the images are decoded too.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesBatchSampler",
            display_name="SANA Batch Sampler",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["multi gpu", "many images", "many pictures", "all gpus", "batch count", "parallel"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader."),
                io.Conditioning.Input("positive", tooltip="One prompt, or the prompts of SANA Prompt List."),
                io.Conditioning.Input("negative", tooltip="What the images should not show; usually the empty prompt."),
                io.Latent.Input("latent_image", tooltip="One empty latent, for the size, or the latent of one image."),
                io.Int.Input("count", default=4, min=1, max=LARGEST_BATCH, tooltip="Images of each prompt."),
                seed_input(),
                io.Int.Input("steps", default=20, min=1, max=LARGEST_STEPS, tooltip="20 for flow_dpmpp_2m."),
                guidance_input("How closely to follow the prompt; 2 to 7 is usual."),
                sampler_input(),
                io.Combo.Input(
                    "devices",
                    options=list_devices(),
                    tooltip="all: every GPU of this computer. default: the one of the model. cluster: every GPU of the "
                    "Ray cluster, if the server has one.",
                ),
                io.Int.Input(
                    "chunk",
                    default=0,
                    min=0,
                    max=LARGEST_COUNT,
                    advanced=True,
                    tooltip="Images that a device works on at once; 0 finds a number that fits.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="The VAE of SANA Loader, to get images too."),
            ],
            outputs=[
                io.Latent.Output(),
                io.Image.Output(tooltip="The images, in the order of the prompts; nothing without a VAE."),
            ],
        )

    @classmethod
    def validate_inputs(cls, devices: str = "default"):
        # Accept any device, because workflows come from machines with other devices.
        return True

    @classmethod
    def execute(
        cls,
        model,
        positive,
        negative,
        latent_image,
        count: int,
        seed: int,
        steps: int,
        guidance: float,
        sampler: str,
        devices: str,
        chunk: int,
        vae=None,
    ) -> io.NodeOutput:
        from .host.batch.job import BatchInputs
        from .host.batch.run import sample_batch
        from .host.links import check_links
        from .host.report import shown
        from .host.sampling.sampler import schedule

        check_links(model=model, positive=positive, negative=negative, latent_image=latent_image)
        if vae is not None:
            check_links(vae=vae)
        # ComfyUI checks the range of widgets, but not of values from links.
        check_whole("count", count, 1, LARGEST_BATCH)
        check_whole("seed", seed, 0, LARGEST_SEED)
        check_whole("chunk", chunk, 0, LARGEST_COUNT)
        check_number("guidance", guidance, 0, LARGEST_GUIDANCE)
        sigmas = schedule(model, sampler, steps)
        batch = BatchInputs(model, positive, negative, latent_image, count, seed, guidance, sampler, sigmas, chunk, vae)
        latent, images, text = sample_batch(batch, devices)
        return io.NodeOutput(latent, images, ui=shown(text))


NODES = [SanaNodesBatchSampler]
