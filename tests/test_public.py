"""What can be imported from the front doors, and what importing them costs."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import tomllib
import types
from typing import Any

import pytest
from helpers import REPOSITORY, run_python

# Imported when first needed, if installed.
HEAVY = (
    "datasets grain matplotlib orbax pandas sklearn "
    "tensorboard tensorboardX torch wandb"
)


def doors() -> dict[str, types.ModuleType]:
    """The package and its public submodules, those that exist."""
    names = ["eqaccum", "eqaccum.callbacks", "eqaccum.data", "eqaccum.losses"]
    return {
        name: importlib.import_module(name)
        for name in names
        if importlib.util.find_spec(name) is not None
    }


def public_names() -> dict[str, Any]:
    """Everything that a user can import, by its full name; modules left out."""
    return {
        f"{door}.{name}": value
        for door, module in doors().items()
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def own_names() -> dict[str, Any]:
    """As `public_names`, less what a door's own file imports to write its code."""
    return {
        name: value
        for name, value in public_names().items()
        if getattr(value, "__module__", "").partition(".")[0] == "eqaccum"
    }


def test_the_doors_are_there():
    names = public_names()
    for door in ("fit", "make_step", "plan", "value_and_grad"):
        assert callable(names[f"eqaccum.{door}"])


def test_front_door_exports_only_its_own():
    foreign = set(public_names()) - set(own_names())
    assert {name for name in foreign if name.count(".") == 1} == set()


def test_nothing_is_exported_twice():
    seen: dict[int, str] = {}
    for name, value in own_names().items():
        assert id(value) not in seen, (name, seen[id(value)])
        seen[id(value)] = name


def test_no_list_of_exports_is_kept_by_hand():
    for module in doors().values():
        assert not hasattr(module, "__all__")


def test_public_names_have_docs():
    bare = [name for name, value in own_names().items() if not inspect.getdoc(value)]
    assert bare == []


def test_public_names_have_an_example_that_parses():
    lacking = []
    for name, value in own_names().items():
        if inspect.isclass(value) and issubclass(value, BaseException | Warning):
            continue  # raised by eqaccum, not by its users
        blocks = re.findall(
            r"```python\n(.*?)```", inspect.getdoc(value) or "", re.DOTALL
        )
        for block in blocks:
            ast.parse(textwrap.dedent(block))
        if not blocks:
            lacking.append(name)
    assert lacking == []


IMPORT_AND_LIST = f"""
import sys
before = set(sys.modules)
import eqaccum
print(*[name for name in "{HEAVY}".split() if name in sys.modules])
"""


@pytest.mark.parametrize(
    "first, loaded", [("", ""), ("import matplotlib", "matplotlib")]
)
def test_import_loads_nothing_heavy(first, loaded):
    done = run_python(first + IMPORT_AND_LIST)
    assert (done.returncode, done.stdout.strip()) == (0, loaded), done.stderr


IMPORT_THEN_CONFIGURE = """
import eqaccum, jax
{}
jax.config.update("jax_num_cpu_devices", 3)
print(len(jax.devices("cpu")))
"""


@pytest.mark.parametrize("between, works", [("", True), ("jax.devices()", False)])
def test_import_starts_no_backend(between, works):
    # jax.distributed and the number of devices must still be open to the user.
    done = run_python(IMPORT_THEN_CONFIGURE.format(between), JAX_PLATFORMS="cpu")
    assert (done.stdout.strip() == "3") is works, done.stderr


def test_dependencies_are_those_imported():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[><=\[]", line)[0] for line in project["dependencies"]}
    imported = {"jax" if name == "jaxlib" else name for name in roots_imported()}
    assert imported - set(HEAVY.split()) == declared


def roots_imported() -> set[str]:
    """The foreign packages that any file of the package imports, lazily or not."""
    roots = set()
    for path in (REPOSITORY / "eqaccum").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots.add((node.module or "").partition(".")[0])
    return roots - {"eqaccum"} - sys.stdlib_module_names
