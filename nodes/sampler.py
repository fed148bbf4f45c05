"""MODEL, CONDITIONING and noise to LATENT."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.latents import check_number
from ..sana_core.sampling import SAMPLERS

LARGEST_SEED = 2**64 - 1
LARGEST_STEPS = 1000
LARGEST_GUIDANCE = 100.0


class SanaSampler(io.ComfyNode):
    """
    Draws pictures with the sampler and the schedule that SANA's own demo uses.

    Picture k of a batch uses seed + k, so that it is the same picture when drawn alone.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaSampler",
            display_name="SANA Sampler",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["flow dpm solver", "flow euler", "ksampler sana"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader."),
                io.Conditioning.Input("positive", tooltip="What the picture should show."),
                io.Conditioning.Input("negative", tooltip="What it should not; usually the empty prompt."),
                io.Latent.Input("latent_image", tooltip="From SANA Empty Latent, or any empty latent."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=LARGEST_SEED,
                    control_after_generate=True,
                    tooltip="The same seed gives the same picture.",
                ),
                io.Int.Input(
                    "steps",
                    default=20,
                    min=1,
                    max=LARGEST_STEPS,
                    tooltip="20 for flow_dpmpp_2m, 28 for flow_euler; below 15 quality falls.",
                ),
                io.Float.Input(
                    "guidance",
                    default=4.5,
                    min=0.0,
                    max=LARGEST_GUIDANCE,
                    step=0.1,
                    round=0.01,
                    tooltip="How closely to follow the prompt; 2 to 7 is usual. 1 is twice as fast, without negative.",
                ),
                io.Combo.Input(
                    "sampler", options=list(SAMPLERS), tooltip="flow_dpmpp_2m is SANA's own, with its timesteps."
                ),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls, model, positive, negative, latent_image, seed: int, steps: int, guidance: float, sampler: str
    ) -> io.NodeOutput:
        from .host.sampling import sample

        # widgets check their range, links do not
        check_number("seed", seed, 0, LARGEST_SEED)
        check_number("steps", steps, 1, LARGEST_STEPS)
        check_number("guidance", guidance, 0, LARGEST_GUIDANCE)
        return io.NodeOutput(sample(model, positive, negative, latent_image, seed, steps, guidance, sampler))


NODES = [SanaSampler]
