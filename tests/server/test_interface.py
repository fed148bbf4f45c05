"""Saved workflows hold node ids, names of inputs and the order of outputs: these never change.

New entries are added to tests/graphs/interface.json. Existing entries may neither be removed nor change.
"""

import json

import pytest
from host import get
from setup import ROOT

INTERFACE = json.loads((ROOT / "tests" / "graphs" / "interface.json").read_text())


def kind(entry):
    """The type of an input; the options of a list are no part of the interface."""
    return "COMBO" if isinstance(entry[0], list) else entry[0]


@pytest.fixture(scope="module")
def interface(server):
    """The interface of the pack's nodes, from /object_info."""
    info = json.loads(get(server, "/object_info"))
    return {
        name: {
            # A workflow does not hold hidden inputs.
            "inputs": {
                field: kind(entry)
                for part, entries in node["input"].items()
                if part != "hidden"
                for field, entry in entries.items()
            },
            "outputs": [list(pair) for pair in zip(node["output"], node["output_name"], strict=True)],
        }
        for name, node in sorted(info.items())
        if node["python_module"].startswith("custom_nodes.sana")
    }


def test_every_node_is_written_down_and_has_the_packs_prefix(interface):
    assert list(interface) == list(INTERFACE)
    assert all(name.startswith("SanaNodes") for name in interface)


@pytest.mark.parametrize("name", INTERFACE)
def test_inputs_and_outputs_are_those_of_saved_workflows(interface, name):
    assert list(interface[name]["inputs"].items()) == list(INTERFACE[name]["inputs"].items())
    assert interface[name]["outputs"] == INTERFACE[name]["outputs"]
