"""The node that checks this machine and its model files."""

from inspect import cleandoc

from comfy_api.latest import io, ui


class SanaNodesDoctor(io.ComfyNode):
    """
    Checks this machine and its SANA files, and writes one block to paste into a bug report: versions, the GPU, its
    kernels, and the kind of each file. It takes up to two minutes.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesDoctor",
            display_name="SANA Doctor",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana check", "bug report", "diagnose"],
            inputs=[
                io.Boolean.Input(
                    "files",
                    default=True,
                    tooltip="Also check the SANA files in ComfyUI's models folders.",
                ),
                io.Boolean.Input(
                    "always",
                    default=False,
                    optional=True,
                    tooltip="Check again at each run. Off: only if a model file has changed or ComfyUI was restarted.",
                ),
            ],
            outputs=[io.String.Output(display_name="report"), io.String.Output(display_name="json")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, files: bool | None = True, always: bool | None = False) -> float | str:
        from .host.doctor import model_files
        from .host.file_stats import linked_file_stat

        # ComfyUI passes None for a link. NaN differs from itself, so the node runs.
        if always is not False:
            return float("nan")
        return "" if files is False else linked_file_stat(model_files)

    @classmethod
    def execute(cls, files: bool, always: bool = False) -> io.NodeOutput:
        from .host.doctor import examine_host
        from .host.report import shown

        markdown, json, summary = examine_host(files)
        return io.NodeOutput(markdown, json, ui={**ui.PreviewText(markdown).as_dict(), **shown(summary)})


NODES = [SanaNodesDoctor]
