"""MODEL and CONDITIONING to many pictures, on every device of this machine or of a cluster."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.batch.plan import LARGEST_CHUNK, LARGEST_SEED
from ..sana_core.checks import check_number, check_whole
from ..sana_core.guidance import LARGEST_GUIDANCE
from ..sana_core.latents import LARGEST_BATCH
from ..sana_core.sampling import SAMPLERS
from ..sana_core.schedules import LARGEST_STEPS
from .host.folders import list_devices
from .sampler import guidance_input, seed_input


class SanaNodesBatchSampler(io.ComfyNode):
    """
    Draws many pictures of one prompt or of a list of prompts, on all devices of this machine together.

    Picture i of each prompt uses seed + i and is the same whichever device draws it. The work is handed out in small
    parts, so that a slow card gets fewer and memory that runs out only makes the parts smaller. With a VAE the pictures
    are decoded too.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesBatchSampler",
            display_name="SANA Batch Sampler",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["multi gpu", "many pictures", "all gpus", "batch count", "parallel"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader."),
                io.Conditioning.Input("positive", tooltip="One prompt, or the prompts of SANA Prompt List."),
                io.Conditioning.Input(
                    "negative", tooltip="What the pictures should not show; usually the empty prompt."
                ),
                io.Latent.Input("latent_image", tooltip="One empty latent, for the size, or one picture's."),
                io.Int.Input("count", default=4, min=1, max=LARGEST_BATCH, tooltip="Pictures of each prompt."),
                seed_input(),
                io.Int.Input("steps", default=20, min=1, max=LARGEST_STEPS, tooltip="20 for flow_dpmpp_2m."),
                guidance_input("How closely to follow the prompt; 2 to 7 is usual."),
                io.Combo.Input(
                    "sampler",
                    options=list(SAMPLERS),
                    tooltip="flow_dpmpp_2m is SANA's own. scm is for SANA-Sprint alone.",
                ),
                io.Combo.Input(
                    "devices",
                    options=list_devices(),
                    tooltip="all: every accelerator of this machine. default: the one that the model is on. "
                    "cluster: every GPU of the cluster that this server's operator has configured.",
                ),
                io.Int.Input(
                    "chunk",
                    default=0,
                    min=0,
                    max=LARGEST_CHUNK,
                    advanced=True,
                    tooltip="Pictures that a device is handed at once; 0 finds a number that fits.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="The VAE of SANA Loader, to get pictures too."),
            ],
            outputs=[
                io.Latent.Output(),
                io.Image.Output(tooltip="The pictures, in the order of the prompts; nothing without a VAE."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, devices: str = "default"):
        # a workflow from a machine with more devices runs here too
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
        from .host.batch import sample_batch
        from .host.batch_inputs import Batch
        from .host.links import check_links
        from .host.report import show_under_node
        from .host.sampling import schedule

        check_links(model=model, positive=positive, negative=negative, latent_image=latent_image)
        if vae is not None:
            check_links(vae=vae)
        # widgets check their range, links do not
        check_whole("count", count, 1, LARGEST_BATCH)
        check_whole("seed", seed, 0, LARGEST_SEED)
        check_whole("chunk", chunk, 0, LARGEST_CHUNK)
        check_number("guidance", guidance, 0, LARGEST_GUIDANCE)
        sigmas = schedule(model, sampler, steps)
        batch = Batch(model, positive, negative, latent_image, count, seed, guidance, sampler, sigmas, chunk, vae)
        latent, images, text = sample_batch(batch, devices)
        show_under_node(text, cls.hidden.unique_id)
        return io.NodeOutput(latent, images)


NODES = [SanaNodesBatchSampler]
