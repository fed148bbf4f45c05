"""The nodes with SANA's schedules and samplers for ComfyUI's SamplerCustomAdvanced."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.sampling.samplers import SAMPLERS
from ..sana_core.sampling.schedules import LARGEST_STEPS

NAMES = list(SAMPLERS)


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
                    options=NAMES,
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
            inputs=[
                io.Combo.Input(
                    "sampler",
                    options=NAMES,
                    tooltip="flow_dpmpp_2m is SANA's own. scm is only for SANA-Sprint, flow_dmd for SANA-Video 2.0's "
                    "preview.",
                )
            ],
            outputs=[io.Sampler.Output()],
        )

    @classmethod
    def execute(cls, sampler: str) -> io.NodeOutput:
        from .host.sampling.sampler import FlowSampler

        return io.NodeOutput(FlowSampler(sampler))


NODES = [SanaNodesScheduler, SanaNodesSamplerSelect]
