"""MODEL, CONDITIONING and noise to LATENT, on one device or on many, and the parts of SamplerCustomAdvanced."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.batch.plan import LARGEST_COUNT, LARGEST_SEED
from ..sana_core.model.known_models import GUIDANCE, INTERMEDIATE_TIMESTEP, MAX_TIMESTEP, SPRINT
from ..sana_core.model.latents import LARGEST_BATCH
from ..sana_core.runtime.checks import check_number, check_whole
from ..sana_core.sampling.guidance import LARGEST_GUIDANCE
from ..sana_core.sampling.samplers import SAMPLERS
from ..sana_core.sampling.schedules import LARGEST_STEPS, last_steps, scm_sigmas
from .host.folders import list_devices


def seed_input() -> io.Int.Input:
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=LARGEST_SEED,
        control_after_generate=True,
        tooltip="The same seed gives the same image.",
    )


def guidance_input(tooltip: str) -> io.Float.Input:
    return io.Float.Input(
        "guidance", default=GUIDANCE, min=0.0, max=LARGEST_GUIDANCE, step=0.1, round=0.01, tooltip=tooltip
    )


def sampler_input() -> io.Combo.Input:
    tooltip = "flow_dpmpp_2m is SANA's own. scm is only for SANA-Sprint, flow_dmd for SANA-Video 2.0's preview."
    return io.Combo.Input("sampler", options=list(SAMPLERS), tooltip=tooltip)


class SanaNodesSampler(io.ComfyNode):
    """
    Generates images with the sampler and schedule of SANA's own demo.

    Image k of a batch uses seed + k, so you can generate it again alone. Switch model_defaults on to use the authors'
    steps, guidance and sampler for the loaded model.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesSampler",
            display_name="SANA Sampler",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana", "flow dpm solver", "flow euler", "ksampler sana"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader."),
                io.Conditioning.Input("positive", tooltip="What the image should show."),
                io.Conditioning.Input("negative", tooltip="What it should not; usually the empty prompt."),
                io.Latent.Input("latent_image", tooltip="From SANA Empty Latent; for image to image, from VAE Encode."),
                seed_input(),
                io.Int.Input(
                    "steps",
                    default=0,
                    min=0,
                    max=LARGEST_STEPS,
                    tooltip="0: the model's number, such as 20. 28 for flow_euler; below 15 quality falls.",
                ),
                guidance_input(
                    "How closely to follow the prompt; 2 to 7 is usual. At 1 it is twice as fast, without negative."
                ),
                sampler_input(),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="How much of a connected image to change: 1 all, 0 nothing.",
                ),
                io.Boolean.Input(
                    "model_defaults",
                    default=False,
                    optional=True,
                    tooltip="On: uses the authors' settings for the loaded model and ignores steps, guidance and "
                    "sampler.",
                ),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls,
        model,
        positive,
        negative,
        latent_image,
        seed: int,
        steps: int,
        guidance: float,
        sampler: str,
        denoise: float = 1.0,
        model_defaults: bool = False,
    ) -> io.NodeOutput:
        from .host.links import check_links
        from .host.sampling.sampler import Sampling, defaults_of, sample, schedule

        check_links(model=model, positive=positive, negative=negative, latent_image=latent_image)
        if model_defaults:
            sampler, steps, guidance = defaults_of(model, latent_image)
        elif steps == 0:
            steps = defaults_of(model, latent_image).steps
        # widgets check their range, links do not
        check_whole("seed", seed, 0, LARGEST_SEED)
        check_number("guidance", guidance, 0, LARGEST_GUIDANCE)
        sampling = Sampling(sampler, schedule(model, sampler, steps, denoise), guidance, seed)
        return io.NodeOutput(sample(model, positive, negative, latent_image, sampling))


class SanaNodesSprint(io.ComfyNode):
    """
    Generates images with a SANA-Sprint model in 1 to 4 steps.

    Guidance is part of the model: there is no negative prompt, and a step takes half as long as with SANA Sampler. For
    image to image connect the latent of an image and set strength below 1.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesSprint",
            display_name="SANA Sprint",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["scm", "sana sprint", "one step", "lcm sana"],
            inputs=[
                io.Model.Input("model", tooltip="A SANA-Sprint model from SANA Loader."),
                io.Conditioning.Input("positive", tooltip="What the image should show."),
                io.Latent.Input("latent_image", tooltip="From SANA Empty Latent; for image to image, from VAE Encode."),
                seed_input(),
                io.Int.Input("steps", default=2, min=1, max=LARGEST_STEPS, tooltip="1, 2 or 4 are usual."),
                guidance_input("How closely to follow the prompt. It costs no time."),
                io.Float.Input(
                    "strength",
                    optional=True,
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="For image to image: 1 changes all; below 1 the first steps are skipped.",
                ),
                io.Float.Input(
                    "max_timestep",
                    optional=True,
                    default=MAX_TIMESTEP,
                    min=0.0001,
                    max=MAX_TIMESTEP,
                    step=0.0001,
                    round=0.00001,
                    advanced=True,
                    tooltip="The angle of the first step; 1.5708 is pure noise.",
                ),
                io.Float.Input(
                    "intermediate_timestep",
                    optional=True,
                    default=INTERMEDIATE_TIMESTEP,
                    min=0.0001,
                    max=MAX_TIMESTEP,
                    step=0.01,
                    round=0.00001,
                    advanced=True,
                    tooltip="The angle of the second of two steps; not used with other numbers of steps.",
                ),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls,
        model,
        positive,
        latent_image,
        seed: int,
        steps: int,
        guidance: float,
        strength: float = 1.0,
        max_timestep: float = MAX_TIMESTEP,
        intermediate_timestep: float = INTERMEDIATE_TIMESTEP,
    ) -> io.NodeOutput:
        from .host.links import check_links
        from .host.sampling.sampler import Sampling, sample, sampler_for

        check_links(model=model, positive=positive, latent_image=latent_image)
        check_whole("seed", seed, 0, LARGEST_SEED)
        check_number("guidance", guidance, 0, LARGEST_GUIDANCE)
        sigmas = last_steps(scm_sigmas(steps, max_timestep, intermediate_timestep), strength)
        sampler_for(model, SPRINT)
        sampling = Sampling(SPRINT, sigmas, guidance, seed)
        return io.NodeOutput(sample(model, positive, positive, latent_image, sampling))


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


class SanaNodesScheduler(io.ComfyNode):
    """
    The sigmas of SANA's schedules for SamplerCustomAdvanced, with the shift of the model.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesScheduler",
            display_name="SANA Scheduler",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["flow sigmas", "sana sigmas", "basic scheduler sana"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The schedule uses its shift. Put ModelSamplingSD3 before this node to change it."
                ),
                io.Combo.Input(
                    "sampler",
                    options=list(SAMPLERS),
                    tooltip="Choose the same as in SANA Sampler Select; scm is for SANA-Sprint.",
                ),
                io.Int.Input("steps", default=20, min=1, max=LARGEST_STEPS, tooltip="Steps of the sampling."),
                io.Float.Input(
                    "denoise",
                    optional=True,
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="1 for a new image; below 1 the end of a longer schedule, for image to image.",
                ),
            ],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, model, sampler: str, steps: int, denoise: float = 1.0) -> io.NodeOutput:
        from .host.links import check_links
        from .host.sampling.sampler import schedule

        check_links(model=model)
        return io.NodeOutput(schedule(model, sampler, steps, denoise))


class SanaNodesSamplerSelect(io.ComfyNode):
    """
    A SANA sampler for SamplerCustomAdvanced.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesSamplerSelect",
            display_name="SANA Sampler Select",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["flow dpm solver", "ksampler select sana", "scm"],
            inputs=[sampler_input()],
            outputs=[io.Sampler.Output()],
        )

    @classmethod
    def execute(cls, sampler: str) -> io.NodeOutput:
        from .host.sampling.sampler import FlowSampler

        return io.NodeOutput(FlowSampler(sampler))


NODES = [SanaNodesSampler, SanaNodesSprint, SanaNodesBatchSampler, SanaNodesScheduler, SanaNodesSamplerSelect]
