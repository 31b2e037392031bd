"""The order of the rooms: imports go down only, and a few things never come in.

The first test reads the package's own files; the second gives the same reader made-up
packages, each with one thing wrong, to show that it would notice.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import REPOSITORY

FLOOR_0 = {"_types", "_errors", "_tree"}
FLOORS_0_TO_2 = FLOOR_0 | {"_mesh", "_data", "_plan", "_accumulate"}
FLOORS_0_TO_3 = FLOORS_0_TO_2 | {"_coupled", "_step", "losses"}
# "" is the package's front door: what it exports is public.
PUBLIC = {"", "data", "losses", "callbacks"}

# What the files of a room may import besides their own room.
MAY_IMPORT = {
    "_types": FLOOR_0,
    "_errors": FLOOR_0,
    "_tree": FLOOR_0,
    "_mesh": FLOOR_0,
    "_data": FLOOR_0,
    "_plan": FLOOR_0,
    "_accumulate": FLOOR_0 | {"_mesh"},
    "_coupled": FLOORS_0_TO_2,
    "_step": FLOORS_0_TO_2,
    "losses": FLOORS_0_TO_2,
    "_doors": FLOORS_0_TO_3,
    "_fit": FLOORS_0_TO_3 | {"_doors"},
    "data": FLOOR_0 | {"_data"},
    "callbacks": FLOORS_0_TO_3 | {"_doors", "_fit"},
    "report": PUBLIC,
    "_cli": PUBLIC | {"_errors"},
    "__main__": PUBLIC | {"_cli"},
}
PUBLIC_FILES = {"__main__", "data", "losses", "callbacks", "report"}
# Heavy or optional: imported by the function that needs them, when it is called.
LAZY = {
    "datasets",
    "grain",
    "matplotlib",
    "orbax",
    "pandas",
    "sklearn",
    "tensorboard",
    "tensorboardX",
    "torch",
    "wandb",
}


@dataclass(frozen=True)
class Module:
    name: str  # dotted, without the package's own name: "_plan._search"; "" is the root
    is_package: bool
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Import:
    target: str  # as Module.name
    names_public: bool  # no private name is taken from the front door


def read_package(folder: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, is_package, ast.parse(path.read_text()))
    return modules


def imports_of(
    module: Module, modules: dict[str, Module], package: str
) -> Iterator[Import]:
    """All imports of the package's own modules, those inside functions included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root, _, rest = alias.name.partition(".")
                if root == package:
                    yield Import(rest, names_public=True)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, package)
            if base is None:
                continue
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                if inner in modules:
                    yield Import(inner, names_public=True)
                else:
                    yield Import(base, not alias.name.startswith("_"))


def _base(node: ast.ImportFrom, module: Module, package: str) -> str | None:
    """What `from X import` names, as Module.name; None if it is not the package's."""
    if node.level == 0:
        root, _, rest = (node.module or "").partition(".")
        return rest if root == package else None
    parts = [package, *filter(None, module.name.split("."))]
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join(parts[1:] + ([node.module] if node.module else []))


def wrong_arrows(modules: dict[str, Module], package: str) -> Iterator[str]:
    for module in modules.values():
        if module.name == "":
            continue
        if module.room not in MAY_IMPORT:
            yield f"{module.name}: the room {module.room} has no floor"
            continue
        for arrow in imports_of(module, modules, package):
            room = arrow.target.partition(".")[0]
            allowed = MAY_IMPORT[module.room] | {module.room}
            if room not in allowed or not (room or arrow.names_public):
                yield f"{module.name} imports {arrow.target or 'the front door'}"


def cycles(modules: dict[str, Module], package: str) -> Iterator[str]:
    graph = {
        module.name: {arrow.target for arrow in imports_of(module, modules, package)}
        for module in modules.values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "import cycle: " + " -> ".join(name or "(root)" for name in error.args[1])


def definitions_in_init(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if module.is_package:
            for node in module.tree.body:
                is_docstring = isinstance(node, ast.Expr) and isinstance(
                    node.value, ast.Constant
                )
                if not is_docstring and not isinstance(
                    node, ast.Import | ast.ImportFrom
                ):
                    yield f"{module.name}.__init__:{node.lineno} is no re-export"


def public_files(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        *_, last = module.name.split(".")
        public_here = last in PUBLIC_FILES and "." not in module.name
        if last and not last.startswith("_") and not public_here:
            yield f"{module.name}: a private file's name begins with _"


def private_jax(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            for name in _dotted_names(node):
                root, *rest = name.split(".")
                private = [part for part in rest if part.startswith("_")]
                if root in {"jax", "jaxlib"} and set(private) - {"__version__"}:
                    yield f"{module.name} uses {name}"


def _dotted_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []


def eager_imports(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for node in _run_at_import(module.tree):
            if isinstance(node, ast.Import):
                roots = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = {(node.module or "").partition(".")[0]}
            else:
                roots = set()
            for root in sorted(roots & LAZY):
                yield f"{module.name} imports {root} when it is imported itself"


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(
            child.test
        )
        if not is_function and not is_typing:
            yield child
            yield from _run_at_import(child)


def faults(folder: Path) -> list[str]:
    """Everything in the package in `folder` that is against the order of rooms."""
    modules = read_package(folder)
    return [
        *wrong_arrows(modules, folder.name),
        *cycles(modules, folder.name),
        *definitions_in_init(modules),
        *public_files(modules),
        *private_jax(modules),
        *eager_imports(modules),
    ]


def test_package_keeps_the_order_of_rooms():
    folder = REPOSITORY / "eqaccum"
    assert len(read_package(folder)) > 5
    assert faults(folder) == []


SOUND = {
    "__init__.py": '"""Docs."""\nfrom ._doors import plan as plan\n',
    "_errors/__init__.py": "from ._text import empty as empty\n",
    "_errors/_text.py": "import jax\ndef empty(): return ValueError()\n",
    "_mesh.py": "from . import _errors\nfrom jax.sharding import Mesh\n",
    "_plan/__init__.py": "from ._search import search as search\n",
    "_plan/_search.py": "from .._errors import empty\ndef search(): pass\n",
    "_step.py": "from ._plan import search\nfrom . import _mesh\nx = _mesh.__name__\n",
    "_doors.py": "from ._step import x\n"
    "def plan():\n    import matplotlib.pyplot as plt\n    return plt\n",
    "data.py": "from ._errors import empty as empty\n",
    "report/__init__.py": "",
    "report/_table.py": "import eqaccum\nfrom eqaccum import plan\n",
    "_cli/__init__.py": "from ._main import main as main\n",
    "_cli/_main.py": "from .. import _errors, plan\ndef main(): pass\n",
    "__main__.py": "from ._cli import main\nfrom . import plan\n",
}
BROKEN = {
    "upward": ("_plan/_search.py", "from .._step import x", "imports _step"),
    "upward, absolute": ("_plan/_search.py", "import eqaccum._step", "imports _step"),
    "upward, lazily": (
        "_plan/_search.py",
        "def f():\n    from .. import _step",
        "imports _step",
    ),
    "sideways": ("_step.py", "from ._coupled import bank", "imports _coupled"),
    "up from the ground": ("_errors/_text.py", "from .. import _mesh", "imports _mesh"),
    "accumulate looks at plans": (
        "_accumulate/_scan.py",
        "from .._plan import search",
        "imports _plan",
    ),
    "through the front door": ("_step.py", "import eqaccum", "the front door"),
    "report looks inside": (
        "report/_table.py",
        "from eqaccum import _doors",
        "imports _doors",
    ),
    "report takes a private name": (
        "report/_table.py",
        "from eqaccum import _secret",
        "the front door",
    ),
    "a room without a floor": ("_utils.py", "x = 1", "_utils has no floor"),
    "a cycle": ("_errors/_text.py", "from . import empty", "import cycle"),
    "a cycle of rooms": ("_tree.py", "from ._types import a", "import cycle"),
    "a definition in __init__": ("__init__.py", "def f(): pass", "no re-export"),
    "a constant in __init__": ("_plan/__init__.py", "LIMIT = 1", "no re-export"),
    "an open file": ("_plan/search.py", "x = 1", "begins with _"),
    "private jax": ("_step.py", "from jax._src import core", "uses jax._src.core"),
    "private jax, imported whole": ("_step.py", "import jax._src", "uses jax._src"),
    "private jax, by attribute": (
        "_step.py",
        "import jax\njax._src.core",
        "uses jax._src",
    ),
    "a heavy import": ("_doors.py", "import matplotlib.pyplot", "imports matplotlib"),
    "a guarded heavy import": (
        "_doors.py",
        "try:\n    from torch import nn\nexcept ImportError:\n    pass",
        "imports torch",
    ),
}


def write_package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "eqaccum" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "eqaccum"


def test_a_sound_package_has_no_fault(tmp_path):
    assert faults(write_package(tmp_path, SOUND)) == []


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_seen(name, tmp_path):
    file, line, fault = BROKEN[name]
    files = dict(SOUND)
    files["_types.py"] = "from ._tree import b\n"
    files["_tree.py"] = ""
    files[file] = f"{files.get(file, '')}\n{line}\n"
    found = faults(write_package(tmp_path, files))
    assert [text for text in found if fault in text], found
