"""What is built and handed out: the wheel, the sdist, the versions, the changelog."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers import REPOSITORY

pytestmark = pytest.mark.program

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
KINDS = ("added", "changed", "fixed", "removed")
NEWS = [
    path
    for path in sorted((REPOSITORY / "news").iterdir())
    if path.name not in ("README.md", "_template.md")
]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_is_the_package_and_no_more(wheel):
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"eqaccum", f"eqaccum-{PROJECT['version']}.dist-info"}
    here = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "eqaccum").rglob("*.py")
    }
    assert here | {"eqaccum/py.typed"} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_says_what_it_needs(wheel):
    (path,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    told = email.message_from_bytes(wheel.read(path))
    assert told["Requires-Python"] == ">=3.11"
    extras = set(told.get_all("Provides-Extra") or ())
    assert extras >= {"plot", "checkpoint", "tensorboard", "grain", "paper", "docs"}
    always = [line for line in told.get_all("Requires-Dist") or () if ";" not in line]
    assert len(always) == len(PROJECT["dependencies"])


def test_the_sdist_has_what_its_tests_need(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("eqaccum", "tests", "examples", "docs", "paper_repro"):
        ours = {
            str(file.relative_to(REPOSITORY))
            for file in (REPOSITORY / folder).rglob("*.py")
        }
        assert ours <= names, folder
    for file in ("Makefile", "mkdocs.yml", "README.md", "CHANGELOG.md", "LICENSE"):
        assert file in names


def test_one_version():
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [
        PROJECT["version"]
    ]
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])


def test_the_oldest_and_newest_python_are_said_everywhere():
    readme = (REPOSITORY / "README.md").read_text()
    start = (REPOSITORY / "docs/index.md").read_text()
    assert "Python 3.11 to 3.13" in readme and "Python 3.11 to 3.13" in start
    assert PROJECT["requires-python"] == ">=3.11"


def test_the_changelog_takes_every_fragment():
    done = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "## 9.9.9 (" in done.stdout
    for path in NEWS:
        assert path.name.split(".")[1:] in [[kind, "md"] for kind in KINDS], path.name
        text = path.read_text().strip()
        assert text and text.splitlines()[0] in done.stdout, path.name
