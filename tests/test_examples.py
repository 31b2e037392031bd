"""Every example runs with `--tiny`, and its head says what a reader wants to know."""

import ast
import math
import re
import runpy

import pytest
from helpers import REPOSITORY

pytestmark = pytest.mark.program

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
# What the tiny run shows: a bound on what main() returns.
SHOWN = {
    "devices": lambda apart: apart < 1e-5,
    "resume": lambda differing: differing == 0,
}
# The job's devices as the example needs them.
DEVICES = {"devices": 4}


# Those that compile most are run with `-m slow`.
HEAVY = ("vit", "image_classifier", "language_model", "dual_encoder")


def example(path):
    marks = [pytest.mark.devices(DEVICES[path.stem])] if path.stem in DEVICES else []
    marks += [pytest.mark.slow] if path.stem in HEAVY else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [example(path) for path in EXAMPLES])
@pytest.mark.filterwarnings("ignore::eqaccum.EqaccumWarning")
@pytest.mark.timeout(400)
def test_the_tiny_run(path):
    number = runpy.run_path(str(path))["main"](["--tiny"])
    assert SHOWN.get(path.stem, math.isfinite)(number)


@pytest.mark.parametrize("name", ["image_classifier", "vit", "dual_encoder"])
def test_missing_images_are_named(name, monkeypatch, tmp_path):
    from paper_repro.data import _fashion

    monkeypatch.setattr(_fashion, "_FOLDER", tmp_path)
    main = runpy.run_path(str(REPOSITORY / "examples" / f"{name}.py"))["main"]
    with pytest.raises(RuntimeError, match="dataset-fashion-mnist"):
        main([])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_head(path):
    text = path.read_text()
    assert len(text.splitlines()) < 120
    head = ast.get_docstring(ast.parse(text)) or ""
    for entry in ("Command:", "Time:", "Number:"):
        said = head.partition(entry)[2].strip()
        assert said, entry
    assert not {"TIME", "NUMBER"} & set(head.split()), head
    assert any(character.isdigit() for character in head.partition("Number:")[2])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_tells_the_head_s_number(path):
    page = (REPOSITORY / "docs/examples.md").read_text()
    (row,) = re.findall(rf"^\| `{path.name}` \|.*$", page, re.MULTILINE)
    number = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("Number:")
    first = re.search(r"\d[\d.]*", number[2])
    assert first is not None and first[0] in row
