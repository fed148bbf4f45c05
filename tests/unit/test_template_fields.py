"""The inputs of a node that scripts/workflow.py reads from a server's /object_info."""

from workflow import DYNAMIC, fields_of

CODEC = {"key": "auto", "inputs": {"required": {"quality": ["INT", {"default": 23}]}}}
FORMATS = [
    {"key": "auto", "inputs": {"required": {"codec": [DYNAMIC, {"options": [CODEC]}]}}},
    {"key": "gif", "inputs": {"required": {}}},
]
INFO = {"SaveVideo": {"input": {"required": {"video": ["VIDEO", {}], "format": [DYNAMIC, {"options": FORMATS}]}}}}


def test_a_choice_inside_of_a_choice_has_its_first_value_unless_the_template_sets_it():
    """Save Video of newer versions of ComfyUI has a codec for each format. The templates set only the format."""
    names = ["video", "format", "format.codec", "format.codec.quality"]
    for values in ({}, {"format": "auto"}):
        fields = fields_of(INFO, "SaveVideo", values)
        assert list(fields) == names
        assert [fields[name].default() for name in names[1:]] == ["auto", "auto", 23]
    assert list(fields_of(INFO, "SaveVideo", {"format": "gif"})) == names[:2]
