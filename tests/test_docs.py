"""The pages of the documentation: their programs run, their lists are complete."""

import inspect
import re
from pathlib import Path

import jax
import pytest
from helpers import REPOSITORY
from pages import Page, run
from test_public import own_names
from test_readme import first_program

pytestmark = pytest.mark.program

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if Page(p).blocks], ids=lambda p: p.stem
)
@pytest.mark.filterwarnings("ignore::eqaccum.EqaccumWarning")
@pytest.mark.timeout(400)  # the cookbook compiles a score of programs
def test_the_programs_of_a_page_run(page):
    run(Page(page))


@pytest.mark.parametrize(
    "page", [p for p in PAGES if Page(p).peers], ids=lambda p: p.stem
)
@pytest.mark.filterwarnings("default")  # the peers' own
def test_the_same_program_elsewhere(page, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for module in sorted(Page(page).peers):
        pytest.importorskip(module, exc_type=ImportError)
    with jax.numpy_rank_promotion("allow"):  # Keras relies on it
        run(Page(page), peers=True)


def test_a_failing_program_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(Page(page))
    assert caught.traceback[-1].lineno == 4  # counted from 0, in the page


def test_the_first_program_is_the_readme_s():
    block = next(b for b in Page(DOCS / "index.md").blocks if "readme" in b.classes)
    assert block.code == first_program()


def test_each_public_name_is_in_the_api():
    listed = re.findall(
        r"^::: (\S+)$",
        "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md")),
        re.MULTILINE,
    )
    assert sorted(listed) == sorted(own_names())


def sections(name: str) -> set[str]:
    text = inspect.getdoc(own_names()[name]) or ""
    found = set(re.findall(r"^\*\*([A-Za-z ]+):\*\*$", text, re.MULTILINE))
    return {title.replace("Main arguments", "Arguments") for title in found}


def test_each_public_function_says_what_it_takes_gives_and_raises():
    for name, value in own_names().items():
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            wanted = {"Arguments"} if signature.parameters else set()
            wanted |= {"Returns"} if signature.return_annotation is not None else set()
            wanted |= {"Raises"} if signature.parameters else set()
            assert wanted <= sections(name), name


def test_each_public_record_says_what_it_holds():
    for name, value in own_names().items():
        if inspect.isclass(value) and not issubclass(value, BaseException):
            assert {"Arguments", "Attributes", "Names"} & sections(name), name


def test_each_page_is_in_the_navigation():
    nav = (REPOSITORY / "mkdocs.yml").read_text().partition("nav:")[2]
    listed = re.findall(r"[\w/]+\.md", nav)
    assert sorted(listed) == sorted(str(Path(page).relative_to(DOCS)) for page in PAGES)
