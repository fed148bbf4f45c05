"""What the registry's rules and the house's ask of the files that users get."""

import ast
import json
import re
import subprocess
import sys

import pytest
from setup import ROOT
from versions import lowest_python, lowest_versions

from sana_core import errors

SHIPPED = [ROOT / "__init__.py", *sorted(ROOT.glob("nodes/**/*.py")), *sorted(ROOT.glob("sana_core/**/*.py"))]
BANNED_CALLS = {"print", "eval", "exec", "compile", "__import__"}
BANNED_MODULES = {"pickle", "subprocess", "socket", "os", "ctypes", "urllib", "requests", "aiohttp"}
# nothing else makes a file safe from a power cut, lists 100,000 files in a second, names a rank of a training, or ends
# one that waits in vain
DESCRIPTORS = {"O_RDONLY", "O_WRONLY", "close", "devnull", "dup2", "fstat", "fsync", "open"}
ALLOWED_NAMES = {"os": {*DESCRIPTORS, "_exit", "cpu_count", "getpid", "scandir", "stat"}}
BANNED_ATTRIBUTES = {("sys", "path"), ("os", "environ"), ("os", "system")}
# These methods of diffusers and transformers look up classes, code, weights or kernels by names in a folder's JSON.
LOOKUPS = {"from_pretrained", "from_config", "from_single_file", "load_config", "get_class_from_dynamic_module"}
# These classes choose another class by a name in a folder's JSON.
CHOOSERS = re.compile(r"Auto[A-Z]\w+|DiffusionPipeline|pipeline")
# (file, function, method) of the calls that a reader has checked. The first builds a class that this package names,
# from a configuration that `check_config` has read, and reads no file. The second reads safetensors of the class that
# it names, whose configuration has no code and no quantiser.
CHECKED_LOOKUPS = {
    ("sana_core/checkpoints/load.py", "build_module", "from_config"),
    ("sana_core/commands/decode.py", "load_kl_autoencoder", "from_pretrained"),
}

# (module, name): where text could leave without passing through `one_line` of sana_core/runtime/text.py.
WAYS_OUT = {("logging", name) for name in ("getLogger", "debug", "info", "warning", "error", "critical", "exception")}
WAYS_OUT |= {("warnings", "warn"), ("warnings", "warn_explicit"), ("traceback", "print_exc"), ("sys", "excepthook")}
WAYS_OUT |= {("sys", name) for name in ("stdout", "stderr", "__stdout__", "__stderr__")}
# These methods of ComfyUI's server take text for the canvas.
CANVAS = {"send_progress_text", "send_sync"}
# Names of the errors' classes.
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
# {a way out: the files, and folders with a slash at the end, that may use it}
USES_WAY_OUT = {
    # The actor returns the warnings of a call to the caller. Loading hides warnings of diffusers' import.
    "getLogger": {"sana_core/runtime/text.py", "sana_core/cluster/actor.py", "sana_core/runtime/libraries.py"},
    "send_progress_text": {"nodes/host/report.py"},
    "send_sync": {"nodes/host/report.py"},
    "stdout": {"sana_core/runtime/text.py", "sana_core/__main__.py"},
    # The processes of a parallel training say when another one is lost.
    "stderr": {
        *("sana_core/runtime/text.py", "sana_core/__main__.py", "sana_core/commands/"),
        "sana_core/training/ranks.py",
    },
    # The command line replaces streams that the shell has closed.
    "getattr sys": {"sana_core/__main__.py"},
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_code_does_nothing_that_the_registry_bans(path):
    source = path.read_text(encoding="ascii")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS, node.lineno
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names}
            modules = {node.module or ""} if isinstance(node, ast.ImportFrom) else names
            if not (isinstance(node, ast.ImportFrom) and names <= ALLOWED_NAMES.get(node.module, set())):
                assert not {name.split(".")[0] for name in modules} & BANNED_MODULES, node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in BANNED_ATTRIBUTES, node.lineno
    assert not re.search(r"[\"']cuda|\.cuda\(|trust_remote_code|\.eval\(", source)
    # Ray sends the actor's module. Messages are never pickled.
    assert not re.search(r"cloudpickle(?!\.register_pickle_by_value)", source)


def lookups(source):
    """Return {(function, method)} of all LOOKUPS in `source`: attributes, names, and strings for getattr."""
    calls = set()

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        names = [getattr(node, field, None) for field in ("attr", "id", "name", "value")]
        calls.update((function, name) for name in names if isinstance(name, str) and name in LOOKUPS)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("diffusers", "transformers"):
            names = [alias.name for alias in node.names]
            calls.update((function, name) for name in names if CHOOSERS.fullmatch(name) or "dynamic" in node.module)
        if isinstance(node, ast.Attribute) and CHOOSERS.fullmatch(node.attr) and node.attr != "pipeline":
            calls.add((function, node.attr))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return calls


def test_no_call_looks_up_a_class_by_a_name_in_a_folder():
    calls = {
        (path.relative_to(ROOT).as_posix(), *lookup)
        for path in SHIPPED
        for lookup in lookups(path.read_text(encoding="ascii"))
    }
    assert calls == CHECKED_LOOKUPS


@pytest.mark.parametrize(
    "source, name",
    [
        ("CLIPModel.from_pretrained(folder)", "from_pretrained"),
        ("load = CLIPModel.from_pretrained\nload(folder)", "from_pretrained"),
        ("getattr(CLIPModel, 'from_pretrained')(folder)", "from_pretrained"),
        ("getattr(diffusers, name).from_config(config)", "from_config"),
        ("diffusers.DiffusionPipeline(folder)", "DiffusionPipeline"),
        ("from transformers import AutoModel as CLIPModel", "AutoModel"),
        ("from transformers import pipeline", "pipeline"),
        (
            "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
            "get_class_from_dynamic_module",
        ),
    ],
)
def test_every_lookup_of_a_class_by_name_is_detected(source, name):
    assert lookups(f"def load(folder):\n    {source.splitlines()[0]}") == {("load", name)}


def ways_out(source):
    """Return all ways in `source` by which text leaves, and the classes of errors that change their message."""
    tree, ways = ast.parse(source), set()
    modules = {module for module, _ in WAYS_OUT}
    # {name in this file: module}, because a module may have another name.
    names = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in modules
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            ways.update(alias.name for alias in node.names if (node.module, alias.name) in WAYS_OUT)
        elif isinstance(node, ast.Attribute):
            module = names.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if node.attr in CANVAS or (module, node.attr) in WAYS_OUT:
                ways.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            module, name = names.get(getattr(node.args[0], "id", "")), getattr(node.args[1], "value", None)
            if module and name is None:
                # The name is computed, and may be any of the module's.
                ways.add(f"getattr {module}")
            elif (module, name) in WAYS_OUT:
                ways.add(name)
        elif isinstance(node, ast.ClassDef):
            bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
            methods = {entry.name for entry in node.body if isinstance(entry, ast.FunctionDef)}
            if bases & ERRORS and methods & {"__init__", "__new__", "__str__", "__repr__", "__reduce__"}:
                ways.add(node.name)
    return ways


def may_use(file, way):
    return any(file == allowed or (allowed[-1] == "/" and file.startswith(allowed)) for allowed in USES_WAY_OUT[way])


def test_text_leaves_only_through_the_boundary():
    uses = [
        (path.relative_to(ROOT).as_posix(), way)
        for path in SHIPPED
        if path.name != "errors.py"
        for way in ways_out(path.read_text(encoding="ascii"))
    ]
    assert {way for _, way in uses} == USES_WAY_OUT.keys()
    assert not [(file, way) for file, way in uses if not may_use(file, way)]


@pytest.mark.parametrize(
    "source, way",
    [
        ("import logging\nlogger = logging.getLogger(__name__)", "getLogger"),
        ("import logging as log\nlog.warning(name)", "warning"),
        ("from logging import getLogger", "getLogger"),
        ("import warnings\nwarnings.warn(name)", "warn"),
        ("import sys\nsys.stderr.write(name)", "stderr"),
        ("from sys import stdout as out", "stdout"),
        ("import sys\nwrite = getattr(sys, 'stdout').write", "stdout"),
        ("import sys\nwrite = getattr(sys, name).write", "getattr sys"),
        ("PromptServer.instance.send_progress_text(name, node)", "send_progress_text"),
        ("server.send_sync('note', {'text': name})", "send_sync"),
        ("class NameError(InputError):\n    def __str__(self):\n        return self.name", "NameError"),
        ("class NameError(errors.InputError):\n    def __init__(self, name):\n        self.name = name", "NameError"),
    ],
)
def test_every_way_around_the_boundary_is_detected(source, way):
    assert ways_out(source) == {way}


def causes(source):
    """Return the lines that raise an error of errors.py with a cause."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.cause, ast.Name)
        if getattr(node.exc.func, "id", "") in ERRORS
    ]


def test_no_error_has_a_cause_that_a_log_would_write():
    """ComfyUI logs the causes of an error too, and they may contain any path.

    Those of a training stay. SANA Train removes them, and ranks look at them.
    """
    assert causes("try:\n    pass\nexcept OSError as error:\n    raise ReadError('a') from error") == [4]
    paths = [path for path in SHIPPED if ROOT / "sana_core" / "training" not in path.parents]
    assert not [(path.name, causes(path.read_text(encoding="ascii"))) for path in paths if causes(path.read_text())]


def test_sana_core_never_looks_up():
    for path in ROOT.glob("sana_core/**/*.py"):
        assert not re.search(r"^\s*(from|import) (comfy|nodes|folder_paths|sana_core)", path.read_text(), re.M), path


def test_only_host_knows_the_host():
    for path in ROOT.glob("nodes/*.py"):
        imports = re.findall(r"^\s*(?:from|import) (\w+[\w.]*)", path.read_text(), re.M)
        assert set(imports) <= {"inspect", "comfy_api.latest"}, path


def test_nodes_import_the_heavy_half_of_host_only_when_they_run():
    for path in ROOT.glob("nodes/*.py"):
        at_import = re.findall(r"^from \.host(?:\.(\w+))? import", path.read_text(), re.M)
        assert set(at_import) <= {"folders", "latents", "training_fields"}, path


def test_importing_sana_core_imports_no_heavy_library():
    code = "import sys, sana_core; sys.exit(', '.join({'diffusers', 'transformers', 'peft'} & set(sys.modules)) or 0)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_requirements_are_the_dependencies_of_the_project():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)\]", text, re.M | re.S).group(1)
    assert re.findall(r'"(.+?)"', listed) == (ROOT / "requirements.txt").read_text().split()
    assert not any(line.startswith("torch") for line in (ROOT / "requirements.txt").read_text().split())


def test_the_documents_name_the_lowest_versions_that_are_declared():
    text = (ROOT / "docs" / "developer" / "development.md").read_text()
    (sentence,) = re.findall(r"^The lowest are (.+?)\. `make test-all`", text, re.M | re.S)
    named = dict(re.findall(r"([\w-]+) (\d[\d.]*)", sentence))
    assert named == {**lowest_versions(), "Python": lowest_python()}
    assert f'requires-comfyui = ">={".".join(map(str, oldest_host()))}.0"' in (ROOT / "pyproject.toml").read_text()
    assert "ComfyUI {}.{} or newer".format(*oldest_host()) in (ROOT / "README.md").read_text()


def oldest_host():
    """The oldest ComfyUI version that the pack accepts."""
    source = (ROOT / "nodes" / "host" / "compat.py").read_text()
    return ast.literal_eval(re.search(r"^OLDEST = (.+)$", source, re.M)[1])


def test_every_workflow_has_a_thumbnail_and_holds_no_path():
    workflows = list(ROOT.glob("workflows/*.json"))
    assert workflows
    for path in workflows:
        assert path.with_suffix(".jpg").read_bytes()[:3] == b"\xff\xd8\xff"
        for node in json.loads(path.read_text())["nodes"]:
            assert not any(re.match(r"/|[A-Z]:\\", str(value)) for value in node["widgets_values"])


def test_every_node_has_a_help_page_and_a_translation():
    ids = re.findall(r'node_id="(\w+)"', "".join(path.read_text() for path in ROOT.glob("nodes/*.py")))
    assert len(ids) == len(set(ids)) and all(name.startswith("Sana") for name in ids)
    assert {path.stem for path in ROOT.glob("web/docs/*.md")} == set(ids)
    for file in ROOT.glob("locales/*/nodeDefs.json"):
        assert set(json.loads(file.read_text(encoding="utf-8"))) == set(ids)
    assert {path.parent.name for path in ROOT.glob("web/docs/*/zh.md")} == set(ids)
