"""The node that checks this machine and its model files."""

from inspect import cleandoc

from comfy_api.latest import io, ui


class SanaNodesDoctor(io.ComfyNode):
    """
    Checks this machine and its SANA files, and writes one block to paste into a bug report: versions, the GPU,
    arithmetic against known results, and the kind of each file. It takes up to two minutes.
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
            ],
            outputs=[io.String.Output(display_name="report"), io.String.Output(display_name="json")],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, files: bool) -> float:
        # The report changes after a repair, so the node always runs.
        return float("nan")

    @classmethod
    def execute(cls, files: bool) -> io.NodeOutput:
        from .host.doctor import examine_host
        from .host.report import shown

        markdown, json, summary = examine_host(files)
        return io.NodeOutput(markdown, json, ui={**ui.PreviewText(markdown).as_dict(), **shown(summary)})


NODES = [SanaNodesDoctor]
