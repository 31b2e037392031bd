"""The first program in the README runs as printed."""

import re

import pytest
from helpers import REPOSITORY, run_python

pytestmark = pytest.mark.program

README = (REPOSITORY / "README.md").read_text()


def first_program() -> str:
    found = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


@pytest.mark.timeout(320)
def test_first_program_runs_and_learns():
    done = run_python(first_program(), timeout=300, JAX_NUM_CPU_DEVICES="1")
    assert done.returncode == 0, done.stderr
    *plan, accuracy = done.stdout.strip().splitlines()
    said = re.search(r"`1024 = (\d+) passes of (\d+) \(([\d.]+) of 3.0 MiB\)`", README)
    whole = re.search(r"one pass would\s+take ([\d.]+) MiB", README)
    right = re.search(r"(\d+) % of the digits", README)
    assert said is not None and whole is not None and right is not None
    rows = [line.split() for line in plan if re.match(r"\s+\d+\s+\d+ ", line)]
    sizes = {(row[0], row[1]): float(row[2]) for row in rows}
    # Another processor's code takes a little more or less.
    assert sizes[said[1], said[2]] == pytest.approx(float(said[3]), abs=0.15)
    assert sizes["1", "1024"] == pytest.approx(float(whole[1]), abs=0.3)
    assert f"= {said[1]} passes of {said[2]} (" in plan[0]
    assert 100 * float(accuracy) == pytest.approx(float(right[1]), abs=1)


def test_first_program_is_short():
    lines = [line for line in first_program().splitlines() if line.strip()]
    assert len(lines) <= 10


def test_commands_exist():
    makefile = (REPOSITORY / "Makefile").read_text()
    pages = README + (REPOSITORY / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"\bmake ([a-z]+)\b(?= )", pages))
    assert targets >= {"quickstart", "test", "check"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (REPOSITORY / link).exists(), link
