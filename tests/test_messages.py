"""Every message is in the documentation, word for word."""

import importlib.util
import inspect
import re
import sys
import types

import numpy as np
import pytest
from helpers import REPOSITORY

import eqaccum
from eqaccum import _errors
from eqaccum._errors import _exceptions

PAGE = (REPOSITORY / "docs" / "errors.md").read_text()
# What the room exports besides messages.
TOOLS = {"name_of", "say", "shorten", "short_tracebacks", "warn"}


def load(name: str) -> types.ModuleType:
    path = REPOSITORY / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


MESSAGES = load("_messages")


def test_the_page_is_up_to_date():
    assert MESSAGES.page(PAGE) == PAGE, "run: python docs/_messages.py"
    other = PAGE.replace("at the door", "elsewhere")
    assert MESSAGES.page(other) == other  # what people wrote stays
    assert MESSAGES.page(PAGE.replace("global\\_batch=", "batch=")) == PAGE


def test_each_message_is_listed():
    listed = re.findall(r"^- \*\*(.+?)\*\*.*: \S", PAGE, re.MULTILINE)
    made = {
        name
        for name, value in vars(_errors).items()
        if inspect.isfunction(value) and name not in TOOLS
    }
    assert len(made) > 150
    assert {name.replace("_", " ") for name in made} <= set(listed)


def test_the_tree_is_that_of_the_exceptions():
    tree = (_exceptions.__doc__ or "").partition("\n\n")[2].strip()
    assert tree in PAGE
    for name in re.findall(r"\b[A-Z]\w+(?:Error|Warning|Fit|Tell)\b", tree):
        if hasattr(eqaccum, name):
            assert f"| `{name}` |" in PAGE or name in ("EqaccumError", "PlanError")


CALLS = {
    "a list": lambda: eqaccum.plan(0, [np.ones(3)], global_batch=1),
    "an unknown argument": lambda: eqaccum.plan(
        np.ones(2, np.float32), np.ones(3), global_batch=1, batch_size=4
    ),
    "a global batch": lambda: eqaccum.plan(
        np.ones(2, np.float32), np.ones((3, 2)), global_batch=-1, loss=print
    ),
    "a patience": lambda: eqaccum.callbacks.EarlyStopping(patience=0),
    "workers": lambda: eqaccum.data.examples([1], workers=-1),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_raised_is_found_on_the_page(name):
    with pytest.raises(eqaccum.InputError) as caught:
        CALLS[name]()
    told = re.sub(r"\s+", " ", str(caught.value))
    assert [line for line in PAGE.splitlines() if matches(line, told)], told


def matches(line: str, told: str) -> bool:
    """Whether an entry of the list is this message, whatever its words in braces."""
    entry = re.match(r"- \*\*.+?\*\*(?: \(`\w+`\))?: (.+)", line)
    if entry is None:
        return False
    text = re.sub(r"\\(.)", r"\1", entry.group(1))
    pattern = ".*".join(map(re.escape, re.split(r"\{[^{}]*\}", text)))
    return re.fullmatch(pattern, told) is not None
