"""The property tests in their nightly form, and the page that tells how they went.

    python tests/properties.py [--draws 2000] [--processes 1]

A draw is a batch, its weights, a loss and a cut, chosen by hypothesis. `--draws` is the
number for each test whose programs are compiled once; those that compile for each draw
take a part of it. Writes benchmarks/results/properties.md. With 2,000 draws it takes
about an hour on two idle cores.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
FILE = TESTS / "test_exact_properties.py"
PAGE = TESTS.parent / "benchmarks" / "results" / "properties.md"
_EXAMPLES = re.compile(r"(\d+) passing[a-z ]*, (\d+) failing")


@dataclass
class Test:
    """What hypothesis counted."""

    outcome: str = ""
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0


@dataclass
class Count:
    """A pytest plugin: the tests there are, and what hypothesis counted in them."""

    tests: dict[str, Test] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.tests = {item.name: Test() for item in items}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        told: Any = getattr(item, "hypothesis_statistics", "")
        for passed, failed in _EXAMPLES.findall(told):
            self.tests[item.name].passed += int(passed)
            self.tests[item.name].failed += int(failed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            test = self.tests[report.nodeid.partition("::")[2]]
            test.outcome, test.seconds = report.outcome, report.duration


def run(names: list[str], out: Path) -> int:
    """Runs the tests of these names in this process."""
    count = Count()
    arguments = [f"{FILE}::{name}" for name in names]
    code = pytest.main(
        [*arguments, "-q", "--hypothesis-show-statistics"], plugins=[count]
    )
    out.write_text(json.dumps({k: asdict(v) for k, v in count.tests.items()}))
    return int(code)


def names() -> list[str]:
    count = Count()
    pytest.main([str(FILE), "-qq", "--collect-only"], plugins=[count])
    return list(count.tests)


def run_all(processes: int, folder: Path) -> dict[str, Test]:
    """The tests dealt out to so many processes."""
    found, running = names(), []
    outs = [folder / f"{i}.json" for i in range(processes)]
    for i, out in enumerate(outs):
        command = [sys.executable, __file__, "--into", str(out), *found[i::processes]]
        running.append(subprocess.Popen(command))
    for child in running:
        child.wait()
    told = {k: v for out in outs for k, v in json.loads(out.read_text()).items()}
    return {name: Test(**told[name]) for name in sorted(found)}


def page(tests: dict[str, Test], machine: str, command: str) -> str:
    rows = [
        f"| `{name}` | {t.outcome} | {t.passed:,} | {t.failed:,} | {t.seconds:.0f} |"
        for name, t in tests.items()
    ]
    total = sum(t.passed for t in tests.values())
    failing = sum(t.failed for t in tests.values())
    head = [
        "| test | outcome | draws passed | failed | seconds |",
        "|---|---|---|---|---|",
    ]
    return "\n\n".join(
        [
            "# Properties of the accumulated gradient",
            f"{machine} Made by `{command}`.",
            f"{total:,} draws passed, {failing:,} failed.",
            "\n".join([*head, *rows]),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--into", type=Path, help="run the tests named, in a child")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.into is not None:
        return run(options.names, options.into)
    os.environ["HYPOTHESIS_PROFILE"] = "nightly"
    os.environ["PROPERTY_DRAWS"] = str(options.draws)
    with tempfile.TemporaryDirectory() as folder:
        tests = run_all(options.processes, Path(folder))
    sys.path.insert(0, str(TESTS.parent / "benchmarks"))
    import _machine

    command = f"make test-properties ARGS='--draws {options.draws}'"
    PAGE.write_text(page(tests, _machine.described(_machine.facts()), command) + "\n")
    print(PAGE.read_text())
    return int(any(t.outcome != "passed" for t in tests.values()))


if __name__ == "__main__":
    sys.exit(main())
