"""The first program in the README runs as printed."""

import re

from helpers import REPOSITORY, run_python

README = (REPOSITORY / "README.md").read_text()


def first_program() -> str:
    found = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


def test_first_program_runs_and_learns():
    done = run_python(first_program(), JAX_NUM_CPU_DEVICES="1")
    assert done.returncode == 0, done.stderr
    *plan, accuracy = done.stdout.strip().splitlines()
    assert "microbatch" in "\n".join(plan)
    assert float(accuracy) > 0.9


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
