"""The host's own executor in this process, with its core nodes and this pack."""

import asyncio
import os
import sys
import uuid

import torch
from checkpoints import link_tiny
from setup import ROOT, comfyui_path


class Catch:
    """An output node that hands its input to the test."""

    RETURN_TYPES = ()
    FUNCTION = "catch"
    OUTPUT_NODE = True
    caught: dict = {}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("*",), "name": ("STRING",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def catch(self, value, name):
        self.caught[name] = value
        return {}


class AnyValue:
    """A value through a link of any type, whose range and membership core does not check."""

    RETURN_TYPES = ("*",)
    FUNCTION = "give"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def give(self, value):
        return (value,)


class NodeError(Exception):
    """A node of the graph failed with this message."""


LOADERS = {f"SanaNodes{part}Loader" for part in ("", "Model", "TextEncoder", "VAE", "ControlNet", "Scorer")}


class Host:
    """Runs graphs as ComfyUI's prompt worker does."""

    # Results of LOADERS by ComfyUI's cache key, which `run` uses again. None: each graph loads its files.
    loaded: dict | None = None

    def __init__(self, base):
        sys.path.insert(0, str(comfyui_path()))
        # `main.py` sets this for a base directory. The pack is inside under another name, as users have it.
        from comfy.cli_args import args

        args.cpu = not torch.cuda.is_available()
        args.base_directory = str(base)
        # This folder contains no frontend, because no canvas is served.
        args.front_end_root = str(base)
        args.preview_method = type(args.preview_method).Auto
        (base / "custom_nodes").mkdir()
        link_tiny(base)
        os.symlink(ROOT, base / "custom_nodes" / "sana.nodes-1")

        import execution
        from server import PromptServer

        import nodes

        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.server = PromptServer(self.loop)
        self.loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=True, init_api_nodes=False))
        nodes.NODE_CLASS_MAPPINGS.update(Catch=Catch, AnyValue=AnyValue)
        self.nodes = nodes
        self.execution = execution
        self.executor = execution.PromptExecutor(
            self.server, execution.CacheType.CLASSIC, {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}
        )
        self.models, self.output = base / "models", base / "output"

    def run(self, graph, keep_cache=False):
        """Run `graph` {id: (class_type, inputs)}; return what its Catch nodes got. Raises NodeError.

        `keep_cache`: nodes that have not changed since the last graph do not run again.
        """
        prompt = {key: {"class_type": name, "inputs": inputs} for key, (name, inputs) in graph.items()}
        prompt_id = uuid.uuid4().hex
        valid, error, outputs, node_errors = self.loop.run_until_complete(
            self.execution.validate_prompt(prompt_id, prompt, None)
        )
        if not valid:
            raise NodeError(f"{error} {node_errors}")
        if not keep_cache:
            self.executor.reset()
        if self.loaded is not None:
            self.executor.caches.outputs.cache.update(self.loaded)
        Catch.caught = {}
        self.loop.run_until_complete(self.executor.execute_async(prompt, prompt_id, {}, outputs))
        if self.loaded is not None:
            cache = self.executor.caches.outputs
            keys = [cache.cache_key_set.get_data_key(key) for key, (kind, _) in graph.items() if kind in LOADERS]
            self.loaded.update((key, cache.cache[key]) for key in keys if key in cache.cache)
        for event, data in self.executor.status_messages:
            if event == "execution_error":
                raise NodeError(data["exception_message"].strip())
            if event == "execution_interrupted":
                raise InterruptedError(data["node_id"])
        return Catch.caught

    def output_of(self, node, slot=0, linked=None, **inputs):
        """What `node` gives by itself; values in `linked` come to it by links, which core does not check."""
        values = {f"linked {field}": ("AnyValue", {"value": value}) for field, value in (linked or {}).items()}
        inputs |= {field: [f"linked {field}", 0] for field in linked or {}}
        catch = ("Catch", {"value": ["node", slot], "name": "output"})
        return self.run({**values, "node": (node, inputs), "catch": catch})["output"]
